/** The page of a tuning: its state, its probes as they end, the recommendation, and how to reproduce the tuning. */

import { get, keyId, post } from "./api.js";
import { makeChart } from "./chart.js";
import { largestWords, rawText, shortened, withDetails } from "./device_words.js";
import { byId, h, replace, setText } from "./dom.js";
import { bytes, bytesExactly, count, number, percent, plural, seconds, words } from "./format.js";
import { ENDED } from "./live.js";
import { heldBytes, memoryFigure, memoryInWords, sizeWords } from "./memory_chart.js";
import { alertBox, badge, codeBlock, definitions, emptyState, nameFacts, tag } from "./parts.js";
import { figure, gainBox, memoryParts, showPlan } from "./plan.js";
import { asCommand, asCurl } from "./reproduce.js";
import { makeTable } from "./table.js";
import { failure, keyFact, makeWorkPage, positionInWords, runFacts } from "./work.js";

let recorded = []; // probes
const work = makeWorkPage({
  kind: "tuning",
  writeScope: "tunings:write",
  deletion: "Its probes and events are deleted too. Its recommendation stays.",
  read,
  show,
  showWaiting: showProgress,
  begin,
  action: ({ ended }) => ended && ["Repeat", repeat],
});

const table = makeTable({ caption: "Probes", columns: probeColumns(), keyOf: (row) => row.ordinal });
const chart = makeChart(byId("chart"), () => memoryFigure(results(), limits()));

work.start();

/** Reads the tuning, then its probes, which include every event that the tuning counts. Newer probes stay. */
async function read(path) {
  const tuning = await get(path);
  const { items } = await get(`${path}/probes`);
  const all = new Map([...recorded, ...items].map((probe) => [probe.ordinal, probe]));
  recorded = [...all.values()].sort((one, other) => one.ordinal - other.ordinal);
  return tuning;
}

function begin() {
  if (!ENDED.has(work.current.state)) {
    work.follow(onEvent, { after: work.current.events });
  }
}

function onEvent(event) {
  if (event.kind === "probe") {
    recorded = [...recorded.filter((probe) => probe.ordinal !== event.probe.ordinal), event.probe];
    showProbes();
    showProgress();
  }
}

function results() {
  return recorded.map((probe) => probe.result);
}

function limits() {
  const { request, recommendation } = work.current;
  return {
    limitBytes: recommendation?.headroom?.limit_bytes ?? request.memory_limit_bytes,
    probeLimitBytes: results().find((probe) => probe.limit_bytes !== null)?.limit_bytes ?? null,
    chosen: recommendation?.largest_micro_batch_size ?? null,
  };
}

// --- sections --------------------------------------------------------------------------------------------------

function show() {
  showProgress();
  showFacts();
  showNotices();
  showAnswer();
  showProbes();
  showPlans();
  replace(byId("again"), reproduction());
}

function showFacts() {
  const tuning = work.current;
  const { request } = tuning;
  replace(byId("facts"), definitions([
    ...nameFacts(tuning),
    ["Device", tuning.device ?? tuning.hardware],
    ["Effective batch size", `${count(request.effective_batch_size)} samples`],
    ...workloadFacts(request.spec),
    ["Objective", request.objective.replaceAll("_", " ")],
    ["Memory limit", request.memory_limit_bytes === null ? "the whole device" : bytes(request.memory_limit_bytes)],
    ["Margin", percent(request.memory_margin)],
    ...runFacts(tuning),
    keyFact(tuning),
  ]));
}

function workloadFacts({ model, parallelism, precision }) {
  const ranks = count(parallelism.world_size);
  if (model.kind !== "command") {
    return [["Ranks", `${ranks} (${parallelism.strategy})`], ["Precision", precision]];
  }
  const given = Object.entries(model.arguments).map(([name, value]) => `${name}: ${value}`).join(", ");
  return [["Command", model.name], ["Arguments", given || "none"], ["Ranks", ranks]];
}

function showProgress() {
  const shown = progressText(work.current);
  if (shown === null || !byId("progress").firstChild?.isEqualNode(shown)) {
    replace(byId("progress"), shown); // announced again only if the text differs
  }
}

function progressText(tuning) {
  if (tuning.state === "QUEUED") {
    return h("p", {}, `${positionInWords(tuning.queue)} `, h("a", { href: "/" }, "The queue is on the overview."));
  }
  if (tuning.state === "RUNNING") {
    const last = recorded.at(-1)?.result;
    const newest = last ? `, the last: ${sizeWords(last)} samples, ${last.outcome}` : "";
    return h("p", {}, `Probing: ${plural(recorded.length, "probe")} so far${newest}.`);
  }
  return null;
}

function showNotices() {
  replace(
    byId("notices"),
    failure(work.current),
    (work.current.recommendation?.warnings ?? []).map((warning) => alertBox("warn", words(warning.code.replaceAll("-", "_")), shortened(warning.message))),
  );
}

function showAnswer() {
  const found = work.current.recommendation;
  byId("answer").hidden = found === null;
  if (found === null) {
    return;
  }
  replace(byId("answer-link"), h("a", { href: `/recommendations/${encodeURIComponent(found.id)}` }, "Recommendation and exports"));
  replace(byId("answer-body"), found.feasible ? feasible(found) : infeasible(found));
}

