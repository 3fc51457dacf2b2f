/** Recommendations side by side. */

import { get, may } from "./api.js";
import { emptyState, linkTo, mark, problemAlert, scopeAlert } from "./components.js";
import { byId } from "./dom.js";
import { bytes, count, number, percent, plural, timeText } from "./format.js";
import { eventually } from "./live.js";
import { planInWords } from "./plan.js";
import { html, render } from "./preact-htm.js";

/** The rows: a title, and the text of a recommendation. The proven size stands apart from the plan, which has its own sizes. */
const ROWS = [
  ["Model", (found) => modelOf(found.request.spec.model)],
  ["Adapter", (found) => fieldsInWords(found.request.spec.adapter ?? {}) || "–"],
  ["Preference", (found) => fieldsInWords(found.request.spec.preference ?? {}) || "–"],
  ["Worst case", (found) => fieldsInWords(found.request.spec.batch ?? {}) || "–"],
  ["Precision", (found) => found.request.spec.precision ?? "–"],
  ["Optimizer", (found) => optimizerOf(found.request.spec)],
  ["Activation checkpointing", ({ request: { spec } }) => (isCommand(spec) ? "–" : spec.activation_checkpointing ? "yes" : "no")],
  ["Device", (found) => `${found.device.id}: ${found.device.name}`],
  ["Objective", (found) => found.request.objective.replaceAll("_", " ")],
  ["Effective batch", (found) => count(found.request.effective_batch_size)],
  ["Fits", (found) => (found.feasible ? "yes" : found.evidence.proof.fits > 0 ? "no plan" : "nothing fits")],
  ["Plan", (found) => (found.plan === null ? "–" : planInWords(found.plan.micro_batch_sizes))],
  ["Micro-batch of the plan", (found) => count(found.plan?.micro_batch_size)],
  ["Accumulation steps", (found) => count(found.plan?.gradient_accumulation_steps)],
  ["Ranks", (found) => count(found.request.spec.parallelism.world_size)],
  ["Samples per second and rank", (found) => number(found.alternatives.find((plan) => plan.chosen)?.samples_per_second, 3)],
  ["Gain over the baseline", (found) => found.gain?.statement ?? "–"],
  ["Largest micro-batch proven to fit", (found) => count(found.evidence.proof.fits || null)],
  ["Next size tried", (found) => count(found.evidence.proof.next_size)],
  ["Peak memory", (found) => bytes(found.headroom?.peak_bytes)],
  ["Reserved", (found) => bytes(found.headroom?.reserved_bytes)],
  ["Tensors", (found) => bytes(found.headroom?.allocated_bytes)],
  ["Context", (found) => bytes(found.headroom?.context_bytes)],
  ["Memory limit", (found) => bytes(found.headroom?.limit_bytes ?? found.request.memory_limit_bytes)],
  ["Free memory", (found) => percent(found.headroom?.free_fraction)],
  ["Probes", (found) => `${plural(found.timings.probes, "probe")}, ${found.timings.out_of_memory_probes} out of memory`],
  ["Search stopped by", (found) => found.evidence.proof.stopped_by.replaceAll("-", " ")],
  ["Warnings", (found) => (found.warnings.length === 0 ? "none" : found.warnings.map((warning) => warning.code).join(", "))],
  ["torch", (found) => found.versions.torch ?? "–"],
  ["Created", (found) => timeText(found.created_at)],
];

const place = byId("compared");

async function start() {
  const ids = place.dataset.ids.split(" ").filter(Boolean);
  if (!may("tunings:read")) {
    return scopeAlert("tunings:read");
  }
  if (ids.length < 2) {
    const action = html`<a class="button button-primary" href="/recommendations">Choose recommendations</a>`;
    return emptyState({ title: "Nothing to compare", text: "Select two or more in the list.", action });
  }
  try {
    return table(await eventually(() => Promise.all(ids.map((id) => get(`/v1/recommendations/${encodeURIComponent(id)}`)))));
  } catch (problem) {
    return problemAlert(problem, { retry: show });
  }
}

async function show() {
  render(await start(), place);
}

function table(all) {
  return html`<div class="table-scroll" tabindex="0" role="group" aria-label="Recommendations side by side"><table class="table compared">
    <caption class="visually-hidden">Recommendations side by side</caption>
    <thead><tr><th scope="col">Field</th>${all.map((found) => html`<th scope="col">${linkTo("recommendations", found.id, found.name)}</th>`)}</tr></thead>
    <tbody>${ROWS.map(([title, read]) => row(title, all.map(read)))}</tbody>
  </table></div>`;
}

function row(title, values) {
  const differs = new Set(values).size > 1;
  return html`<tr><th scope="row">${title}${differs && html` ${mark("info", "differs", "differs")}`}</th>${values.map((value) => html`<td class=${differs ? "differs" : ""}>${value}</td>`)}</tr>`;
}

function isCommand(spec) {
  return spec.model.kind === "command";
}

function optimizerOf(spec) {
  return isCommand(spec) ? "–" : `${spec.optimizer.name} (${spec.optimizer.implementation})`;
}

function modelOf(model) {
  if (model.kind === "command") {
    return [model.name ?? model.argv[0], fieldsInWords(model.arguments)].filter(Boolean).join(": ");
  }
  if (model.kind === "transformers") {
    return `${model.revision ? model.pretrained : model.config.model_type} (${model.task})`;
  }
  return model.kind === "reference" ? fieldsInWords(model.architecture) : model.target;
}

function fieldsInWords(fields) {
  return Object.entries(fields).filter(([, value]) => value !== null).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
}

show();
