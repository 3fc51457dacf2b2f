/** The lists of tunings and of jobs. */

import { keyId, may } from "./api.js";
import { makeList, SEARCH } from "./api_list.js";
import { ENDED } from "./live.js";
import { makeSelection } from "./selection.js";
import { byId, h, replace } from "./dom.js";
import { count, shortId, time, took, words } from "./format.js";
import { codeBlock, labelTags, scopeAlert, stateBadge } from "./parts.js";
import { both, compareAct, peakBar, planWords, rateWords } from "./rows.js";

const STATES = ["QUEUED", "RUNNING", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"];
const STATE = { name: "state", label: "State", options: [["", "Any"], ...STATES.map((state) => [state, words(state)])] };
const MODEL = { name: "model", label: "Model", placeholder: "the full name", suggest: (row) => row.model };
const DEVICE = { name: "device", label: "Device", placeholder: "for example cuda:0", suggest: (row) => row.device };
const FINGERPRINT = {
  name: "fingerprint", label: "Fingerprint", placeholder: "64 hexadecimal digits", pattern: "[0-9a-f]*", maxlength: 64,
};

const BATCH = { title: "Effective batch", class: "number", cell: (row) => count(row.effective_batch_size) };
const COMMON = [
  { title: "State", cell: (row) => stateBadge(row) },
  { title: "Model and device", class: "model", cell: (row) => both(row.model, row.device ?? row.hardware) },
  BATCH,
  { title: "Plan", class: "nowrap", cell: planWords },
  { title: "Peak", class: "peak", cell: peakBar },
  { title: "Samples/s", class: "number", cell: rateWords },
];
const TIMES = [
  { title: "Submitted", class: "nowrap", cell: submitted },
  { title: "Owner", class: "nowrap", cell: (row) => (row.key_id === null ? "–" : h("span", { title: row.key_id }, row.owner ?? row.key_id)) },
];

const TUNINGS = {
  path: "/v1/tunings",
  caption: "Tunings",
  noun: "tuning",
  files: true,
  filters: [SEARCH, STATE, MODEL, DEVICE, FINGERPRINT],
  columns: [
    { title: "Tuning", class: "named", cell: (row) => both(linkTo("tunings", row.id, row.name), labelTags(row)) },
    ...COMMON,
    { title: "Probes", class: "number", cell: (row) => count(row.probes) },
    { title: "Recommendation", class: "nowrap", cell: recommendation },
    ...TIMES,
  ],
  empty: {
    title: "No tunings yet",
    text: "A tuning finds the largest micro-batch of a model that fits a device, and the plan for your effective batch.",
    action: h("a", { class: "button button-primary", href: "/tunings/new" }, "New tuning"),
  },
};

const JOBS = {
  path: "/v1/jobs",
  caption: "Jobs",
  noun: "job",
  files: true,
  filters: [SEARCH, STATE, MODEL, DEVICE],
  columns: [
    { title: "Job", class: "named", cell: (row) => both(linkTo("jobs", row.id, row.name), labelTags(row)) },
    ...COMMON,
    { title: "Recommendation", class: "nowrap", cell: (row) => linkTo("recommendations", row.recommendation_id) },
    { title: "Attempts", class: "number", cell: (row) => count(row.attempts) },
    ...TIMES,
  ],
  empty: {
    title: "No jobs yet",
    text: "A job trains with the plan of a recommendation. Start one from a recommendation's page, or send:",
    action: codeBlock(jobCall(), { label: "With curl" }),
  },
};

/** The time of the submission, with the duration, and the priority where it is not the usual one. */
function submitted(row) {
  const duration = took(row);
  const priority = row.priority !== 0 && h("div", {}, `priority ${row.priority}`);
  return both(time(row.created_at), [duration && h("div", {}, "took ", duration), priority]);
}

function linkTo(pages, identifier, name = null) {
  const text = name === null ? { class: "mono" } : {};
  return h("a", { href: `/${pages}/${identifier}`, ...text, title: identifier }, name ?? shortId(identifier));
}

function recommendation(row) {
  return row.recommendation_id === null ? "–" : linkTo("recommendations", row.recommendation_id);
}

function jobCall() {
  const body = JSON.stringify({ recommendation_id: "rec_…", training: { updates: 100 } });
  const key = keyId() === "" ? "" : ` -H "Authorization: Bearer $BATCHWRIGHT_API_KEY"`;
  return `curl ${location.origin}/v1/jobs${key} -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}

/** The acts on chosen rows. The service decides; those that it would refuse are not offered. */
function selectionOf(noun, writeScope, ...more) {
  const own = (row) => keyId() === (row.key_id ?? "") || may("admin");
  const act = (action, applies) => ({
    text: words(action),
    danger: true,
    applies: (row) => own(row) && applies(row),
    run: async (rows, others, place) => (await import("./bulk.js")).changeAll({ kind: noun, action, rows, others, place }),
  });
  const changes = [act("cancel", (row) => !ENDED.has(row.state) && row.state !== "CANCELLING"), act("delete", (row) => ENDED.has(row.state))];
  const acts = [...more, ...(may(writeScope) ? changes : [])];
  return acts.length === 0 ? undefined : makeSelection({ noun, acts });
}

const root = byId("list");
const { kind } = root.dataset;
if (!may(`${kind}:read`)) {
  replace(root, scopeAlert(`${kind}:read`));
} else if (kind === "jobs") {
  makeList({ root, ...JOBS, selection: selectionOf("job", "jobs:run") });
} else {
  const compare = compareAct((row) => row.recommendation_id);
  makeList({ root, ...TUNINGS, selection: selectionOf("tuning", "tunings:write", compare) });
}
