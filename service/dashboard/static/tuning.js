/** The page of a tuning: its state and probes as they come, the answer, and how to ask the same again. */

import { del, get, keyId, may, post } from "./api.js";
import { makeChart } from "./chart.js";
import { largestWords, rawText, shortened, withDetails } from "./device_words.js";
import { announce, byId, h, replace, setText } from "./dom.js";
import { bytes, bytesExactly, count, elapsed, number, percent, plural, seconds, time, words } from "./format.js";
import { eventually, follow } from "./live.js";
import { heldBytes, memoryFigure, memoryInWords } from "./memory_chart.js";
import { alertBox, badge, busy, codeBlock, confirmDialog, definitions, emptyState, problemAlert, scopeAlert, tag } from "./parts.js";
import { figure, showPlan } from "./plan.js";
import { followPlace, placeInWords } from "./queue_place.js";
import { asCommand, asCurl } from "./repeating.js";
import { makeTable } from "./table.js";

const ENDED = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);
const id = byId("tuning").dataset.tuningId;
const path = `/v1/tunings/${encodeURIComponent(id)}`;
const page = { tuning: null, probes: [] };
const places = followPlace(path, (tuning) => {
  page.tuning = { ...page.tuning, queue: tuning.queue };
  showProgress();
});

const table = makeTable({ caption: "Probes", columns: probeColumns(), keyOf: (row) => row.ordinal });
const chart = makeChart(byId("chart"), () => memoryFigure(results(), limits()));

if (may("tunings:read")) {
  start();
} else {
  replace(byId("notices"), scopeAlert("tunings:read"));
}

async function start() {
  try {
    await eventually(reload);
    replace(byId("notices"));
  } catch (problem) {
    replace(byId("notices"), problemAlert(problem, { retry: start }));
    return;
  }
  byId("content-body").hidden = false;
  show();
  if (!ENDED.has(page.tuning.state)) {
    follow(`${path}/events`, heard, { after: page.tuning.events, onEnd: refresh, onProblem: complain });
  }
}

/** The probes after the tuning: events that the tuning counts are in them. Those that came meanwhile stay. */
async function reload() {
  page.tuning = await get(path);
  const { items } = await get(`${path}/probes`);
  const all = new Map([...page.probes, ...items].map((it) => [it.ordinal, it]));
  page.probes = [...all.values()].sort((one, other) => one.ordinal - other.ordinal);
}

async function refresh() {
  try {
    await reload();
    show();
    if (ENDED.has(page.tuning.state)) {
      announce(`The tuning is ${words(page.tuning.state).toLowerCase()}.`);
    }
  } catch (problem) {
    complain(problem);
  }
}

function heard(event) {
  if (event.kind === "probe") {
    page.probes = [...page.probes.filter((it) => it.ordinal !== event.probe.ordinal), event.probe];
    showProbes();
    showState();
  } else if (event.kind === "state") {
    page.tuning = { ...page.tuning, state: event.state };
    refresh();
  }
}

function complain(problem) {
  replace(byId("notices"), problemAlert(problem, { retry: () => location.reload() }));
}

function results() {
  return page.probes.map((it) => it.result);
}

function limits() {
  const { request, recommendation } = page.tuning;
  return {
    limitBytes: recommendation?.headroom?.limit_bytes ?? request.memory_limit_bytes,
    probeLimitBytes: results().find((it) => it.limit_bytes !== null)?.limit_bytes ?? null,
    chosen: recommendation?.largest_micro_batch_size ?? null,
  };
}

// --- what is shown --------------------------------------------------------------------------------------------------

function show() {
  setText(byId("model"), `of ${page.tuning.model}`);
  showState();
  showNotices();
  showAnswer();
  showProbes();
  showPlans();
  replace(byId("actions"), actions());
  replace(byId("again"), again());
}

