/** The overview: key figures, running work, devices, the queue, failures and gains. */

import { get, may } from "./api.js";
import { badge, bar, both, elapsed, emptyState, linkTo, mark, problemAlert, scopeAlert, tag, time } from "./components.js";
import { Table } from "./data_table.js";
import { withDetails } from "./device_words.js";
import { byId } from "./dom.js";
import { bytes, count, number, percent, plural, seconds } from "./format.js";
import { usePolled } from "./hooks.js";
import { occupancyOf, strip } from "./occupancy.js";
import { html, render, useState } from "./preact-htm.js";

const NOW_SECONDS = 3;
const SUMMARY_SECONDS = 15;
const OCCUPANCY_SECONDS = 30;
const QUEUE_SHOWN = 20;
const RUNNING_SHOWN = 100;
const DETAILED = 6; // running work whose details are read each time
const PERIODS = { "24h": "24 hours", "7d": "7 days", all: "All time" };
const ACTIVE_STATES = ["RUNNING", "CANCELLING"];
const PATHS = { tuning: "tunings", job: "jobs" };
const NEARLY_FULL = 0.9;
const READS_ALL = may("tunings:read"); // jobs are only part of it

function Overview() {
  const now = usePolled(readNow, NOW_SECONDS);
  return READS_ALL ? html`<${Fleet} now=${now} />` : html`${scopeAlert("tunings:read")}${may("jobs:read") && html`<${Running} work=${now.data?.running} />`}`;
}

/** Everything, for a key that may read tunings. */
function Fleet({ now: { data, problem } }) {
  const [period, setPeriod] = useState("24h");
  const { data: occupancy } = usePolled((signal) => get("/v1/occupancy", { signal }), OCCUPANCY_SECONDS);
  const { data: summary, problem: failure } = usePolled((signal) => get("/v1/summary", { query: { period }, signal }), SUMMARY_SECONDS, period);
  return html`
    ${summary && !Object.values({ ...summary.tunings, ...summary.jobs }).some(Boolean) && html`<${Welcome} />`}
    ${[problem, failure].filter(Boolean).map((each) => problemAlert(each))}
    <section aria-label="Key figures" class="stack">
      <div class="segments" role="group" aria-label="Period">${Object.entries(PERIODS).map(([name, text]) => html`<button type="button" class="segment" aria-pressed=${String(name === period)} onClick=${() => setPeriod(name)}>${text}</button>`)}</div>
      <div id="figures" class="card figures">${summary ? figures(summary, data?.devices) : html`<p class="muted">Loading…</p>`}</div>
    </section>
    <${Running} work=${data?.running} />
    <${Section} name="devices" title="Devices">${data && devices(data.devices, occupancy)}<//>
    <${Section} name="queue" title="Queue" note=${data?.queue.length === QUEUE_SHOWN && `the first ${QUEUE_SHOWN}; positions count for each device`}>${data && queue(data.queue)}<//>
    <${Section} name="activity" title="Activity">${summary && html`<div class="stack">
      <div class="happened">${failures(summary.failures)}${spent(summary.device_seconds)}</div>${gained(summary.gains.models)}
    </div>`}<//>`;
}

/** On the first start: what to do, with an example to try. */
function Welcome() {
  const { data } = usePolled((signal) => get("/v1/tunings", { query: { limit: 1 }, signal }), SUMMARY_SECONDS);
  return data?.items.length === 0 && may("tunings:write") && emptyState({
    title: "Welcome to Batchwright",
    text: "Describe what you train, and a tuning finds the largest micro-batch that fits, with a plan of exactly your effective batch.",
    action: html`<div class="form-buttons"><a class="button button-primary" href="/tunings/new?example=a+small+GPT">Try an example</a><a class="button" href="/tunings/new">New tuning</a></div>`,
  });
}

