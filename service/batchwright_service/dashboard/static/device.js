/** The page of a device: its memory, what it runs and what waits for it, its occupancy, recent work and failures, and its host. */

import { addressOf, get, may } from "./api.js";
import { both, definitions, emptyState, mark, nameLink, problemAlert, scopeAlert, Section, Segments, stateBadge, tag, time, took } from "./components.js";
import { Table } from "./data_table.js";
import { withDetails } from "./device_words.js";
import { deviceLink, holder, hostOf, memory, queue, worker } from "./devices.js";
import { byId } from "./dom.js";
import { bytes, count, percent, plural, seconds } from "./format.js";
import { usePolled } from "./hooks.js";
import { busyWords, occupancyOf, secondsHeld, strip } from "./occupancy.js";
import { planText } from "./plan.js";
import { html, render, useState } from "./preact-htm.js";
import { PATHS, runningCard, withProgress } from "./running.js";

const NOW_SECONDS = 3;
const HISTORY_SECONDS = 15;
const OCCUPANCY_SECONDS = 30;
const QUEUE_SHOWN = 20;
const WORK_SHOWN = 10;
const FAILURES_SHOWN = 5;
const PERIODS = { "24h": "24 hours", "7d": "7 days" };
const KINDS = Object.keys(PATHS).filter((kind) => may(`${PATHS[kind]}:read`));

const { slot } = byId("page").dataset;
const host = hostOf(slot);

function DevicePage() {
  const { data, problem } = usePolled(readNow, NOW_SECONDS);
  const own = data?.devices.find((row) => row.slot === slot);
  return html`
    <div class="page-head">
      <nav class="crumbs small" aria-label="Breadcrumb"><a href="/#devices">Devices</a></nav>
      <h1>${slot.slice(host.length + 1)} of ${host}</h1>
      ${own && html`<div id="worker">${worker(own)}</div>`}
      ${own && html`<p class="page-lead">${own.device.name}, ${bytes(own.device.total_bytes)}</p>`}
    </div>
    ${problem && problemAlert(problem)}
    ${data !== null && own === undefined && emptyState({ title: "No worker serves this device", text: "No worker has announced it for a day. What ran here before is listed below." })}
    ${own && html`<${Memory} row=${own} />`}
    <${Section} name="running" title="Running">${data && running(data.running, own)}<//>
    ${own && html`<${Section} name="queue" title="Waiting" note=${own.queued > QUEUE_SHOWN && `the first ${QUEUE_SHOWN} of ${count(own.queued)}`}>${queue(data.queue, "Nothing waits for this device")}<//>`}
    <${History} />
    <${Recent} />
    ${data && html`<${Host} rows=${data.devices.filter((row) => hostOf(row.slot) === host && row !== own)} own=${own} />`}`;
}

async function readNow(signal) {
  const [served, waiting] = await Promise.all([get("/v1/devices", { signal }), get("/v1/queue", { query: { slot, limit: QUEUE_SHOWN }, signal })]);
  const id = served.items.find((row) => row.slot === slot)?.running_id ?? null;
  const kind = id?.startsWith("job_") ? "job" : "tuning";
  const isShown = id !== null && may(`${PATHS[kind]}:read`);
  const work = isShown && { ...(await get(`/v1/${PATHS[kind]}/${encodeURIComponent(id)}`, { signal })), kind };
  return { devices: served.items, queue: waiting.items, running: work && work.ended_at === null ? await withProgress([work], signal) : [] };
}

// --- now ------------------------------------------------------------------------------------------------------------

/** The memory of the device: ours, that of others, and what is free. */
function Memory({ row: { memory: now, device } }) {
  return html`<section class="card" aria-labelledby="memory-title"><h2 id="memory-title">Memory</h2>
    ${now === null ? html`<p class="muted">${bytes(device.total_bytes)}. The worker cannot read how much of it is in use.</p>` : division(now, device.total_bytes)}
  </section>`;
}

function division({ used_bytes: used, own_bytes: own }, total) {
  const free = Math.max(0, total - used);
  const parts = own === null ? [["used", "In use", used]] : [["own", "Batchwright", own], ["used", "Other processes", used - own]];
  const words = [...parts, ["free", "Free", free]].map(([, name, size]) => `${name} ${bytes(size)}`).join(", ");
  return html`<div class="parts" role="img" aria-label="Of ${bytes(total)}: ${words}">${parts.map(([kind, , size]) => html`<div class="part-${kind}" style=${{ inlineSize: `${((100 * size) / total).toFixed(2)}%` }} />`)}</div>
    <div id="memory" class="figures">${[...parts, ["free", "Free", free]].map(([kind, name, size]) => html`<div><div class="figure-label"><span class="key part-${kind}" aria-hidden="true" />${name}</div><div class="figure-value">${bytes(size)}</div><div class="muted small">${percent(size / total)}</div></div>`)}</div>`;
}

function running(works, own) {
  if (works.length > 0) {
    return html`<div class="grid">${works.map(runningCard)}</div>`;
  }
  if (own?.running_id) {
    return html`<p>${holder(own)}</p>`;
  }
  return emptyState({ title: "Nothing is running", text: own?.alive && own.unready === null ? "The device is free." : null });
}

// --- history --------------------------------------------------------------------------------------------------------

function History() {
  const [period, setPeriod] = useState("24h");
  const { data, problem } = usePolled((signal) => get("/v1/occupancy", { query: { period }, signal }), OCCUPANCY_SECONDS, period);
  const found = data && occupancyOf(slot, data);
  return html`<${Section} name="history" title="Occupancy">${problem ? problemAlert(problem) : found && html`<div class="card wide-strip">
    <${Segments} label="Period" options=${PERIODS} value=${period} onChange=${setPeriod} />
    <p class="small muted">${busyWords(found)}.</p>
    ${strip(found)}
    <div class="ends small muted"><span>${time(data.start, { relative: false })}</span><span>now</span></div>
    ${held(found)}
  </div>`}<//>`;
}