function showState() {
  const { tuning } = page;
  replace(byId("state"), badge(tuning.state));
  showProgress();
  places.update(tuning);
  const { request } = tuning;
  replace(byId("facts"), definitions([
    ["Device", tuning.device],
    ["Effective batch size", `${count(request.effective_batch_size)} samples`],
    ["Ranks", `${count(request.spec.parallelism.world_size)} (${request.spec.parallelism.strategy})`],
    ["Precision", request.spec.precision],
    ["Objective", request.objective.replaceAll("_", " ")],
    ["Memory limit", request.memory_limit_bytes === null ? "all that the device has" : bytes(request.memory_limit_bytes)],
    ["Margin", percent(request.memory_margin)],
    ["Submitted", time(tuning.created_at)],
    ["Took", took(tuning)],
    ["Slot", tuning.slot],
    ["Attempts", tuning.attempts > 1 ? `${tuning.attempts}: taken over or started again` : null],
    ["API key", tuning.key_id && h("code", {}, tuning.key_id)],
  ]));
}

function showProgress() {
  const shown = progressText(page.tuning);
  if (shown === null || !byId("progress").firstChild?.isEqualNode(shown)) {
    replace(byId("progress"), shown); // told again only where it is another text
  }
}

function progressText(tuning) {
  if (tuning.state === "QUEUED") {
    return h("p", {}, `${placeInWords(tuning.queue)} `, h("a", { href: "/" }, "The queue is on the overview."));
  }
  if (tuning.state === "RUNNING") {
    const last = page.probes.at(-1)?.result;
    const newest = last ? `, the last: ${count(last.micro_batch_size)} samples, ${last.outcome}` : "";
    return h("p", {}, `Probing: ${plural(page.probes.length, "probe")} so far${newest}.`);
  }
  return null;
}

function took(tuning) {
  if (tuning.started_at === null) {
    return null;
  }
  return tuning.ended_at === null ? elapsed(tuning.started_at) : seconds((Date.parse(tuning.ended_at) - Date.parse(tuning.started_at)) / 1000);
}

function showNotices() {
  const { problem, recommendation } = page.tuning;
  replace(
    byId("notices"),
    problem && alertBox("bad", problem.title, h("div", { class: "preline" }, withDetails(problem.detail)), h("p", { class: "small" }, "Code: ", h("code", {}, problem.code))),
    (recommendation?.warnings ?? []).map((it) => alertBox("warn", words(it.code.replaceAll("-", "_")), shortened(it.message))),
  );
}

function showAnswer() {
  const found = page.tuning.recommendation;
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
    h("h3", {}, "Proof"),
    h("div", { class: "figures" },
      figure(count(found.largest_micro_batch_size), `${largestWords(found.evidence.proof)} (samples)`),
      headroom && figure(percent(headroom.free_fraction), `of ${bytes(headroom.limit_bytes)} stay free`)),
    h("p", { class: "text" }, shortened(found.evidence.proof.statement), " ", found.choice),
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
  table.update(page.probes);
  if (shown.length === 0) {
    replace(byId("probes"), emptyState({ title: "No probe has ended yet", text: "Each shows up here as it ends." }));
  } else if (table.element.parentNode !== byId("probes")) {
    replace(byId("probes"), table.element);
  }
}

function probeColumns() {
  const result = (read) => (row) => read(row.result);
  return [
    { title: "#", class: "number", cell: (row) => row.ordinal, value: (row) => row.ordinal },
    { title: "Micro-batch", class: "number", cell: result((it) => count(it.micro_batch_size)), value: result((it) => it.micro_batch_size) },
    { title: "Outcome", cell: result((it) => badge(it.outcome)), value: result((it) => it.outcome) },
    { title: "Peak held", class: "number", cell: result((it) => exact(heldBytes(it))), value: result(heldBytes) },
    { title: "Tensors", class: "number", cell: result((it) => exact(it.peak_allocated_bytes)), value: result((it) => it.peak_allocated_bytes) },
    { title: "Limit", class: "number", cell: result((it) => exact(it.limit_bytes)) },
    { title: "Took", class: "number", cell: result((it) => seconds(it.seconds.total)), value: result((it) => it.seconds.total) },
    { title: "Update", class: "number", cell: result((it) => seconds(it.timing?.update_seconds)) },
    { title: "Message", class: "message", cell: result(happened) },
  ];
}