/** A section with its heading; a placeholder until its content is there. */
function Section({ name, title, note, children }) {
  return html`<section aria-labelledby="${name}-title">
    <div class="section-head"><h2 id="${name}-title">${title}</h2>${note && html`<span class="muted small">${note}</span>`}</div>
    <div id=${name}>${children || html`<p class="muted">Loading…</p>`}</div>
  </section>`;
}

async function readNow(signal) {
  const [running, served, waiting] = await Promise.all([
    readRunning(signal),
    READS_ALL && get("/v1/devices", { signal }),
    READS_ALL && get("/v1/queue", { query: { limit: QUEUE_SHOWN }, signal }),
  ]);
  return { running, devices: served.items, queue: waiting.items };
}

// --- key figures ----------------------------------------------------------------------------------------------------

function figures({ tunings, jobs, device_seconds: slots, recommendation_hits: stored, gains }, served) {
  const sum = (...states) => states.reduce((total, state) => total + (tunings[state] ?? 0) + (jobs[state] ?? 0), 0);
  const probes = slots.reduce((total, slot) => total + slot.probes_seconds, 0);
  const training = slots.reduce((total, slot) => total + slot.jobs_seconds, 0);
  const busy = served?.filter((row) => row.running_id !== null).length;
  return [
    ["Running", count(sum("RUNNING", "CANCELLING"))],
    ["Waiting", count(sum("QUEUED"))],
    ["Devices busy", served === undefined ? "–" : `${busy} of ${served.length}`],
    ["Failed", count(sum("FAILED")), `${count(sum("SUCCEEDED"))} succeeded, ${count(sum("CANCELLED"))} cancelled`],
    ["Gain in speed", speedupWords(gains), gainNote(gains)],
    ["Device time", seconds(Math.round(probes + training)), `${seconds(probes)} probes, ${seconds(training)} jobs`],
    ["Served from the store", percent(stored.hit_rate), `${count(stored.hits)} of ${plural(stored.hits + stored.misses, "tuning")}`],
  ].map(([label, value, note]) => html`<div><div class="figure-label">${label}</div><div class="figure-value">${value}</div>${note && html`<div class="muted small">${note}</div>`}</div>`);
}

/** A median speedup, with a sign of estimates among its figures. */
function speedupWords({ speedup, speedups, measured }) {
  return speedup === null ? "not known" : `${measured < speedups ? "~" : ""}${number(speedup, 3)}×`;
}

/** A difference of two shares, in percentage points. */
function points(share) {
  return share === null ? "–" : `${share < 0 ? "−" : "+"}${count(Math.round(100 * Math.abs(share)))} points`;
}

function gainNote({ recommendations, speedups, measured, memory_gain: memory }) {
  if (recommendations === 0) {
    return "no recommendation with a baseline";
  }
  const source = speedups === 0 ? "" : `, ${count(measured)} measured, ${count(speedups - measured)} estimated`;
  return `median of ${plural(recommendations, "recommendation")}${source}; ${points(memory)} of memory`;
}

const FAILURES = [
  { title: "Cause", class: "model", cell: (row) => html`<code>${row.code}</code> ${tag(row.kind)}` },
  { title: "Count", class: "number", cell: (row) => html`<a href="/${PATHS[row.kind]}?state=FAILED${row.code && `&problem_code=${encodeURIComponent(row.code)}`}">${count(row.count)}</a>` },
  { title: "Newest", class: "nowrap", cell: (row) => both(workLink(row.newest_id), time(row.newest_at)) },
  { title: "Message", class: "wide message", cell: (row) => withDetails(row.message) },
];

function failures(rows) {
  return rows.length === 0
    ? emptyState({ title: "No failures", text: "Failed tunings and jobs are listed here by cause." })
    : html`<${Table} caption="Failures by cause" showCaption columns=${FAILURES} rows=${rows} keyOf=${(row) => `${row.kind} ${row.code}`} />`;
}

const SPENT = [
  { title: "Slot", class: "model", cell: (row) => row.slot },
  { title: "Probes", class: "number", cell: (row) => seconds(row.probes_seconds) },
  { title: "Jobs", class: "number", cell: (row) => seconds(row.jobs_seconds) },
];

