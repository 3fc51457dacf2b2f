/** Recommendations side by side. */

import { get, may } from "./api.js";
import { byId, h, replace } from "./dom.js";
import { bytes, count, number, percent, plural, shortId, timeText } from "./format.js";
import { eventually } from "./live.js";
import { emptyState, mark, problemAlert, scopeAlert } from "./parts.js";
import { planInWords } from "./plan.js";

/** What is compared: a title, and what a recommendation says of it, as text. */
const ROWS = [
  ["Model", (it) => modelOf(it.request.spec.model)],
  ["Worst case", (it) => said(it.request.spec.batch)],
  ["Precision", (it) => it.request.spec.precision],
  ["Optimizer", (it) => `${it.request.spec.optimizer.name} (${it.request.spec.optimizer.implementation})`],
  ["Activation checkpointing", (it) => (it.request.spec.activation_checkpointing ? "yes" : "no")],
  ["Device", (it) => `${it.device.id}: ${it.device.name}`],
  ["Objective", (it) => it.request.objective.replaceAll("_", " ")],
  ["Effective batch", (it) => count(it.request.effective_batch_size)],
  ["Fits", (it) => (it.feasible ? "yes" : "nothing fits")],
  ["Plan", (it) => (it.plan === null ? "–" : planInWords(it.plan.micro_batch_sizes))],
  ["Accumulation steps", (it) => count(it.plan?.gradient_accumulation_steps)],
  ["Ranks", (it) => count(it.request.spec.parallelism.world_size)],
  ["Largest micro-batch", (it) => count(it.largest_micro_batch_size)],
  ["Samples per second and rank", (it) => number(it.alternatives.find((plan) => plan.chosen)?.samples_per_second, 3)],
  ["Peak memory", (it) => bytes(it.headroom?.peak_bytes)],
  ["Memory limit", (it) => bytes(it.headroom?.limit_bytes ?? it.request.memory_limit_bytes)],
  ["Stays free", (it) => percent(it.headroom?.free_fraction)],
  ["Probes", (it) => `${plural(it.timings.probes, "probe")}, ${it.timings.out_of_memory_probes} out of memory`],
  ["Stopped by", (it) => it.evidence.proof.stopped_by.replaceAll("-", " ")],
  ["Warnings", (it) => (it.warnings.length === 0 ? "none" : it.warnings.map((warning) => warning.code).join(", "))],
  ["torch", (it) => it.versions.torch ?? "–"],
  ["Made", (it) => timeText(it.created_at)],
];

start();

async function start() {
  const place = byId("compared");
  const ids = place.dataset.ids.split(" ").filter(Boolean);
  if (!may("tunings:read")) {
    replace(place, scopeAlert("tunings:read"));
    return;
  }
  if (ids.length < 2) {
    const action = h("a", { class: "button button-primary", href: "/recommendations" }, "Choose recommendations");
    replace(place, emptyState({ title: "Nothing to compare", text: "Tick two or more in the list.", action }));
    return;
  }
  try {
    const found = await eventually(() => Promise.all(ids.map((id) => get(`/v1/recommendations/${encodeURIComponent(id)}`))));
    replace(place, table(found));
  } catch (problem) {
    replace(place, problemAlert(problem, { retry: start }));
  }
}

function table(found) {
  const heads = found.map((it) => h("th", { scope: "col" }, h("a", { href: `/recommendations/${encodeURIComponent(it.id)}`, class: "mono", title: it.id }, shortId(it.id))));
  const rows = ROWS.map(([title, read]) => row(title, found.map(read)));
  const caption = h("caption", { class: "visually-hidden" }, "Recommendations side by side");
  const made = h("table", { class: "table compared" }, caption, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Says"), heads)), h("tbody", {}, rows));
  return h("div", { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "Recommendations side by side" }, made);
}

function row(title, values) {
  const differs = new Set(values).size > 1;
  const head = h("th", { scope: "row" }, title, differs && [" ", mark("info", "≠", "differs")]);
  return h("tr", {}, head, values.map((value) => h("td", { class: differs ? "differs" : "" }, value)));
}

function modelOf(model) {
  if (model.kind === "transformers") {
    return `${model.config.model_type} (${model.task})`;
  }
  return model.kind === "reference" ? said(model.architecture) : model.target;
}

function said(fields) {
  return Object.entries(fields).filter(([, value]) => value !== null).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
}
