/** The page of a job: state and curves live, splits after an OOM, the log followed, checkpoints. */

import { addressOf, get, keyId, may, post, request, textOf } from "./api.js";
import { Chart, level, line, points } from "./chart.js";
import { commandOf, takesUpdates } from "./command.js";
import { alertBox, bar, CopyButton, definitions, emptyState, linkTo, nameFacts, time } from "./components.js";
import { Table } from "./data_table.js";
import { shortened, withDetails } from "./device_words.js";
import { byId, colour } from "./dom.js";
import { bytes, bytesExactly, count, number, plural, seconds } from "./format.js";
import { bestOf, makeHistory } from "./history.js";
import { ENDED, poll } from "./live.js";
import { planInWords } from "./plan.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./preact-htm.js";
import { Card, deviceOf, failure, runFacts, useWork, Waiting, WorkPage } from "./work.js";

const GIB = 1024 ** 3;
const MIB = 1024 ** 2;
const MOST_POINTS = 2000;
const FEW = 50; // points that are marked too
const LISTED_EVALUATIONS = 20;
const DRAW_MILLISECONDS = 500;
const LOG_SECONDS = 2;
const LOG_BYTES = 64 * 1024;

function JobPage() {
  const history = useRef(makeHistory(MOST_POINTS)).current;
  const [progress, add, clear] = useProgress(history);
  const [round, setRound] = useState(0);
  const work = useWork("job", { after: () => 0, onEvent: (event) => add(event.progress) });
  const resume = async () => {
    work.change(await post(`${work.path}/resume`));
    clear();
    work.followAgain();
    setRound(round + 1);
  };
  const job = work.current && { ...work.current, progress: progress ?? work.current.progress };
  const own = job && (keyId() === (job.key_id ?? "") || may("admin"));
  const action = own && ENDED.has(job.state) && job.state !== "SUCCEEDED" && [commandOf(job.recommendation.request) ? "Start again" : "Resume", resume];
  return html`<${WorkPage} work=${work} deletion="Its events, log, checkpoints and weights are deleted too." action=${action}>
    ${job && sections(work, job, history)}
    ${job && (isElsewhere(work.current) ? html`<p id="elsewhere">The files of this job are on ${job.slot.replace(/\/[^/]*$/, "")}, which this server cannot read. Share one <code>BATCHWRIGHT_RUNS_DIR</code> between hosts to see its log here.</p>` : html`
      <${Log} key="log ${round}" path=${work.path} job=${job} />
      ${ofWorkload(job) && html`<${Checkpoints} path=${work.path} job=${job} />`}`)}
  <//>`;
}

/** Whether the folder of a run that has begun is on a host whose files this server cannot read; of a job as it was read. */
function isElsewhere({ slot, directory, state, progress }) {
  return slot !== null && directory === null && (ENDED.has(state) || progress !== null);
}

/** The newest progress of the job, drawn at most twice a second, however many events there are. */
function useProgress(history) {
  const [progress, setProgress] = useState(null);
  const drawing = useRef(null);
  const add = (found) => {
    history.add(found);
    drawing.current ??= setTimeout(() => {
      drawing.current = null;
      setProgress(history.rows().at(-1) ?? null);
    }, DRAW_MILLISECONDS);
  };
  return [progress, add, () => history.clear()];
}

/** True for a workload that is described; false for a command, which knows itself what it does. */
function ofWorkload({ recommendation }) {
  return commandOf(recommendation.request) === null;
}

/** The updates that the job will make, or null where only its command knows. */
function totalOf(job) {
  const command = commandOf(job.recommendation.request);
  return command && !takesUpdates(command) ? null : job.progress?.updates ?? job.training.updates;
}

// --- sections --------------------------------------------------------------------------------------------------

