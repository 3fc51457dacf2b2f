/** The lists of tunings, recommendations and jobs, and the audit log. */

import { addressOf, keyId, may } from "./api.js";
import { bar, codeBlock, labelTags, linkTo, nameLink, noPlan, scopeAlert, sparkline, stateBadge, time, took } from "./components.js";
import { shortened } from "./device_words.js";
import { deviceLink } from "./devices.js";
import { byId } from "./dom.js";
import { SEARCH } from "./filters.js";
import { bytes, count, number, plural, seconds, words } from "./format.js";
import { ApiList } from "./list.js";
import { ENDED } from "./live.js";
import { planText } from "./plan.js";
import { html, render } from "./preact-htm.js";
import { CONFIRM, staleLead, validMark } from "./staleness.js";

const MOST_COMPARED = 8;
const CHOICES = JSON.parse(byId("list").dataset.choices);
const OBJECTS = { tun: ["tunings", "tuning"], rec: ["recommendations", "recommendation"], job: ["jobs", "job"], whk: ["webhooks", "webhook"] };
const SESSIONS = ["signed-in", "signed-out"]; // acts that the audit log shows only when asked
/** The acts of the audit log as verbs, with what they were on where the object's id does not tell. */
const ACTS = {
  "key-created": ["created", "API key"], "key-revoked": ["revoked", "API key"], "webhook-created": ["registered"], "webhook-rotated": ["renewed the secret of"],
  prioritized: ["changed the priority of"], "webhook-deleted": ["deleted"], "signed-in": ["signed in"], "signed-out": ["signed out"], pruned: ["pruned old work:"],
};

// --- filters --------------------------------------------------------------------------------------------------------

const STATE = { ...choiceOf("state", "State", CHOICES.states, words), multiple: true };
STATE.pills = STATE.options.filter(([state]) => state !== "CANCELLING");
const NO_PLAN = { name: "outcome", label: "Outcome", options: [["infeasible", "Nothing fits"]], pills: [["infeasible", "Nothing fits"]] };
const MODEL = { name: "model", label: "Model", quick: true, suggest: (row) => row.model };
const DEVICE = { name: "device", label: "Requested device", placeholder: "for example cuda:0", suggest: (row) => row.device };
const SLOT = { name: "slot", label: "Device", quick: true, suggest: (row) => row.slot };
const PRODUCT = { name: "device", label: "Device", quick: true, suggest: (row) => row.device_name };
const HOLDS = { ...choiceOf("stale", "Still valid", ["false", "true"], (value) => (value === "true" ? "stale" : "valid")), quick: true };
const LABEL = { name: "label", label: "Label", placeholder: "team=vision", pattern: "[^=]+=.*", maxlength: 400, multiple: true };
const PROJECT = { name: "project", label: "Project", placeholder: "the full name", suggest: (row) => row.project, maxlength: 63 };
const OWNERS = keyId() === "" ? [] : [{ name: "owner", label: "Owner", placeholder: "name or id of an API key", suggest: (row) => row.owner, maxlength: 100, pills: [[keyId(), "Mine"]] }];
const CREATED = { name: "created_after", label: "Created after", type: "datetime-local" };
const CAUSE = { name: "problem_code", label: "Cause of failure", placeholder: "for example workload-error", pattern: "[a-z0-9\\-]+", maxlength: 64 };
const FINGERPRINT = { name: "fingerprint", label: "Fingerprint", placeholder: "64 hexadecimal digits", pattern: "[0-9a-f]*", maxlength: 64 };

function choiceOf(name, label, values, text = (value) => value) {
  return { name, label, options: values.map((value) => [value, text(value)]) };
}

// --- columns --------------------------------------------------------------------------------------------------------