function spent(rows) {
  return rows.length > 0 && html`<${Table} caption="Device time by slot" showCaption columns=${SPENT} rows=${rows} keyOf=${(row) => row.slot} />`;
}

const GAINED = [
  { title: "Model", class: "model", cell: (row) => html`<a href="/recommendations?model=${encodeURIComponent(row.model)}">${row.model}</a>` },
  { title: "Samples per second", class: "nowrap", cell: speedupWords },
  { title: "Memory used", class: "number", cell: (row) => points(row.memory_gain) },
  { title: "Recommendations", class: "number", cell: (row) => count(row.recommendations) },
];

function gained(rows) {
  return rows.length > 0 && html`<${Table} caption="Gain over the baselines, by model" showCaption columns=${GAINED} rows=${rows} keyOf=${(row) => row.model} />`;
}

// --- running work ---------------------------------------------------------------------------------------------------

const details = new Map(); // by id: {events, detail}, so that only what changed is read again

async function readRunning(signal) {
  const kinds = Object.keys(PATHS).filter((kind) => may(`${PATHS[kind]}:read`));
  const requests = kinds.flatMap((kind) => ACTIVE_STATES.map((state) => readActive(kind, state, signal)));
  const active = (await Promise.all(requests)).flat().sort((one, other) => one.started_at.localeCompare(other.started_at));
  const ids = new Set(active.map((work) => work.id));
  [...details.keys()].filter((id) => !ids.has(id)).forEach((id) => details.delete(id));
  const detailed = await Promise.all(active.slice(0, DETAILED).map((work) => withDetail(work, signal)));
  return [...detailed, ...active.slice(DETAILED)];
}

async function readActive(kind, state, signal) {
  const page = await get(`/v1/${PATHS[kind]}`, { query: { state, limit: RUNNING_SHOWN }, signal });
  return page.items.map((row) => ({ ...row, kind }));
}

async function withDetail(work, signal) {
  const known = details.get(work.id);
  if (known?.events === work.events) {
    return { ...work, detail: known.detail };
  }
  const found = await get(work.kind === "tuning" ? `/v1/tunings/${work.id}/probes` : `/v1/jobs/${work.id}`, { signal });
  const detail = work.kind === "tuning" ? found.items : found.progress;
  details.set(work.id, { events: work.events, detail });
  return { ...work, detail };
}

function Running({ work }) {
  const action = may("tunings:write") && html`<a href="/tunings/new" class="button">New tuning</a>`;
  const none = emptyState({ title: "Nothing is running", text: "Submitted work starts as soon as a device is available.", action });
  return html`<${Section} name="running" title="Running">${work && (work.length === 0 ? none : html`<div class="grid">${work.map(runningCard)}</div>`)}<//>`;
}

function runningCard(work) {
  return html`<article key=${work.id} class="card running">
    <div class="card-head"><h3><a href="/${PATHS[work.kind]}/${work.id}">${work.name ?? work.model}</a></h3>${badge(work.state)}</div>
    <p class="muted small">${work.kind === "tuning" ? "Tuning" : "Job"} of ${work.model} on ${work.device ?? work.hardware}, effective batch ${count(work.effective_batch_size)}, for ${elapsed(work.started_at)}</p>
    ${work.kind === "tuning" ? probes(work) : progress(work)}
  </article>`;
}

function probes(work) {
  const last = work.detail?.at(-1)?.result;
  if (last === undefined) {
    return html`<p class="small">${work.probes > 0 ? plural(work.probes, "probe") : "The first probe is under way"}</p>`;
  }
  const peak = last.peak_reserved_bytes === null ? "" : `, ${bytes(last.peak_reserved_bytes)}`;
  return html`<p class="small latest">${plural(work.detail.length, "probe")}; last: micro-batch ${count(last.micro_batch_size)}${peak} ${badge(last.outcome)}</p>`;
}

