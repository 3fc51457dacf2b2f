/** The page of a job: state and curves live, splits after an OOM, the log followed, checkpoints. */

import { addressOf, get, post, request, textOf } from "./api.js";
import { commandOf, takesUpdates } from "./command.js";
import { line, makeChart, points } from "./chart.js";
import { shortened, withDetails } from "./device_words.js";
import { byId, colour, h, replace, setText } from "./dom.js";
import { bytes, bytesExactly, count, number, plural, seconds, time } from "./format.js";
import { makeHistory } from "./history.js";
import { ENDED, poll } from "./live.js";
import { alertBox, bar, definitions, emptyState, nameFacts } from "./parts.js";
import { makeTable } from "./table.js";
import { failure, keyFact, makeWorkPage, positionInWords, runFacts } from "./work.js";

const GIB = 1024 ** 3;
const MIB = 1024 ** 2;
const MOST_POINTS = 2000;
const FEW = 50; // points that are marked too
const DRAW_MILLISECONDS = 500;
const LOG_SECONDS = 2;
const LOG_BYTES = 64 * 1024;

const page = { history: makeHistory(MOST_POINTS), drawing: false, checkpoints: null, logging: null };
const work = makeWorkPage({
  kind: "job",
  writeScope: "jobs:run",
  deletion: "Its events, log, checkpoints and weights are deleted too.",
  show,
  showWaiting: showBar,
  begin: followAll,
  action: ({ ended, own }) => own && ended && work.current.state !== "SUCCEEDED" && [command() ? "Start again" : "Resume", resume],
  leave: () => page.logging?.stop(),
});

const charts = [
  makeChart(byId("throughput"), () => curve("samples per second", rate, "--chart-3")),
  makeChart(byId("memory"), memoryCurve),
];
const chartsOfWorkloads = [
  makeChart(byId("loss"), () => curve("loss", (row) => row.loss, "--chart-1", { more: splitMarks(), fromZero: false })),
  makeChart(byId("learning-rate"), () => curve("learning rate", (row) => row.learning_rate, "--chart-4")),
];
const splitTable = makeTable({ caption: "Micro-batches that ran out of memory and were split", columns: splitColumns(), keyOf: (row) => row.key });
const checkpointTable = makeTable({ caption: "Checkpoints", columns: checkpointColumns(), keyOf: (row) => row.update });

const splitNote = alertBox("warn", "Some micro-batches ran out of memory", "They were split and run again. The gradients are those of the whole micro-batch.");
const splitCount = h("p", { class: "muted small" });

work.start();

function followAll() {
  page.history.clear();
  work.follow(onEvent);
  followLog();
}

function onEvent({ progress }) {
  page.history.add(progress);
  work.current.progress = progress;
  drawSoon();
  if (!command() && progress.update % work.current.training.checkpoint_every === 0) {
    clearTimeout(page.checkpoints); // once, even if many updates come at once
    page.checkpoints = setTimeout(showCheckpoints, 1000 * LOG_SECONDS);
  }
}

/** The command of the job, or null where a workload is described. */
function command() {
  return commandOf(work.current.recommendation.request);
}

/** The updates that the job will make, or null where only its command knows. */
function total() {
  const { progress, training } = work.current;
  return command() && !takesUpdates(command()) ? null : progress?.updates ?? training.updates;
}

// --- sections --------------------------------------------------------------------------------------------------

function show() {
  const job = work.current;
  replace(byId("notices"), notices(job));
  replace(byId("facts"), definitions([
    ...nameFacts(job),
    ["Recommendation", h("a", { href: `/recommendations/${encodeURIComponent(job.recommendation_id)}`, class: "mono" }, job.recommendation_id)],
    ["Effective batch size", `${count(job.effective_batch_size)} samples`],
    ["Device", job.device ?? job.hardware],
    ["Updates", total() === null ? null : count(total())],
    ["Checkpoint every", command() ? null : plural(job.training.checkpoint_every, "update")],
    ...runFacts(job),
    ["Directory", job.directory && h("code", {}, job.directory)],
    ["Exit status", job.result?.exit_status?.toString()],
    ["Suggested batch", noiseFigure(job.result?.noise_scale)],
    ["Weights (SHA-256)", job.result?.weights_sha256 && h("code", {}, job.result.weights_sha256)],
    keyFact(job),
  ]));
  showProgress();
  byId("checkpoints").closest("section").hidden = command() !== null; // they are in its output folder
  ["loss", "learning-rate"].forEach((name) => (byId(name).closest("figure").hidden = command() !== null));
  if (!command()) {
    showCheckpoints();
  }
}