function feasible(found) {
  const { headroom } = found;
  return [
    h("h3", {}, "Plan"),
    showPlan(found.plan),
    gainBox(found),
    h("h3", {}, "Proof"),
    h("div", { class: "figures" },
      figure(count(found.largest_micro_batch_size), `${largestWords(found.evidence.proof)} (samples)`),
      headroom && figure(percent(headroom.free_fraction), `of ${bytes(headroom.limit_bytes)} stay free`)),
    h("p", { class: "text" }, shortened(found.evidence.proof.statement), " ", found.choice),
    found.evidence.plan_proof && h("p", { class: "text" }, shortened(found.evidence.plan_proof)),
    memoryParts(headroom),
  ];
}

function infeasible(found) {
  return [alertBox("warn", "No micro-batch fits", shortened(found.infeasible_reason)), h("p", { class: "text" }, shortened(found.evidence.proof.statement))];
}

function showProbes() {
  const shown = results();
  byId("chart").hidden = shown.length === 0;
  setText(byId("chart-words"), shown.length === 0 ? "The first probe has not ended yet." : memoryInWords(shown, limits()));
  if (shown.length > 0) {
    chart.draw();
  }
  table.update(recorded);
  if (shown.length === 0) {
    replace(byId("probes"), emptyState({ title: "No probe has ended yet", text: "Each probe appears here when it ends." }));
  } else if (table.element.parentNode !== byId("probes")) {
    replace(byId("probes"), table.element);
  }
}

function probeColumns() {
  const result = (read) => (row) => read(row.result);
  return [
    { title: "#", class: "number", cell: (row) => row.ordinal, value: (row) => row.ordinal },
    { title: "Micro-batch", class: "number", cell: result(sizeWords), value: result((probe) => probe.micro_batch_size) },
    { title: "Outcome", cell: result((probe) => badge(probe.outcome)), value: result((probe) => probe.outcome) },
    { title: "Peak memory", class: "number", cell: result((probe) => exact(heldBytes(probe))), value: result(heldBytes) },
    { title: "Tensors", class: "number", cell: result((probe) => exact(probe.peak_allocated_bytes)), value: result((probe) => probe.peak_allocated_bytes) },
    { title: "Context", class: "number", cell: result((probe) => exact(probe.context_bytes)), value: result((probe) => probe.context_bytes) },
    { title: "Limit", class: "number", cell: result((probe) => exact(probe.limit_bytes)) },
    { title: "Duration", class: "number", cell: result((probe) => seconds(probe.seconds.total)), value: result((probe) => probe.seconds.total) },
    { title: "Update", class: "number", cell: result((probe) => seconds(probe.timing?.update_seconds)) },
    { title: "Message", class: "message", cell: result(message) },
  ];
}

function exact(value) {
  return h("span", { title: bytesExactly(value) }, bytes(value));
}

function message(result) {
  return [...withDetails(result.message, result.details), result.traceback && rawText("Traceback", result.traceback)];
}

function showPlans() {
  const found = work.current.recommendation;
  const plans = found?.alternatives ?? [];
  const changes = found?.what_ifs ?? [];
  byId("plans").hidden = plans.length < 2 && changes.length === 0;
  replace(byId("plans-body"), plans.length > 1 && planTable(plans), changes.length > 0 && changeTable(changes));
}

function changeInWords([field, value]) {
  const name = field.replaceAll("_", " ");
  return value === true ? name : `${name} ${value}`;
}

function planTable(plans) {
  const shown = makeTable({
    caption: "Plans for the same effective batch",
    keyOf: (row) => row.gradient_accumulation_steps,
    columns: [
      { title: "Steps", class: "number", cell: (row) => count(row.gradient_accumulation_steps) },
      { title: "Micro-batch", class: "number", cell: (row) => count(row.micro_batch_size) },
      { title: "Peak memory", class: "number", cell: (row) => exact(row.peak_bytes) },
      { title: "Samples per second and rank", class: "number", cell: (row) => number(row.samples_per_second, 3) },
      { title: "", cell: (row) => h("span", { class: "tags" }, row.chosen && tag("recommended"), tag(row.source), row.thrashing && tag("thrashing")) },
    ],
  });
  shown.update(plans);
  return shown.element;
}

function changeTable(changes) {
  const shown = makeTable({
    caption: "Effect of changes to the spec: estimated, not run",
    showCaption: true,
    keyOf: (row) => JSON.stringify(row.changes),
    columns: [
      { title: "Change", cell: (row) => Object.entries(row.changes).map(changeInWords).join(", ") },
      { title: "Largest micro-batch", class: "number", cell: (row) => (row.largest_micro_batch_size === 0 ? "none" : count(row.largest_micro_batch_size)) },
      { title: "Surely", class: "number", cell: (row) => (row.surely_fits === 0 ? "none" : count(row.surely_fits)) },
      { title: "Peak memory", class: "number", cell: (row) => exact(row.peak_bytes) },
      { title: "", cell: () => tag("estimated") },
    ],
  });
  shown.update(changes);
  return shown.element;
}

// --- actions -----------------------------------------------------------------------------------------------

async function repeat() {
  const made = await post("/v1/tunings", { ...work.current.request, fresh: true }, { idempotencyKey: crypto.randomUUID?.() });
  location.assign(`/tunings/${encodeURIComponent(made.id)}`);
}

function reproduction() {
  const { request } = work.current;
  return [
    codeBlock(JSON.stringify(request.spec, null, 2), { label: "spec.json", download: "spec.json" }),
    codeBlock(asCommand(request), { label: "On the command line" }),
    codeBlock(asCurl(request, location.origin, keyId() !== ""), { label: "Over HTTP" }),
  ];
}