function sections(work, job, history) {
  const { progress, result } = job;
  const tuning = job.recommendation.evidence.tuning_id;
  return html`
    ${failures(job)}
    <section class="card answer" id="answer" aria-labelledby="answer-title">
      ${job.state === "QUEUED" ? html`<div id="progress" class="stack"><${Waiting} work=${work} /></div>` : html`<h2 id="answer-title">${headlineOf(job)}</h2><div id="progress">${progressBar(job)}</div>`}
      ${result && job.directory && html`<p>${ofWorkload(job) ? "Checkpoints and weights" : "Its files"} are in <code>${job.directory}</code> <${CopyButton} text=${job.directory} /></p>`}
      <p class="small links"><span>Recommendation: ${linkTo("recommendations", job.recommendation_id)}</span>${tuning && html`<span>Tuning: ${linkTo("tunings", tuning)}</span>`}</p>
    </section>
    <div id="notices" class="stack">${(result?.notes ?? []).map((note) => alertBox("warn", null, shortened(note)))}</div>
    ${progress && html`<${Card} name="progress" title="Progress">
      <div id="newest">${definitions(ofWorkload(job) ? newest(job, history) : newestOfCommand(job))}</div>
      ${history.rows().length > 0 && curves(job, history)}
      ${evaluations(history)}
      ${splits(history)}
    <//>`}
    <${Card} name="facts" title="Run"><div id="facts">${definitions([
      ...nameFacts(job, "jobs"),
      ["Plan", job.recommendation.plan && planInWords(job.recommendation.plan.micro_batch_sizes)],
      ["Effective batch size", `${count(job.effective_batch_size)} samples`],
      ["Device", deviceOf(job)],
      ["Updates", totalOf(job) && count(totalOf(job))],
      ["Checkpoint", ofWorkload(job) && ((totalOf(job) ?? Infinity) < job.training.checkpoint_every ? "at the end" : `every ${plural(job.training.checkpoint_every, "update")}`)],
      ...runFacts(job),
      ["Directory", !result && job.directory && html`<code>${job.directory}</code>`],
      ["Exit status", result?.exit_status?.toString()],
      ["Not finite since", result?.not_finite_since && `update ${count(result.not_finite_since)}`],
      ["Evaluation", result?.evaluation?.message],
      ["Suggested batch", noiseFigure(result?.noise_scale)],
      ["Weights (SHA-256)", result?.weights_sha256 && html`<code>${result.weights_sha256}</code>`],
    ])}</div><//>`;
}

function failures({ problem, result, state }) {
  return [
    failure({ problem }),
    state === "FAILED" && problem === null && result !== null && alertBox("bad", "The run failed", html`<div class="preline">${withDetails(result.message)}</div>`),
  ];
}

function progressBar(job) {
  const made = job.progress?.update ?? 0;
  const total = totalOf(job);
  return total !== null && bar({ value: made, max: total, label: "Updates", text: `${count(made)} of ${count(total)} updates` });
}

/** What the job has done: "Trained for 6 updates: loss 5.499". */
function headlineOf(job) {
  const { progress, state } = job;
  if (!progress) {
    return state === "RUNNING" ? "The first update is running…" : "Ended before its first update";
  }
  const total = totalOf(job);
  const begin = { RUNNING: total === null ? "" : "Update ", CANCELLING: "Stopping after ", SUCCEEDED: "Trained for " }[state] ?? "Stopped after ";
  const made = begin === "Update " ? `${count(progress.update)} of ${count(total)}` : plural(progress.update, "update");
  return `${begin}${made}: ${ofWorkload(job) ? `loss ${number(progress.loss)}` : `${count(progress.samples_seen)} samples`}`;
}

/** Samples per second of an update; of a command, since its first. */
function rate(row) {
  return row.samples_per_second === undefined ? row.samples / row.seconds : row.samples_per_second;
}

function newest(job, history) {
  const { progress, state } = job;
  const left = (progress.updates - progress.update) * progress.seconds;
  return [
    ["Loss", number(progress.loss)],
    ["Held-out loss", heldOutLoss(history.evaluations())],
    ["Samples per second", number(rate(progress), 3)],
    ["Learning rate", number(progress.learning_rate, 3)],
    ["Gradient norm", number(progress.gradient_norm, 3)],
    ["Noise scale", noiseFigure(history.rows().findLast((row) => row.noise_scale)?.noise_scale, { inWords: job.result === null })],
    ["Peak memory", html`<span title=${bytesExactly(progress.peak_bytes)}>${bytes(progress.peak_bytes)}</span>`],
    ["Samples seen", count(progress.samples_seen)],
    ["Time left", state === "RUNNING" && seconds(left)],
  ];
}

/** The newest loss on held-out samples, beside the best evaluation. */
function heldOutLoss(rows) {
  const best = bestOf(rows);
  return rows.length > 0 && html`<span>${number(rows.at(-1).loss)}${best && html`<span class="muted small"> best weights after update ${count(best.update)}</span>`}</span>`;
}

function newestOfCommand({ progress, recommendation: { headroom } }) {
  const { peak_bytes: peak, samples_per_second: speed } = progress;
  return [
    ["Samples per second", speed && number(speed, 3)],
    ["Peak memory", peak && html`<span title=${bytesExactly(peak)}>${bytes(peak)}${headroom && ` of ${bytes(headroom.limit_bytes)}`}</span>`],
    ["Samples seen", count(progress.samples_seen)],
    ["Ranks", progress.world_size > 1 && count(progress.world_size)],
    ["Unlike the plan", progress.unlike_plan > 0 && plural(progress.unlike_plan, "update")],
  ];
}

