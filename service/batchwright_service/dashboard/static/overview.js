/** The overview: key figures, running work, devices, the queue, failures and gains. */

import { addressOf, ApiProblem, get, may } from "./api.js";
import { alertBox, both, emptyState, problemAlert, scopeAlert, Section, Segments, tag, time } from "./components.js";
import { Table } from "./data_table.js";
import { withDetails } from "./device_words.js";
import { deviceLink, holder, hostOf, memory, queue, worker, workLink } from "./devices.js";
import { byId } from "./dom.js";
import { count, number, percent, plural, seconds, sentences, timeText } from "./format.js";
import { usePolled } from "./hooks.js";
import { occupancyOf, strip } from "./occupancy.js";
import { html, render, useState } from "./preact-htm.js";
import { PATHS, runningCard, withProgress } from "./running.js";

const NOW_SECONDS = 3;
const SUMMARY_SECONDS = 15;
const OCCUPANCY_SECONDS = 30;
const QUEUE_SHOWN = 20;
const RUNNING_SHOWN = 100;
const READY_SECONDS = 15;
const DETAILED = 6; // running work whose progress is read each time
const PERIODS = { "24h": "24 hours", "7d": "7 days", all: "All time" };
const ACTIVE_STATES = ["RUNNING", "CANCELLING"];
const READS_ALL = may("tunings:read"); // jobs are only part of it

function Overview() {
  const now = usePolled(readNow, NOW_SECONDS);
  return READS_ALL ? html`<${Fleet} now=${now} />` : html`${scopeAlert("tunings:read")}${may("jobs:read") && html`<${Running} work=${now.data?.running} />`}`;
}

/** Everything, for a key that may read tunings. */
function Fleet({ now: { data, problem, now: again } }) {
  const [period, setPeriod] = useState("24h");
  const { data: occupancy } = usePolled((signal) => get("/v1/occupancy", { signal }), OCCUPANCY_SECONDS);
  const { data: readiness } = usePolled(readReadiness, READY_SECONDS);
  const { data: summary, problem: failure } = usePolled((signal) => get("/v1/summary", { query: { period }, signal }), SUMMARY_SECONDS, period);
  return html`
    ${summary && !Object.values({ ...summary.tunings, ...summary.jobs }).some(Boolean) && html`<${Welcome} />`}
    ${readiness?.detail && notReady(readiness.detail)}
    ${[problem, failure].filter(Boolean).map((each) => problemAlert(each))}
    <section aria-label="Key figures" class="stack">
      <${Segments} label="Period" options=${PERIODS} value=${period} onChange=${setPeriod} />
      <div id="figures" class="card figures">${summary ? figures(summary, data) : html`<p class="muted">Loading…</p>`}</div>
      ${summary && html`<div class="trends">${trends(summary.trend, period)}</div>`}
    </section>
    <${Running} work=${data?.running} />
    <${Section} name="devices" title="Devices">${data && devices(data.devices, occupancy)}<//>
    <${Section} name="queue" title="Queue" note=${data?.queue.length === QUEUE_SHOWN && `the first ${QUEUE_SHOWN}; positions are per device`}>${data && queue(data.queue, "The queue is empty", again)}<//>
    <${Section} name="activity" title="Activity">${summary && html`<div class="stack">
      <div class="happened">${failures(summary.failures)}${spent(summary.device_seconds)}</div>${gained(summary.gains.models)}
    </div>`}<//>`;
}

/** On the first start: what to do, with an example to try. */
function Welcome() {
  const { data } = usePolled((signal) => get("/v1/tunings", { query: { limit: 1 }, signal }), SUMMARY_SECONDS);
  return data?.items.length === 0 && may("tunings:write") && emptyState({
    title: "Welcome to Batchwright",
    text: "Describe what you train. A tuning finds the largest micro-batch that fits, with a plan for exactly your effective batch.",
    action: html`<div class="form-buttons"><a class="button button-primary" href="/tunings/new?example=a+small+GPT">Try an example</a><a class="button" href="/tunings/new">New tuning</a></div>`,
  });
}

/** The problem of a service that is not ready; any other failure to read it is thrown. */
async function readReadiness(signal) {
  try {
    return await get("/readyz", { signal });
  } catch (problem) {
    if (problem instanceof ApiProblem && problem.status === 503) {
      return problem;
    }
    throw problem;
  }
}

