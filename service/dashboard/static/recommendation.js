/** The page of a recommendation: plan and proof, exports, estimates for other GPUs, and the evidence. */

import { get, may, post } from "./api.js";
import { commandOf } from "./command.js";
import { largestWords, shortened } from "./device_words.js";
import { byId, h, replace, setText } from "./dom.js";
import { estimateTable } from "./estimate_table.js";
import { exportForm } from "./export_form.js";
import { bytes, count, percent, plural, seconds, time, words } from "./format.js";
import { eventually } from "./live.js";
import { alertBox, busy, codeBlock, definitions, nameFacts, problemAlert, scopeAlert } from "./parts.js";
import { figure, gainBox, memoryParts, showPlan } from "./plan.js";
import { openTrainDialog } from "./train_dialog.js";

const id = byId("recommendation").dataset.recommendationId;
const path = `/v1/recommendations/${encodeURIComponent(id)}`;

if (may("tunings:read")) {
  start();
} else {
  replace(byId("notices"), scopeAlert("tunings:read"));
}

async function start() {
  try {
    const [found, formats] = await eventually(() => Promise.all([get(path), get("/v1/exports")]));
    show(found, formats.items);
  } catch (problem) {
    replace(byId("notices"), problemAlert(problem, { retry: start }));
  }
}

function show(found, formats) {
  byId("content-body").hidden = false;
  setText(byId("model"), `${found.name === null ? "" : `${found.name}, `}for ${found.device.name}`);
  replace(byId("notices"), found.warnings.map((warning) => alertBox("warn", words(warning.code.replaceAll("-", "_")), shortened(warning.message))));
  replace(byId("answer"), found.feasible ? answer(found) : alertBox("warn", "No micro-batch fits", shortened(found.infeasible_reason)));
  byId("exports").hidden = !found.feasible;
  if (found.feasible) {
    exportForm({ form: byId("export-form"), result: byId("exported"), path, formats, command: commandOf(found.request) });
  }
  replace(byId("actions"), actions(found));
  replace(byId("gpus"), commandOf(found.request) ? h("p", { class: "text" }, "Nothing of a command is estimated: only a run shows its memory.") : gpuButton(found));
  replace(byId("facts"), facts(found), codeBlock(JSON.stringify(found.request, null, 2), { label: "Request", download: `${id}.json` }));
}

function answer(found) {
  const { headroom } = found;
  return [
    showPlan(found.plan),
    gainBox(found),
    h("h3", {}, "Proof"),
    h("div", { class: "figures" },
      figure(count(found.largest_micro_batch_size), `${largestWords(found.evidence.proof)} (samples)`),
      headroom && figure(percent(headroom.free_fraction), `of ${bytes(headroom.limit_bytes)} stay free`)),
    h("p", { class: "text" }, shortened(found.evidence.proof.statement), " ", found.choice),
    found.evidence.plan_proof && h("p", { class: "text" }, shortened(found.evidence.plan_proof)),
    memoryParts(headroom),
    environment(found),
  ];
}

function environment(found) {
  const lines = Object.entries(found.environment).map(([name, value]) => `${name}=${value}`).join("\n");
  return lines && codeBlock(lines, { label: "Environment variables of the job" });
}

function facts(found) {
  return definitions([
    ...nameFacts(found),
    ["Device", `${found.device.id}: ${found.device.name}`],
    ["Created", time(found.created_at)],
    ["Probes", `${plural(found.timings.probes, "probe")} in ${seconds(found.timings.probe_seconds)}, ${found.timings.out_of_memory_probes} out of memory`],
    ["Fingerprint", h("code", {}, found.fingerprint)],
    ["Versions", Object.entries(found.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ]);
}

// --- actions -----------------------------------------------------------------------------------------------

function actions(found) {
  const train = h("button", { type: "button", class: "button button-primary" }, "Train");
  train.setAttribute("aria-haspopup", "dialog");
  train.addEventListener("click", () => openTrainDialog(found).catch((problem) => replace(byId("notices"), problemAlert(problem))));
  const others = h("a", { class: "button", href: `/recommendations?fingerprint=${found.fingerprint}` }, "Same request");
  return [found.feasible && may("jobs:run") && train, others];
}

function gpuButton(found) {
  const place = h("div", { class: "stack" });
  const button = h("button", { type: "button", class: "button", disabled: !may("tunings:write") }, "Estimate for every GPU of the catalogue");
  button.addEventListener("click", () => busy(button, () => estimate(found, place)));
  const text = "Estimate which GPUs can run this spec, and with which plan. This takes a few seconds and runs no probe.";
  return [h("p", { class: "text" }, text), h("p", {}, button), place];
}

async function estimate(found, place) {
  replace(place, h("p", { class: "muted", role: "status" }, "Estimating…"));
  try {
    const { items } = await get("/v1/gpus");
    const { spec, effective_batch_size, memory_margin } = found.request;
    const body = { spec, effective_batch_size, memory_margin, gpus: items.map((gpu) => gpu.name) };
    replace(place, estimateTable(await post("/v1/estimates", body)));
  } catch (problem) {
    replace(place, problemAlert(problem));
  }
}