function held(found) {
  const { tunings, jobs } = secondsHeld(found);
  return html`<ul class="keys small"><li><span class="key part-tunings" aria-hidden="true" />Tunings ${tunings}</li><li><span class="key part-jobs" aria-hidden="true" />Jobs ${jobs}</li></ul>`;
}

// --- recent work ----------------------------------------------------------------------------------------------------

const WORK = [
  { title: "Name", class: "named", cell: (row) => both(nameLink(PATHS[row.kind], row), tag(row.kind)) },
  { title: "State", cell: stateBadge },
  { title: "Model", class: "model", cell: (row) => row.model },
  { title: "Effective batch", class: "number", cell: (row) => count(row.effective_batch_size) },
  { title: "Plan", class: "nowrap", cell: (row) => row.plan && planText(row.plan) },
  { title: "Tuned peak", class: "number", cell: (row) => row.peak_bytes !== null && bytes(row.peak_bytes) },
  { title: "Duration", class: "number", cell: took },
  { title: "Submitted", class: "nowrap", cell: (row) => time(row.created_at) },
];

const FAILURES = [
  { title: "Work", class: "named", cell: (row) => both(nameLink(PATHS[row.kind], row), tag(row.kind)) },
  { title: "Cause", class: "model", cell: (row) => row.problem && html`<code>${row.problem.code}</code>` },
  { title: "Ended", class: "nowrap", cell: (row) => time(row.ended_at) },
  { title: "Message", class: "wide message", cell: (row) => row.problem && withDetails(row.problem.detail) },
];

function Recent() {
  const { data, problem } = usePolled(readRecent, HISTORY_SECONDS);
  const lists = KINDS.map((kind) => html`<a href=${addressOf(`/${PATHS[kind]}`, { slot })}>All ${PATHS[kind]}</a>`);
  const failed = KINDS.map((kind) => html`<a href=${addressOf(`/${PATHS[kind]}`, { slot, state: "FAILED" })}>All failed ${PATHS[kind]}</a>`);
  return html`${problem && problemAlert(problem)}
    <${Section} name="recent" title="Recent work" aside=${lists}>${data && (data.work.length > 0
      ? html`<div class="list-body"><${Table} caption="Recent work" columns=${WORK} rows=${data.work} /></div>`
      : emptyState({ title: "Nothing ran here yet" }))}<//>
    <${Section} name="failures" title="Failures" aside=${data?.failures.length > 0 && failed}>${data && (data.failures.length > 0
      ? html`<div class="list-body"><${Table} caption="Failures" columns=${FAILURES} rows=${data.failures} /></div>`
      : emptyState({ title: "No failures" }))}<//>`;
}

async function readRecent(signal) {
  const [work, failed] = await Promise.all([newest({ limit: WORK_SHOWN }, signal), newest({ limit: FAILURES_SHOWN, state: "FAILED" }, signal)]);
  return { work: work.slice(0, WORK_SHOWN), failures: await Promise.all(failed.slice(0, FAILURES_SHOWN).map((row) => withProblem(row, signal))) };
}

/** The newest tunings and jobs of the slot. */
async function newest(query, signal) {
  const pages = await Promise.all(KINDS.map((kind) => get(`/v1/${PATHS[kind]}`, { query: { slot, ...query }, signal })));
  const rows = pages.flatMap((page, at) => page.items.map((row) => ({ ...row, kind: KINDS[at] })));
  return rows.sort((one, other) => other.created_at.localeCompare(one.created_at));
}

const problems = new Map(); // of failed work, by its id and version

async function withProblem(row, signal) {
  const version = `${row.id} ${row.updated_at}`;
  if (!problems.has(version)) {
    problems.set(version, (await get(`/v1/${PATHS[row.kind]}/${row.id}`, { signal })).problem);
  }
  return { ...row, problem: problems.get(version) };
}

// --- the host -------------------------------------------------------------------------------------------------------

const BESIDE = [
  { title: "Device", class: "nowrap", cell: (row) => deviceLink(row.slot, row.device.id) },
  { title: "Product", class: "model", cell: (row) => row.device.name },
  { title: "Memory", class: "memory", cell: memory },
  { title: "Running", class: "nowrap", cell: holder },
  { title: "Waiting", class: "number", cell: (row) => count(row.queued) },
  { title: "Worker", class: "worker", cell: worker },
];

/** The worker of the device, and the other devices of its host. */
function Host({ rows, own }) {
  return html`<${Section} name="host" title="Host ${host}"><div class="stack">
    ${own && html`<div class="card">${definitions([
      ["Worker", html`<code>${own.owner}</code>`],
      ["Last heartbeat", `${seconds(Math.round(own.heartbeat_age_seconds))} ago`],
      ["Driver", own.device.driver_version],
      ["Compute capability", own.device.compute_capability],
      ...Object.entries(own.versions),
    ])}</div>`}
    ${rows.length > 0
      ? html`<div class="list-body"><${Table} caption="Other devices of the host" showCaption columns=${BESIDE} rows=${rows} keyOf=${(row) => row.slot} /></div>`
      : html`<p class="muted small">No worker serves another device of this host.</p>`}
  </div><//>`;
}

render(may("tunings:read") ? html`<${DevicePage} />` : scopeAlert("tunings:read"), byId("page"));