function notices({ problem, result, state }) {
  return [
    failure({ problem }),
    state === "FAILED" && problem === null && result !== null && alertBox("bad", "The run failed", h("div", { class: "preline" }, withDetails(result.message))),
    (result?.notes ?? []).map((note) => alertBox("warn", null, shortened(note))),
  ];
}

function showProgress() {
  const { progress } = work.current;
  const rows = page.history.rows();
  byId("curves").hidden = rows.length === 0;
  setText(byId("curves-words"), rows.length === 0 ? "No update has ended yet." : inWords(progress));
  showBar();
  replace(byId("newest"), progress && newest(progress));
  showSplits();
  if (rows.length > 0) {
    [...charts, ...(command() ? [] : chartsOfWorkloads)].forEach((chart) => chart.draw());
  }
}

function showBar() {
  const { progress, queue, state } = work.current;
  const made = progress?.update ?? 0;
  const shown = total() === null ? h("p", {}, plural(made, "update")) : bar({ value: made, max: total(), label: "Updates", text: `${count(made)} of ${count(total())} updates` });
  replace(byId("progress"), state === "QUEUED" ? h("p", {}, positionInWords(queue)) : shown);
}

/** Samples per second of an update; of a command, since its first. */
function rate(row) {
  return row.samples_per_second === undefined ? row.samples / row.seconds : row.samples_per_second;
}

function peakOfLimit(peak, limit) {
  return h("span", { title: bytesExactly(peak) }, `${bytes(peak)} of ${bytes(limit)}`);
}

function newest(progress) {
  if (command()) {
    return newestOfCommand(progress);
  }
  const left = (progress.updates - progress.update) * progress.seconds;
  return definitions([
    ["Loss", number(progress.loss)],
    ["Samples per second", number(rate(progress), 3)],
    ["Learning rate", number(progress.learning_rate, 3)],
    ["Gradient norm", number(progress.gradient_norm, 3)],
    ["Noise scale", noiseFigure(page.history.rows().findLast((row) => row.noise_scale)?.noise_scale)],
    ["Peak memory", h("span", { title: bytesExactly(progress.peak_bytes) }, bytes(progress.peak_bytes))],
    ["Samples seen", count(progress.samples_seen)],
    ["Time left", work.current.state === "RUNNING" ? seconds(left) : null],
  ]);
}

/** The gradient noise scale in samples with its interval, and a sentence on the effective batch that it suggests. */
function noiseFigure(found) {
  if (!found) {
    return null;
  }
  const { samples, lower_samples: lower, upper_samples: upper, message } = found;
  const whole = (value) => count(Math.round(value));
  const figure = samples !== null && upper !== null ? `${whole(samples)} samples (95%: ${whole(lower)} to ${whole(upper)})` : lower !== null ? `at least ${whole(lower)} samples` : "not known";
  return h("span", {}, figure, h("span", { class: "muted small" }, ` ${message}.`));
}

function newestOfCommand(progress) {
  const { headroom } = work.current.recommendation;
  return definitions([
    ["Samples per second", progress.samples_per_second && number(progress.samples_per_second, 3)],
    ["Peak memory", progress.peak_bytes && (headroom ? peakOfLimit(progress.peak_bytes, headroom.limit_bytes) : bytes(progress.peak_bytes))],
    ["Samples seen", count(progress.samples_seen)],
    ["Ranks", progress.world_size > 1 ? count(progress.world_size) : null],
    ["Unlike the plan", progress.unlike_plan > 0 ? plural(progress.unlike_plan, "update") : null],
  ]);
}

function inWords(progress) {
  if (progress === null) {
    return "";
  }
  const made = total() === null ? plural(progress.update, "update") : `Update ${count(progress.update)} of ${count(total())}`;
  return command() ? `${made}, ${count(progress.samples_seen)} samples.` : `${made}: loss ${number(progress.loss)}.`;
}

