/** The list of recommendations, with filters and a selection to compare. */

import { may } from "./api.js";
import { makeList, SEARCH } from "./api_list.js";
import { byId, h, replace } from "./dom.js";
import { count, shortId, time } from "./format.js";
import { labelTags, scopeAlert } from "./parts.js";
import { both, compareAct, peakBar, planWords, rateWords } from "./rows.js";
import { makeSelection } from "./selection.js";

const ANY = ["", "Any"];
const PRECISIONS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16"];
const OBJECTIVES = ["largest", "fewest_steps", "fastest"];

const LIST = {
  path: "/v1/recommendations",
  caption: "Recommendations",
  noun: "recommendation",
  files: true,
  ended: () => true,
  refreshSeconds: 10,
  filters: [
    SEARCH,
    { name: "model", label: "Model", placeholder: "the full name", suggest: (row) => row.model },
    { name: "device", label: "Device", placeholder: "cuda:0, or a product's name", suggest: (row) => row.device_name },
    { name: "precision", label: "Precision", options: [ANY, ...PRECISIONS.map((name) => [name, name])] },
    { name: "objective", label: "Objective", options: [ANY, ...OBJECTIVES.map((name) => [name, name.replaceAll("_", " ")])] },
    { name: "fingerprint", label: "Fingerprint", placeholder: "64 hexadecimal digits", pattern: "[0-9a-f]*", maxlength: 64 },
  ],
  columns: [
    { title: "Recommendation", class: "named", cell: (row) => both(link(row), labelTags(row)) },
    { title: "Model and device", class: "model", cell: (row) => both(row.model, `${row.device} (${row.device_name})`) },
    { title: "Precision", class: "nowrap", cell: (row) => row.precision ?? "–" },
    { title: "Objective", class: "nowrap", cell: (row) => row.objective?.replaceAll("_", " ") },
    { title: "Effective batch", class: "number", cell: (row) => count(row.effective_batch_size) },
    { title: "Plan", class: "nowrap", cell: planWords },
    { title: "Peak", class: "peak", cell: peakBar },
    { title: "Samples/s", class: "number", cell: rateWords },
    { title: "Owner", class: "nowrap", cell: (row) => row.owner ?? "–" },
    { title: "Created", class: "nowrap", cell: (row) => time(row.created_at) },
  ],
  empty: {
    title: "No recommendations yet",
    text: "A tuning that succeeds creates one, with its evidence and exports for frameworks and schedulers.",
    action: h("a", { class: "button button-primary", href: "/tunings/new" }, "New tuning"),
  },
};

if (may("tunings:read")) {
  const selection = makeSelection({ noun: "recommendation", acts: [compareAct((row) => row.id)], keep: true });
  makeList({ root: byId("list"), ...LIST, selection });
} else {
  replace(byId("list"), scopeAlert("tunings:read"));
}

function link(row) {
  const address = `/recommendations/${encodeURIComponent(row.id)}`;
  return h("a", { href: address, class: row.name === null && "mono", title: row.id }, row.name ?? shortId(row.id));
}