/** Why the service is not ready; then, in small, which setting decides it. */
function notReady(detail) {
  const [reasons, ...setting] = sentences(detail);
  const more = html`<p class="small">${setting.join(" ")} <a href="#devices-title">Devices</a>, <a href="#queue-title">queue</a></p>`;
  return alertBox("bad", "The service is not ready", `${reasons[0].toUpperCase()}${reasons.slice(1)}`, more);
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

function figures({ tunings, infeasible, jobs, device_seconds: slots, recommendation_hits: stored, gains }, now) {
  const sum = (...states) => states.reduce((total, state) => total + (tunings[state] ?? 0) + (jobs[state] ?? 0), 0);
  const probes = slots.reduce((total, slot) => total + slot.probes_seconds, 0);
  const training = slots.reduce((total, slot) => total + slot.jobs_seconds, 0);
  const busy = now?.devices.filter((row) => row.running_id !== null).length;
  const unserved = [...new Set(now?.queue.filter((row) => row.unserved !== null && row.device !== null).map((row) => row.device))];
  const links = (state) => [["tuning", tunings], ["job", jobs]].filter(([, counts]) => counts[state] > 0).map(([kind, counts], at) =>
    html`${at > 0 && ", "}<a href=${addressOf(`/${PATHS[kind]}`, { state })}>${plural(counts[state], kind)}</a>`);
  const others = [["in which nothing fits", infeasible], ["cancelled", sum("CANCELLED")]].filter(([, found]) => found > 0);
  return [
    ["Running", count(sum("RUNNING", "CANCELLING"))],
    ["Waiting", count(sum("QUEUED")), links("QUEUED")],
    ["Devices busy", now === null ? "–" : `${busy} of ${now.devices.length}`, unserved.map((device) => `${device} has no worker`).join(", ")],
    ["Succeeded", count(sum("SUCCEEDED") - infeasible), others.length > 0 && `also ${others.map(([name, found]) => `${count(found)} ${name}`).join(", ")}`],
    ["Failed", count(sum("FAILED")), links("FAILED")],
    gains.speedup !== null ? ["Speedup", speedupWords(gains), gainNote(gains)] : gains.memory_gain !== null && [`Memory use ${wayOf(gains.memory_gain)} by`, pointsOf(gains.memory_gain), `of the limit, against the plans before; median of ${plural(gains.recommendations, "recommendation")}`],
    ["Device time", seconds(Math.round(probes + training)), `${seconds(probes)} probes, ${seconds(training)} jobs`],
    ["Answered without probes", percent(stored.hit_rate), `${count(stored.hits)} of ${count(stored.hits + stored.misses)} that looked for a stored answer`],
  ].filter(Boolean).map(([label, value, note]) => html`<div><div class="figure-label">${label}</div><div class="figure-value">${value}</div>${note && html`<div class="muted small">${note}</div>`}</div>`);
}

/** How a period went, as columns: tunings, failures, and the speedup of what was recommended. */
function trends(points, period) {
  const sum = (name) => points.reduce((total, point) => total + point[name], 0);
  const latest = points.findLast(({ speedup }) => speedup !== null)?.speedup ?? null;
  const [parts, part, begin] = { "24h": ["by hour", "per hour", "24 h ago"], "7d": ["by six hours", "in six hours", "7 days ago"], all: ["by day", "per day", "30 days ago"] }[period];
  return [
    ["tunings", plural(sum("tunings"), "tuning"), count],
    ["failures", plural(sum("failures"), "failure"), count],
    latest !== null && ["speedup", `${number(latest, 3)}× median speedup, latest`, (value) => `${number(value, 3)}×`],
  ].filter((trend) => trend && points.filter((point) => point[trend[0]] > 0).length > 1).map(([name, text, valueText]) => {
    const peak = `peak ${valueText(Math.max(...points.map((point) => point[name] ?? 0)))}${valueText === count ? ` ${part}` : ""}`;
    const most = Math.max(...points.map((point) => point[name] ?? 0));
    const width = 100 / points.length;
    const bars = points.map((point, at) => point[name] > 0 && html`<rect key=${at} x=${at * width} width=${0.8 * width} y=${30 - (28 * point[name]) / most} height=${(28 * point[name]) / most}><title>${timeText(point.start)}: ${valueText(point[name])}</title></rect>`);
    return html`<div class="card trend trend-${name}"><div class="card-head"><b>${text}</b><span class="muted small">${peak}</span></div>
      <svg viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label="${text}, ${parts}, ${peak}">${bars}</svg>
      <div class="trend-ends muted small"><span>${begin}</span><span>now</span></div></div>`;
  });
}

/** A median speedup, with a sign of estimates among its figures. */
function speedupWords({ speedup, speedups, measured }) {
  return speedup === null ? "–" : `${measured < speedups ? "~" : ""}${number(speedup, 3)}×`;
}

function wayOf(difference) {
  return difference < 0 ? "down" : "up";
}

function pointsOf(difference) {
  return plural(Math.round(100 * Math.abs(difference)), "point");
}

/** A difference of two shares of the memory limit, in percentage points. */
function points(difference) {
  return difference === null ? "–" : `${wayOf(difference)} by ${pointsOf(difference)}`;
}

function gainNote({ recommendations, speedups, measured, memory_gain: memory }) {
  return `median of ${plural(recommendations, "recommendation")}, ${count(measured)} measured, ${count(speedups - measured)} estimated; memory use ${points(memory)}`;
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
    : html`<div class="list-body"><${Table} caption="Failures by cause" showCaption columns=${FAILURES} rows=${rows} keyOf=${(row) => `${row.kind} ${row.code}`} /></div>`;
}

const SPENT = [
  { title: "Device", class: "model", cell: (row) => deviceLink(row.slot) },
  { title: "Probes", class: "number", cell: (row) => seconds(row.probes_seconds) },
  { title: "Jobs", class: "number", cell: (row) => seconds(row.jobs_seconds) },
];

function spent(rows) {
  return rows.length > 0 && html`<${Table} caption="Device time" showCaption columns=${SPENT} rows=${rows} keyOf=${(row) => row.slot} />`;
}

const GAINED = [
  { title: "Model", class: "model", cell: (row) => html`<a href="/recommendations?model=${encodeURIComponent(row.model)}">${row.model}</a>` },
  { title: "Median speedup", class: "nowrap", cell: speedupWords, value: (row) => row.speedup },
  { title: "Memory use", class: "number", cell: (row) => points(row.memory_gain) },
  { title: "Recommendations", class: "number", cell: (row) => count(row.recommendations) },
];

function gained(rows) {
  return rows.length > 0 && html`<${Table} caption="Gain over the baselines, by model" showCaption columns=${GAINED} rows=${rows} keyOf=${(row) => row.model} />`;
}

// --- running work ---------------------------------------------------------------------------------------------------

async function readRunning(signal) {
  const kinds = Object.keys(PATHS).filter((kind) => may(`${PATHS[kind]}:read`));
  const requests = kinds.flatMap((kind) => ACTIVE_STATES.map((state) => readActive(kind, state, signal)));
  const active = (await Promise.all(requests)).flat().sort((one, other) => one.started_at.localeCompare(other.started_at));
  return [...(await withProgress(active.slice(0, DETAILED), signal)), ...active.slice(DETAILED)];
}

async function readActive(kind, state, signal) {
  const page = await get(`/v1/${PATHS[kind]}`, { query: { state, limit: RUNNING_SHOWN }, signal });
  return page.items.map((row) => ({ ...row, kind }));
}

function Running({ work }) {
  const action = may("tunings:write") && html`<a href="/tunings/new" class="button">New tuning</a>`;
  const none = emptyState({ title: "Nothing is running", text: "Submitted work starts as soon as a device is available.", action });
  return html`<${Section} name="running" title="Running">${work && (work.length === 0 ? none : html`<div class="grid">${work.map(runningCard)}</div>`)}<//>`;
}

// --- devices and the queue ------------------------------------------------------------------------------------------

const DEVICES = [
  { title: "Device", class: "nowrap", cell: (row) => both(deviceLink(row.slot, row.device.id), hostOf(row.slot)) },
  { title: "Product", class: "model", cell: (row) => row.device.name },
  { title: "Memory", class: "memory", cell: memory },
  { title: "Last 24 hours", class: "occupancy", cell: (row) => row.occupancy && strip(row.occupancy) },
  { title: "Running", class: "nowrap", cell: holder },
  { title: "Waiting", class: "number", cell: (row) => count(row.queued) },
  { title: "Worker", class: "worker", cell: worker },
];

function devices(rows, occupancy) {
  const shown = rows.map((row) => ({ ...row, occupancy: occupancy && occupancyOf(row.slot, occupancy) }));
  return rows.length > 0 ? html`<div class="list-body"><${Table} caption="Devices" columns=${DEVICES} rows=${shown} keyOf=${(row) => row.slot} /></div>` : emptyState({
    title: "No worker serves a device",
    text: "Tunings and jobs wait until one does. On a host with GPUs and the same database, run:",
    action: html`<p><code>batchwright work</code></p>`,
  });
}

render(html`<${Overview} />`, byId("overview"));