/** The gradient noise scale in samples with its interval; in words too, which effective batch it suggests. */
function noiseFigure(found, { inWords = true } = {}) {
  if (!found) {
    return null;
  }
  const { samples, lower_samples: lower, upper_samples: upper, message } = found;
  const whole = (value) => count(Math.round(value));
  const figure = samples !== null && upper !== null ? `${whole(samples)} samples (95 %: ${whole(lower)} to ${whole(upper)})` : lower !== null ? `at least ${whole(lower)} samples` : "not known";
  return html`<span>${figure}${inWords && html`<span class="muted small"> ${message}.</span>`}</span>`;
}

// --- curves ---------------------------------------------------------------------------------------------------------

function curves(job, history) {
  const rows = history.rows();
  const limit = job.recommendation.headroom?.limit_bytes ?? null;
  const [unit, unitName] = Math.max(...rows.map((row) => row.peak_bytes ?? 0)) >= GIB ? [GIB, "GiB"] : [MIB, "MiB"];
  const drawn = (id, title, figure) => html`<figure key=${id}><figcaption>${title}</figcaption><${Chart} id=${id} class="chart-small" figure=${figure} /></figure>`;
  return html`<div id="curves" class="curves">
    ${ofWorkload(job) && drawn("loss", "Loss", () => curve("loss", rows, (row) => row.loss, "--chart-1", { more: [...heldOutCurve(history.evaluations()), ...splitMarks(history.splits())], fromZero: false }))}
    ${drawn("throughput", "Samples per second", () => curve("samples per second", rows, rate, "--chart-3"))}
    ${ofWorkload(job) && drawn("learning-rate", "Learning rate", () => curve("learning rate", rows, (row) => row.learning_rate, "--chart-4"))}
    ${drawn("memory", `Peak memory so far (${unitName})`, () => curve("memory", rows, (row) => (row.peak_bytes === null ? null : row.peak_bytes / unit), "--chart-2", { limit: limit && level(limit / unit, `limit ${bytes(limit)}`, "--bad", { above: false }) }))}
  </div>`;
}

function curve(name, rows, read, token, { more = [], fromZero = true, limit = null } = {}) {
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--edge"), automargin: true };
  const main = line(name, rows.map((row) => row.update), rows.map(read), token, { hover: "x+y", marks: rows.length <= FEW });
  return {
    data: [main, ...more],
    layout: {
      showlegend: more.length > 0,
      hovermode: "x unified",
      xaxis: { ...axis, title: { text: "update" } },
      yaxis: { ...axis, rangemode: fromZero ? "tozero" : "normal" },
      margin: { l: 56, r: 12, t: 8, b: 40 },
      shapes: limit ? [limit.shape] : [],
      annotations: limit ? [limit.annotation] : [],
    },
  };
}

function heldOutCurve(rows) {
  return rows.length === 0 ? [] : [line("held-out loss", rows.map((row) => row.update), rows.map((row) => row.loss), "--chart-2", { hover: "x+y", marks: rows.length <= FEW })];
}

function splitMarks(rows) {
  const hover = rows.map((row) => `update ${row.update}: split after running out of memory`);
  return rows.length === 0 ? [] : [points("split after OOM", rows.map((row) => row.update), rows.map((row) => row.loss), { token: "--bad", symbol: "x", hover })];
}

/** The newest evaluations; all of them are in the chart. */
function evaluations(history) {
  const all = history.evaluations();
  const best = bestOf(all);
  const rows = all.slice(-LISTED_EVALUATIONS).reverse();
  const columns = [
    { title: "After update", class: "number", cell: (row) => html`${row === best && html`<span class="badge badge-ok">best</span> `}${count(row.update)}` },
    { title: rows[0]?.of_averages ? "Held-out loss of the moving averages" : "Held-out loss", class: "number", cell: (row) => number(row.loss) },
    ...(rows[0]?.trained ? [{ title: "of the trained weights", class: "number", cell: (row) => number(row.trained?.loss) }] : []),
    ...Object.keys(rows[0]?.metrics ?? {}).map((name) => ({ title: name, class: "number", cell: (row) => number(row.metrics[name]) })),
    { title: "Samples", class: "number", cell: (row) => count(row.samples) },
    { title: "Seconds", class: "number", cell: (row) => number(row.seconds, 3) },
  ];
  return rows.length > 0 && html`<div id="evaluations" class="stack">
    ${rows[0].message && alertBox("warn", "The newest evaluation has no figures", shortened(rows[0].message))}
    ${rows.length < all.length && html`<p class="muted small">The newest ${count(rows.length)} of ${plural(all.length, "evaluation")} are listed.</p>`}
    <${Table} caption="Evaluations on held-out samples" showCaption=${true} columns=${columns} rows=${rows} keyOf=${(row) => row.update} />
  </div>`;
}