const BATCH = { title: "Effective batch", class: "number", sort: "effective_batch_size", largestFirst: true, cell: (row) => count(row.effective_batch_size) };
const PLAN = { title: "Plan", class: "nowrap sizes", cell: planWords };
const GAIN = { title: "Gain", class: "number", cell: gainWords };
const PEAK = { title: "Peak memory", class: "peak", sort: "peak", largestFirst: true, cell: peakBar };
const RATE = { title: "Samples/s per rank", class: "number", sort: "samples_per_second", largestFirst: true, cell: ({ samples_per_second: rate }) => rate !== null && number(rate, 3) };
const TUNED_PEAK = { ...PEAK, title: "Tuned peak" }; // of the recommendation, not of the run
const WORK = [
  { title: "State", class: "nowrap", sort: "state", cell: (row) => html`<div>${stateBadge(row)}${row.priority !== 0 && html` <span class="tag" title="Priority ${row.priority}">${row.priority > 0 ? "↑" : "↓"} ${Math.abs(row.priority)}</span>`}</div>` },
  { title: "Model", class: "model", sort: "model", cell: (row) => clipped(row.model) },
  { title: "Device", class: "nowrap", cell: (row) => row.slot === null ? row.device ?? row.hardware : deviceLink(row.slot, row.slot) },
];
const OWNER = keyId() === "" ? [] : [{ title: "Owner", class: "owner", cell: ownerLink }];
const SUBMITTED = [{ title: "Submitted", class: "nowrap", sort: "created", largestFirst: true, cell: (row) => time(row.created_at) }, { title: "Took", class: "number minor", cell: took }, ...OWNER];

/** A column that tells in a failed row why it failed, in place of the figures that it lacks. */
function orCause(column, ...figures) {
  return { ...column, cell: (row) => row.problem ? cause(row.problem) : column.cell(row), covers: ({ problem }) => problem ? figures.map(({ title }) => title) : [] };
}

/** Why work failed, on one line; a click leads to all with the same code. */
function cause({ code, detail }) {
  return html`<div class="clip cause" title=${detail}><a class="tag" href=${addressOf(location.pathname, { problem_code: code })}>${code}</a> ${shortened(detail)}</div>`;
}

function clipped(text) {
  return html`<div class="clip" title=${text}>${text}</div>`;
}

/** The column of the name, with the project and the labels; a row without a name shows what it is for. */
function named(pages) {
  return { title: "Name", class: "named", sort: "name", cell: (row) => html`<div class="clip">${nameLink(pages, row)} ${labelTags(row, pages)}</div>` };
}

/** How many tunings a result served, as a link to all of them. */
function usesLink({ uses, fingerprint }) {
  return uses !== null && html`<a href=${addressOf(location.pathname, { fingerprint })}>${count(uses)}</a>`;
}

/** The owner of a row, as a link to all that this key submitted. */
function ownerLink({ owner, key_id: id }) {
  return id && html`<div class="clip"><a href=${addressOf(location.pathname, { owner: owner ?? id })} title=${id}>${owner ?? id}</a></div>`;
}

/** The plan, as a link to the recommendation of work. */
function planWords({ plan, feasible, largest_micro_batch_size: fits, recommendation_id: id }) {
  const text = plan === null ? feasible === false && noPlan(fits) : planText(plan);
  return id ? linkTo("recommendations", id, text || null) : text;
}

/** How many times the samples per second of the baseline; estimated ones have a sign. */
function gainWords({ speedup, speed_source: source }) {
  return speedup !== null && `${source === "measured" ? "" : "~"}${number(speedup, 3)}×`;
}

function peakBar({ peak_bytes: peak, limit_bytes: limit }) {
  return peak !== null && limit !== null && bar({ value: peak, max: limit, label: "Peak memory against the limit", text: `${bytes(peak)} of ${bytes(limit)}` });
}

/** How far a job is, when it will end, and how its loss went. */
function course({ course: found, state }) {
  if (found === null) {
    return null;
  }
  const { update, updates, seconds_remaining: left, losses } = found;
  const rest = ENDED.has(state) || left === null ? "" : `, ${seconds(left)} left`;
  const text = updates === null ? plural(update, "update") : `${count(update)} of ${count(updates)}${rest}`;
  return html`<div class="course">${updates === null ? text : bar({ value: update, max: updates, label: "Updates done", text })}${sparkline(losses, "Loss")}</div>`;
}