function progress({ detail }) {
  if (!detail) {
    return html`<p class="small">The first update is under way</p>`;
  }
  const { update, updates, loss = null, seconds: each } = detail; // a command reports no loss, and may not know its updates
  if (updates === null) {
    return html`<p class="small">${plural(update, "update")}</p>`;
  }
  const left = each && update < updates ? `, about ${seconds((updates - update) * each)} left` : "";
  return bar({ value: update, max: updates, label: "Progress", text: `Update ${count(update)} of ${count(updates)}${loss === null ? "" : `, loss ${number(loss, 4)}`}${left}` });
}

// --- devices and the queue ------------------------------------------------------------------------------------------

const DEVICES = [
  { title: "Device", class: "nowrap", cell: (row) => both(row.device.id, row.slot.split("/")[0]) },
  { title: "Product", class: "model", cell: (row) => row.device.name },
  { title: "Memory", class: "memory", cell: memory },
  { title: "Last 24 hours", class: "occupancy", cell: (row) => row.occupancy && strip(row.occupancy) },
  { title: "Running", class: "nowrap", cell: (row) => (row.running_id !== null ? workLink(row.running_id) : row.alive && row.unready === null ? mark("neutral", "○", "Free") : "–") },
  { title: "Waiting", class: "number", cell: (row) => count(row.queued) },
  { title: "Worker", class: "worker", cell: worker },
];

function devices(rows, occupancy) {
  const shown = rows.map((row) => ({ ...row, occupancy: occupancy && occupancyOf(row.slot, occupancy) }));
  return rows.length > 0 ? html`<${Table} caption="Devices" columns=${DEVICES} rows=${shown} keyOf=${(row) => row.slot} />` : emptyState({
    title: "No worker serves a device",
    text: "Tunings and jobs wait until one does. On a host with GPUs, and with the same database, run:",
    action: html`<p><code>batchwright work</code></p>`,
  });
}

function memory({ device: { used_bytes: used, total_bytes: total } }) {
  return used === null
    ? html`<span>${bytes(total)}<span class="muted"> total</span></span>`
    : bar({ value: used, max: total, label: "Memory used", text: `${bytes(used)} of ${bytes(total)} used`, kind: used > NEARLY_FULL * total ? "warn" : "info" });
}

function worker(row) {
  if (!row.alive) {
    return mark("bad", "✕", `Silent for ${seconds(row.heartbeat_age_seconds)}`);
  }
  return row.unready === null ? mark("ok", "✓", "Alive") : html`${mark("warn", "!", "Takes no work")}<div class="small">${row.unready}</div>`;
}

const QUEUE = [
  { title: "Position", class: "number", cell: (row) => count(row.position) },
  { title: "Work", class: "nowrap", cell: (row) => html`${workLink(row.id)} ${tag(row.kind)}` },
  { title: "Model", class: "model", cell: (row) => row.model },
  { title: "Device", class: "nowrap", cell: (row) => row.device ?? row.hardware },
  { title: "Priority", class: "number", cell: (row) => row.priority },
  { title: "Waiting for", class: "number", cell: (row) => seconds(Math.floor(row.age_seconds)) },
  { title: "Expected wait", class: "number", cell: expectedWait },
];

function queue(rows) {
  return rows.length > 0 ? html`<${Table} caption="Queue" columns=${QUEUE} rows=${rows} />` : emptyState({ title: "The queue is empty" });
}

function expectedWait({ unserved, expected_wait_seconds: wait }) {
  const unknown = "Known once three tunings or jobs have ended on this device and a worker that takes work serves it";
  return unserved !== null || wait === null
    ? html`<span class="muted" title=${unserved === null ? unknown : null}>${unserved ?? "not known yet"}</span>`
    : `about ${seconds(Math.round(wait))}`;
}

function workLink(id) {
  return linkTo(id.startsWith("job_") ? "jobs" : "tunings", id);
}

render(html`<${Overview} />`, byId("overview"));