const SPLITS = [
  { title: "Update", class: "number", cell: (row) => count(row.update) },
  { title: "Rank", class: "number", cell: (row) => row.rank },
  { title: "Micro-batch", class: "number", cell: (row) => count(row.size) },
  { title: "Split into", cell: (row) => row.parts.join(" + ") },
];

function splits(history) {
  const rows = history.splits().flatMap((row) => row.splits.map((split, index) => ({ ...split, update: row.update, key: `${row.update}-${index}` })));
  return rows.length > 0 && html`<div id="splits" class="stack">
    ${alertBox("warn", "Some micro-batches ran out of memory", "They were split and run again. The gradients are those of the whole micro-batch.")}
    <p class="muted small">${plural(history.splitUpdates(), "update")} of ${count(history.rows().at(-1).update)}; the newest are listed.</p>
    <${Table} caption="Micro-batches that ran out of memory and were split" columns=${SPLITS} rows=${rows} keyOf=${(row) => row.key} />
  </div>`;
}

// --- checkpoints and the log -----------------------------------------------------------------------------------------

const CHECKPOINTS = [
  { title: "After update", class: "number", cell: (row) => count(row.update) },
  { title: "Size", class: "number", cell: (row) => html`<span title=${bytesExactly(row.size_bytes)}>${bytes(row.size_bytes)}</span>` },
  { title: "Written", class: "nowrap", cell: (row) => time(row.modified_at) },
];

/** The checkpoints, read again when another is expected, and at the end. */
function Checkpoints({ path, job: { training, progress, state } }) {
  const [items, setItems] = useState(null);
  const written = Math.floor((progress?.update ?? 0) / training.checkpoint_every);
  useEffect(() => {
    const read = () => get(`${path}/checkpoints`).then((found) => setItems(found.items), () => setItems(null)); // the log says why
    const waiting = setTimeout(read, items === null ? 0 : 1000 * LOG_SECONDS);
    return () => clearTimeout(waiting);
  }, [written, state]);
  const { checkpoint_every: every, updates } = training;
  const text = updates < every ? `One is written at the end, after update ${count(updates)}.` : `One is written every ${plural(every, "update")}, and at the end.`;
  const none = emptyState({ title: "No checkpoint yet", text });
  return items && html`<${Card} name="checkpoints" title="Checkpoints"><div id="checkpoints">
    ${items.length > 0 ? html`<${Table} caption="Checkpoints" columns=${CHECKPOINTS} rows=${items} keyOf=${(row) => row.update} />` : none}
  </div><//>`;
}

/** The end of the log, followed until the job has ended. */
function Log({ path, job }) {
  const [text, setText] = useState("");
  const [problem, setProblem] = useState(null);
  const [follows, setFollows] = useState(true);
  const place = useRef(null);
  const state = useRef(null);
  state.current = job.state;
  useEffect(() => {
    const polling = poll(async (signal) => {
      const response = await request("GET", addressOf(`${path}/logs`, { tail: LOG_BYTES }), undefined, { signal, headers: { Accept: "text/plain, application/problem+json" } });
      setText((await textOf(response)) || (state.current === "QUEUED" ? "The log begins when the job starts." : "The log is empty."));
      setProblem(null);
      if (ENDED.has(state.current)) {
        polling.stop();
      }
    }, LOG_SECONDS, { onProblem: (found) => {
      setProblem(found);
      polling.stop();
    } });
    return polling.stop;
  }, []);
  useLayoutEffect(() => {
    if (follows) {
      place.current.scrollTop = place.current.scrollHeight;
    }
  }, [text, follows]);
  const choice = html`<label class="choice"><input id="follow-log" type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} /> follow the end</label>`;
  return html`<${Card} name="log" title="Log" aside=${choice}>
    ${problem && html`<p class="muted">${problem.detail}</p>`}
    <pre id="log" class="log" tabindex="0" role="log" aria-live="off" aria-label="Log" ref=${place}>${text}</pre>
  <//>`;
}

render(html`<${JobPage} />`, byId("page"));