// --- acts on chosen rows --------------------------------------------------------------------------------------------

/** The act that compares the recommendations of rows; `idOf` is null for a row without one. */
function compareAct(idOf) {
  const href = (rows) => `/recommendations/compare?${new URLSearchParams(rows.map((row) => ["id", idOf(row)]))}`;
  return { text: "Compare", noun: "recommendation", least: 2, most: MOST_COMPARED, applies: (row) => idOf(row) !== null, href };
}

/** Cancelling and deleting. The service decides; acts that it would refuse are not offered. */
function changeActs(kind, scope) {
  const own = (row) => keyId() === (row.key_id ?? "") || may("admin");
  const act = (action, applies) => ({
    text: words(action),
    danger: true,
    applies: (row) => own(row) && applies(row),
    run: async (rows, others) => (await import("./bulk.js")).changeAll({ kind, action, rows, others }),
  });
  return may(scope) ? [act("cancel", (row) => !ENDED.has(row.state) && row.state !== "CANCELLING"), act("delete", (row) => ENDED.has(row.state))] : [];
}

// --- lists ----------------------------------------------------------------------------------------------------------

const NEW_TUNING = html`<a class="button button-primary" href="/tunings/new">New tuning</a>`;

const LISTS = {
  tunings: {
    scope: "tunings:read",
    path: "/v1/tunings",
    caption: "Tunings",
    noun: "tuning",
    counted: true,
    files: true,
    filters: [SEARCH, STATE, NO_PLAN, MODEL, SLOT, LABEL, PROJECT, ...OWNERS, CREATED, CAUSE, DEVICE, FINGERPRINT],
    columns: [
      named("tunings"),
      ...WORK,
      BATCH,
      orCause(PLAN, GAIN, PEAK, RATE),
      GAIN,
      PEAK,
      RATE,
      { title: "Probes", class: "number", sort: "probes", largestFirst: true, cell: (row) => row.state === "SUCCEEDED" && row.probes === 0 ? html`<span class="muted" title="Answered from a stored tuning, without probes">stored</span>` : count(row.probes) },
      ...SUBMITTED,
    ],
    acts: [compareAct((row) => row.recommendation_id), ...changeActs("tuning", "tunings:write")],
    empty: {
      title: "No tunings yet",
      text: "A tuning finds the largest micro-batch of a model that fits a device, and the plan for your effective batch.",
      action: NEW_TUNING,
    },
  },
  recommendations: {
    scope: "tunings:read",
    path: "/v1/recommendations",
    caption: "Recommendations",
    noun: "recommendation",
    counted: true,
    files: true,
    ended: () => true,
    refreshSeconds: 10,
    query: ({ fingerprint }) => ({ distinct: fingerprint.length === 0 }),
    filters: [SEARCH, MODEL, PRODUCT, HOLDS, choiceOf("precision", "Precision", CHOICES.precisions), choiceOf("objective", "Objective", CHOICES.objectives, (name) => name.replaceAll("_", " ")), LABEL, PROJECT, ...OWNERS, CREATED, FINGERPRINT],
    columns: [
      named("recommendations"),
      { title: "Model", class: "model", sort: "model", cell: (row) => clipped(row.model) },
      { title: "Precision", class: "nowrap minor", cell: (row) => row.precision },
      { title: "Device", class: "model", sort: "device", cell: (row) => clipped(row.device_name) },
      { title: "Objective", class: "nowrap minor", sort: "objective", cell: (row) => row.objective?.replaceAll("_", " ") },
      BATCH,
      PLAN,
      { ...GAIN, sort: "speedup", largestFirst: true },
      PEAK,
      RATE,
      { title: "Tunings answered", class: "number", sort: "uses", largestFirst: true, cell: usesLink },
      { title: "Still valid", class: "nowrap", cell: validMark },
      ...OWNER,
      { title: "Created", class: "nowrap", sort: "created", largestFirst: true, cell: (row) => time(row.created_at) },
    ],
    acts: [compareAct((row) => row.id), CONFIRM],
    lead: staleLead,
    keep: true,
    empty: {
      title: "No recommendations yet",
      text: "A tuning that succeeds creates one, with its evidence and exports for frameworks and schedulers.",
      action: NEW_TUNING,
    },
  },
  jobs: {
    scope: "jobs:read",
    path: "/v1/jobs",
    caption: "Jobs",
    noun: "job",
    counted: true,
    files: true,
    filters: [SEARCH, STATE, MODEL, SLOT, LABEL, PROJECT, ...OWNERS, CREATED, CAUSE, DEVICE],
    columns: [
      named("jobs"),
      ...WORK,
      BATCH,
      orCause(PLAN, GAIN, TUNED_PEAK),
      GAIN,
      TUNED_PEAK,
      { title: "Progress", class: "peak", cell: course },
      ...SUBMITTED,
    ],
    acts: may("jobs:run") ? changeActs("job", "jobs:run") : undefined,
    empty: {
      title: "No jobs yet",
      text: "A job trains with the plan of a recommendation. Start one from a recommendation's page, or send:",
      action: codeBlock(jobCall(), { label: "With curl" }),
    },
  },
  audit: {
    scope: "admin",
    path: "/v1/audit",
    caption: "Audit log",
    noun: "entry",
    nouns: "entries",
    counted: true,
    ended: () => true,
    refreshSeconds: 15,
    query: ({ action, sessions }) => ({ sessions: null, exclude: action.length + sessions.length > 0 ? [] : SESSIONS }),
    filters: [
      { ...choiceOf("action", "Action", CHOICES.actions, actionWords), quick: true },
      { name: "key_id", label: "Who", quick: true, suggest: (row) => row.key_id, texts: (id, rows) => rows.find((row) => row.key_id === id)?.key_name ?? id, pills: keyId() === "" ? undefined : [[keyId(), "Mine"]] },
      { name: "sessions", label: "Sign-ins", options: [["shown", "Show sign-ins"]], pills: [["shown", "Show sign-ins"]] },
      { name: "after", label: "Since", type: "datetime-local" },
      { name: "until", label: "Until", type: "datetime-local" },
      { name: "object_id", label: "Object", placeholder: "the id of a tuning, job or key", pattern: "[a-z0-9_]*", maxlength: 64 },
    ],
    columns: [
      { title: "What happened", class: "wide", cell: sentence },
      { title: "When", class: "nowrap", cell: (row) => time(row.at) },
      { title: "From", class: "nowrap", cell: (row) => row.address },
    ],
    empty: { title: "No entries", text: "Submissions, cancellations, deletions and changes of API keys and webhooks appear here; sign-ins when you show them." },
  },
};