function drawSoon() {
  if (!page.drawing) {
    page.drawing = true;
    setTimeout(() => {
      page.drawing = false;
      showProgress();
    }, DRAW_MILLISECONDS);
  }
}

function memoryCurve() {
  const largest = Math.max(...page.history.rows().map((row) => row.peak_bytes ?? 0));
  const [unit, name] = largest >= GIB ? [GIB, "GiB"] : [MIB, "MiB"];
  setText(byId("memory-unit"), ` (${name})`);
  return curve("memory", (row) => (row.peak_bytes === null ? null : row.peak_bytes / unit), "--chart-2");
}

function curve(name, read, token, { more = [], fromZero = true } = {}) {
  const rows = page.history.rows();
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--edge"), automargin: true };
  const main = line(name, rows.map((row) => row.update), rows.map(read), token, { hover: "x+y", marks: rows.length <= FEW });
  return { data: [main, ...more], layout: { showlegend: more.length > 0, hovermode: "x unified", xaxis: { ...axis, title: { text: "update" } }, yaxis: { ...axis, rangemode: fromZero ? "tozero" : "normal" }, margin: { l: 56, r: 12, t: 8, b: 40 } } };
}

function splitMarks() {
  const rows = page.history.splits();
  if (rows.length === 0) {
    return [];
  }
  const hover = rows.map((row) => `update ${row.update}: split after running out of memory`);
  return [points("split after OOM", rows.map((row) => row.update), rows.map((row) => row.loss), { token: "--bad", symbol: "x", hover })];
}

function showSplits() {
  const rows = page.history.splits().flatMap((row) => row.splits.map((split, index) => ({ ...split, update: row.update, key: `${row.update}-${index}` })));
  if (rows.length === 0) {
    replace(byId("splits"));
    return;
  }
  splitTable.update(rows);
  setText(splitCount, `${plural(page.history.splitUpdates(), "update")} of ${count(page.history.rows().at(-1).update)}; the newest are listed.`);
  if (splitTable.element.parentNode !== byId("splits")) {
    replace(byId("splits"), splitNote, splitCount, splitTable.element);
  }
}

function splitColumns() {
  return [
    { title: "Update", class: "number", cell: (row) => count(row.update) },
    { title: "Rank", class: "number", cell: (row) => row.rank },
    { title: "Micro-batch", class: "number", cell: (row) => count(row.size) },
    { title: "Split into", cell: (row) => row.parts.join(" + ") },
  ];
}

function checkpointColumns() {
  return [
    { title: "After update", class: "number", cell: (row) => count(row.update) },
    { title: "Size", class: "number", cell: (row) => h("span", { title: bytesExactly(row.size_bytes) }, bytes(row.size_bytes)) },
    { title: "Written", class: "nowrap", cell: (row) => time(row.modified_at) },
  ];
}

async function showCheckpoints() {
  try {
    const { items } = await get(`${work.path}/checkpoints`);
    checkpointTable.update(items);
    replace(byId("checkpoints"), items.length > 0 ? checkpointTable.element : emptyState({ title: "No checkpoint yet", text: `One is written every ${plural(work.current.training.checkpoint_every, "update")}, and at the end.` }));
  } catch (problem) {
    replace(byId("checkpoints"), h("p", { class: "muted" }, problem.detail));
  }
}

// --- the log --------------------------------------------------------------------------------------------------------

function followLog() {
  page.logging?.stop();
  page.logging = poll(async (signal) => {
    const response = await request("GET", addressOf(`${work.path}/logs`, { tail: LOG_BYTES }), undefined, { signal, headers: { Accept: "text/plain, application/problem+json" } });
    showLog(await textOf(response));
    replace(byId("log-problem"));
    if (ENDED.has(work.current.state)) {
      page.logging.stop();
    }
  }, LOG_SECONDS, { onProblem: (problem) => {
    replace(byId("log-problem"), h("p", { class: "muted" }, problem.detail));
    page.logging.stop();
  } });
}

function showLog(text) {
  const log = byId("log");
  setText(log, text || "The log is empty.");
  if (byId("follow-log").checked) {
    log.scrollTop = log.scrollHeight;
  }
}

// --- actions -----------------------------------------------------------------------------------------------

async function resume() {
  work.change(await post(`${work.path}/resume`));
  followAll();
}