function exact(value) {
  return h("span", { title: bytesExactly(value) }, bytes(value));
}

function happened(result) {
  return [...withDetails(result.message, result.details), result.traceback && rawText("Traceback", result.traceback)];
}

function showPlans() {
  const found = page.tuning.recommendation;
  const plans = found?.alternatives ?? [];
  const changes = found?.what_ifs ?? [];
  byId("plans").hidden = plans.length < 2 && changes.length === 0;
  replace(byId("plans-body"), plans.length > 1 && planTable(plans), changes.length > 0 && changeTable(changes));
}

function planTable(plans) {
  const shown = makeTable({
    caption: "Plans for the same effective batch",
    keyOf: (row) => row.gradient_accumulation_steps,
    columns: [
      { title: "Steps", class: "number", cell: (row) => count(row.gradient_accumulation_steps) },
      { title: "Micro-batch", class: "number", cell: (row) => count(row.micro_batch_size) },
      { title: "Peak held", class: "number", cell: (row) => exact(row.peak_bytes) },
      { title: "Samples per second and rank", class: "number", cell: (row) => number(row.samples_per_second, 3) },
      { title: "", cell: (row) => h("span", { class: "tags" }, row.chosen && tag("recommended"), tag(row.source), row.thrashing && tag("thrashing")) },
    ],
  });
  shown.update(plans);
  return shown.element;
}

function changeTable(changes) {
  const shown = makeTable({
    caption: "What other choices would let fit: estimated, not run",
    showCaption: true,
    keyOf: (row) => JSON.stringify(row.changes),
    columns: [
      { title: "Change", cell: (row) => Object.entries(row.changes).map(([field, value]) => `${field}: ${value}`).join(", ") },
      { title: "Largest micro-batch", class: "number", cell: (row) => (row.largest_micro_batch_size === 0 ? "none" : count(row.largest_micro_batch_size)) },
      { title: "Surely", class: "number", cell: (row) => (row.surely_fits === 0 ? "none" : count(row.surely_fits)) },
      { title: "Peak there", class: "number", cell: (row) => exact(row.peak_bytes) },
      { title: "", cell: () => tag("estimated") },
    ],
  });
  shown.update(changes);
  return shown.element;
}

// --- what can be done -----------------------------------------------------------------------------------------------

function actions() {
  const { tuning } = page;
  const own = keyId() === (tuning.key_id ?? "") || may("admin");
  if (!may("tunings:write")) {
    return [];
  }
  const ended = ENDED.has(tuning.state);
  return [
    ended && button("Repeat", repeat, "button-primary"),
    !ended && own && button(tuning.state === "CANCELLING" ? "Cancelling…" : "Cancel", cancel, "button-danger", tuning.state === "CANCELLING"),
    ended && own && button("Delete", remove, "button-danger"),
  ];
}

function button(text, act, kind, disabled = false) {
  const made = h("button", { type: "button", class: `button ${kind}`, disabled }, text);
  made.addEventListener("click", () => busy(made, act).catch(complain));
  return made;
}

async function cancel() {
  page.tuning = await post(`${path}/cancel`);
  show();
}

async function repeat() {
  const made = await post("/v1/tunings", { ...page.tuning.request, fresh: true }, { idempotencyKey: crypto.randomUUID?.() });
  location.assign(`/tunings/${encodeURIComponent(made.id)}`);
}

async function remove() {
  const text = "Its probes and events go with it. A recommendation that came of it stays.";
  if (await confirmDialog({ title: "Delete this tuning?", text, action: "Delete" })) {
    await del(path);
    location.assign("/tunings");
  }
}

function again() {
  const { request } = page.tuning;
  return [
    codeBlock(JSON.stringify(request.spec, null, 2), { label: "spec.json", download: "spec.json" }),
    codeBlock(asCommand(request), { label: "On the command line" }),
    codeBlock(asCurl(request, location.origin, keyId() !== ""), { label: "Over HTTP" }),
  ];
}