function jobCall() {
  const body = JSON.stringify({ recommendation_id: "rec_…", training: { updates: 100 } });
  const key = keyId() === "" ? "" : ` \\\n  -H "Authorization: Bearer $BATCHWRIGHT_API_KEY"`;
  return `curl ${location.origin}/v1/jobs${key} \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}

function actionWords(action) {
  return words(action.replaceAll("-", "_"));
}

/** Who did what, as a sentence: "maria cancelled the tuning gpt2-nightly". */
function sentence({ action, key_id: id, key_name: key, address, object_id: object, object_name: name, detail }) {
  const who = id === null ? (address === null ? "The command line" : "A caller without a key") : html`<b title=${id}>${key ?? id}</b>`;
  const pages = OBJECTS[object?.split("_")[0]];
  const [verb, noun] = ACTS[action] ?? [action, pages?.[1]];
  const shown = pages === undefined ? object && html`<code>${object}</code>` : linkTo(pages[0], object, name);
  // the detail of a key or webhook begins with its name
  return html`<div class="clip" title=${detail}>${who} ${verb}${noun || pages ? ` the ${noun ?? pages[1]} ` : " "}${shown}${detail && html` <span class="muted">${detail}</span>`}</div>`;
}

const root = byId("list");
const { scope, ...list } = LISTS[root.dataset.kind];
render(may(scope) ? html`<${ApiList} ...${list} />` : scopeAlert(scope), root);
