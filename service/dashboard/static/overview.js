/** The overview: running work, devices, the queue and recent activity. */

import { get, may } from "./api.js";
import { withDetails } from "./device_words.js";
import { byId, h, replace } from "./dom.js";
import { bytes, count, elapsed, number, percent, plural, seconds, shortId, time } from "./format.js";
import { poll } from "./live.js";
import { badge, bar, emptyState, mark, problemAlert, scopeAlert, showProblem, tag } from "./parts.js";
import { makeTable } from "./table.js";

const NOW_SECONDS = 3;
const SUMMARY_SECONDS = 15;
const QUEUE_SHOWN = 20;
const RUNNING_SHOWN = 100;
const DETAILED = 6; // running work whose details are read each time
const PERIODS = { "24h": "24 hours", "7d": "7 days", all: "All time" };
const ACTIVE_STATES = ["RUNNING", "CANCELLING"];
const PATHS = { tuning: "tunings", job: "jobs" };
const NEARLY_FULL = 0.9;
const READS_ALL = may("tunings:read"); // jobs are only part of it

// --- running work ---------------------------------------------------------------------------------------------------

const details = new Map(); // by id: {events, detail}, so that only what changed is read again

async function readRunning(signal) {
  const kinds = Object.keys(PATHS).filter((kind) => may(`${PATHS[kind]}:read`));
  const requests = kinds.flatMap((kind) => ACTIVE_STATES.map((state) => readActive(kind, state, signal)));
  const active = (await Promise.all(requests)).flat().sort((one, other) => one.started_at.localeCompare(other.started_at));
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
  const path = work.kind === "tuning" ? `/v1/tunings/${work.id}/probes` : `/v1/jobs/${work.id}`;
  const found = await get(path, { signal });
  const detail = work.kind === "tuning" ? found.items : found.progress;
  details.set(work.id, { events: work.events, detail });
  return { ...work, detail };
}

function dropDetails(running) {
  const ids = new Set(running.map((work) => work.id));
  [...details.keys()].filter((id) => !ids.has(id)).forEach((id) => details.delete(id));
}

function showRunning(running) {
  dropDetails(running);
  if (running.length === 0) {
    const action = may("tunings:write") && h("a", { href: "/tunings/new", class: "button" }, "New tuning");
    showOnce("running", "none", () => emptyState({ title: "Nothing is running", text: "Submitted work starts as soon as a device is available.", action }));
    return;
  }
  const known = new Map([...byId("running").querySelectorAll("[data-work]")].map((card) => [card.dataset.work, card]));
  const cards = running.map((work) => updated(known.get(work.id), work));
  byId("running").dataset.shows = "cards";
  const grid = byId("running").querySelector(".grid") ?? replace(byId("running"), h("div", { class: "grid" })).firstChild;
  if (cards.some((card, index) => grid.children[index] !== card) || grid.children.length !== cards.length) {
    replace(grid, cards);
  }
}

/** Returns the card of the work, with only the changed parts replaced, so that the focus is kept. */
function updated(card, work) {
  const written = JSON.stringify(work);
  if (card?.dataset.written === written) {
    return card;
  }
  const made = runningCard(work);
  if (card === undefined) {
    made.dataset.written = written;
    return made;
  }
  card.dataset.written = written;
  [...made.children].forEach((child, index) => {
    if (!child.isEqualNode(card.children[index])) {
      card.children[index].replaceWith(child);
    }
  });
  return card;
}

function runningCard(work) {
  return h(
    "article",
    { class: "card running", dataset: { work: work.id } },
    h("div", { class: "card-head" },
      h("h3", {}, h("a", { href: `/${PATHS[work.kind]}/${work.id}` }, work.model)),
      badge(work.state)),
    h("p", { class: "muted small" }, `${work.kind === "tuning" ? "Tuning" : "Job"} on ${work.device ?? work.hardware}, effective batch ${count(work.effective_batch_size)}, for `, elapsed(work.started_at)),
    h("div", {}, work.kind === "tuning" ? probes(work) : progress(work)),
  );
}

function probes(work) {
  const found = work.detail ?? [];
  if (found.length === 0) {
    return h("p", { class: "small" }, work.probes > 0 ? plural(work.probes, "probe") : "The first probe is under way");
  }
  const { result } = found.at(-1);
  const peak = result.peak_reserved_bytes === null ? "" : `, ${bytes(result.peak_reserved_bytes)}`;
  return h("p", { class: "small latest" }, `${plural(found.length, "probe")}; last: micro-batch ${count(result.micro_batch_size)}${peak} `, badge(result.outcome));
}

function progress(work) {
  if (!work.detail) {
    return h("p", { class: "small" }, "The first update is under way");
  }
  const { update, updates, loss = null } = work.detail; // a command reports no loss, and may not know its updates
  if (updates === null) {
    return h("p", { class: "small" }, plural(update, "update"));
  }
  const text = `Update ${count(update)} of ${count(updates)}${loss === null ? "" : `, loss ${number(loss, 4)}`}`;
  return bar({ value: update, max: updates, label: "Progress", text });
}

// --- devices --------------------------------------------------------------------------------------------------------

const devices = makeTable({
  caption: "Devices",
  keyOf: (row) => row.slot,
  columns: [
    { title: "Device", class: "nowrap", cell: (row) => [h("span", {}, row.device.id), h("div", { class: "muted small" }, row.slot.split("/")[0])] },
    { title: "Product", class: "model", cell: (row) => row.device.name },
    { title: "Memory", class: "memory", cell: memory },
    { title: "Running", class: "nowrap", cell: runningWork },
    { title: "Waiting", class: "number", cell: (row) => count(row.queued) },
    { title: "Worker", class: "worker", cell: worker },
  ],
});

function memory({ device }) {
  const { used_bytes: used, total_bytes: total } = device;
  if (used === null) {
    return h("span", {}, bytes(total), h("span", { class: "muted" }, " total"));
  }
  const text = `${bytes(used)} of ${bytes(total)} used`;
  return bar({ value: used, max: total, label: "Memory used", text, kind: used > NEARLY_FULL * total ? "warn" : "info" });
}

function runningWork(row) {
  if (row.running_id !== null) {
    return workLink(row.running_id);
  }
  return row.alive && row.unready === null ? mark("neutral", "○", "Free") : "–";
}

function worker(row) {
  if (!row.alive) {
    return mark("bad", "✕", `Silent for ${seconds(row.heartbeat_age_seconds)}`);
  }
  return row.unready === null ? mark("ok", "✓", "Alive") : [mark("warn", "!", "Takes no work"), h("div", { class: "small" }, row.unready)];
}

/** Drops the heartbeat's age of a living worker, which changes with every read and is not shown. */
function withoutHeartbeatAge(row) {
  return row.alive ? { ...row, heartbeat_age_seconds: 0 } : row;
}

function showDevices(rows) {
  if (rows.length > 0) {
    showOnce("devices", "table", () => devices.element);
    devices.update(rows.map(withoutHeartbeatAge));
  } else {
    showOnce("devices", "none", () => emptyState({
      title: "No worker serves a device",
      text: "Tunings and jobs wait until one does. On a host with GPUs, and with the same database, run:",
      action: h("p", {}, h("code", {}, "batchwright work")),
    }));
  }
}

// --- queue ----------------------------------------------------------------------------------------------------------

const queue = makeTable({
  caption: "Queue",
  columns: [
    { title: "Position", class: "number", cell: (row) => count(row.position) },
    { title: "Work", class: "nowrap", cell: (row) => [workLink(row.id), " ", tag(row.kind)] },
    { title: "Model", class: "model", cell: (row) => row.model },
    { title: "Device", class: "nowrap", cell: (row) => row.device ?? row.hardware },
    { title: "Priority", class: "number", cell: (row) => row.priority },
    { title: "Waiting for", class: "number", cell: (row) => seconds(row.age_seconds) },
    { title: "Expected wait", class: "number", cell: (row) => expectedWait(row) },
  ],
});

function expectedWait(row) {
  const unknown = "Known once three tunings or jobs have ended on this device and a worker that takes work serves it";
  if (row.unserved !== null) {
    return h("span", { class: "muted" }, row.unserved);
  }
  const wait = row.expected_wait_seconds;
  return wait === null ? h("span", { class: "muted", title: unknown }, "not known yet") : `about ${seconds(Math.round(wait))}`;
}

function showQueue(rows) {
  byId("queue-note").textContent = rows.length < QUEUE_SHOWN ? "" : `the first ${QUEUE_SHOWN}; positions count for each device`;
  if (rows.length > 0) {
    showOnce("queue", "table", () => queue.element);
    queue.update(rows.map((row) => ({ ...row, age_seconds: Math.floor(row.age_seconds) })));
  } else {
    showOnce("queue", "none", () => emptyState({ title: "The queue is empty" }));
  }
}

function workLink(identifier) {
  const pages = identifier.startsWith("job_") ? "jobs" : "tunings";
  return h("a", { href: `/${pages}/${identifier}`, class: "mono", title: identifier }, shortId(identifier));
}

// --- activity -----------------------------------------------------------------------------------------------------

const failures = makeTable({
  caption: "Failures by cause",
  showCaption: true,
  keyOf: (row) => `${row.kind} ${row.code}`,
  columns: [
    { title: "Cause", class: "model", cell: (row) => [h("code", {}, row.code), " ", tag(row.kind)] },
    { title: "Count", class: "number", cell: (row) => count(row.count) },
    { title: "Newest", class: "nowrap", cell: (row) => [workLink(row.newest_id), h("div", { class: "small" }, time(row.newest_at))] },
    { title: "Message", class: "wide message", cell: (row) => withDetails(row.message) },
  ],
});

const spent = makeTable({
  caption: "Device time by slot",
  showCaption: true,
  keyOf: (row) => row.slot,
  columns: [
    { title: "Slot", class: "model", cell: (row) => row.slot },
    { title: "Probes", class: "number", cell: (row) => seconds(row.probes_seconds) },
    { title: "Jobs", class: "number", cell: (row) => seconds(row.jobs_seconds) },
  ],
});

const gained = makeTable({
  caption: "Gain over the baselines, by model",
  showCaption: true,
  keyOf: (row) => row.model,
  columns: [
    { title: "Model", class: "model", cell: (row) => row.model },
    { title: "Samples per second", class: "nowrap", cell: (row) => speedupWords(row) },
    { title: "Memory used", class: "number", cell: (row) => points(row.memory_gain) },
    { title: "Recommendations", class: "number", cell: (row) => count(row.recommendations) },
  ],
});

/** A median speedup, with a sign of estimates among its figures. */
function speedupWords({ speedup, speedups, measured }) {
  if (speedup === null) {
    return "not known";
  }
  return `${measured < speedups ? "~" : ""}${number(speedup, 3)}×`;
}

/** A difference of two shares, in percentage points. */
function points(share) {
  return share === null ? "–" : `${share < 0 ? "−" : "+"}${count(Math.round(100 * Math.abs(share)))} points`;
}

let period = "24h";

function showPeriods() {
  replace(byId("periods"), Object.entries(PERIODS).map(([name, text]) => {
    const pressed = String(name === period);
    return h("button", { type: "button", class: "segment", "aria-pressed": pressed, dataset: { period: name } }, text);
  }));
}

function choosePeriod(event) {
  const button = event.target.closest("[data-period]");
  if (button !== null) {
    period = button.dataset.period;
    for (const each of byId("periods").children) {
      each.setAttribute("aria-pressed", String(each === button));
    }
    summaries.now();
  }
}

function showSummary(summary) {
  failures.update(summary.failures);
  spent.update(summary.device_seconds);
  const text = "Failed tunings and jobs are listed here by cause.";
  const failed = summary.failures.length > 0 ? failures.element : emptyState({ title: "No failures", text });
  const shown = [byId("figures"), byId("failures"), byId("spent"), byId("gained")];
  gained.update(summary.gains.models);
  replace(shown[0], figuresOf(summary).map(figure));
  if (shown[1].firstChild !== failed) {
    replace(shown[1], failed);
  }
  if (shown[2].firstChild !== spent.element) {
    replace(shown[2], spent.element);
  }
  shown[2].hidden = summary.device_seconds.length === 0;
  if (shown[3].firstChild !== gained.element) {
    replace(shown[3], gained.element);
  }
  shown[3].hidden = summary.gains.models.length === 0;
}

function figuresOf({ tunings, jobs, device_seconds: slots, recommendation_hits: stored, gains }) {
  const both = (...states) => states.reduce((sum, state) => sum + (tunings[state] ?? 0) + (jobs[state] ?? 0), 0);
  const probes = slots.reduce((sum, slot) => sum + slot.probes_seconds, 0);
  const training = slots.reduce((sum, slot) => sum + slot.jobs_seconds, 0);
  const submitted = stored.hits + stored.misses;
  return [
    ["Waiting", count(both("QUEUED"))],
    ["Running", count(both("RUNNING", "CANCELLING"))],
    ["Succeeded", count(both("SUCCEEDED"))],
    ["Failed", count(both("FAILED"))],
    ["Cancelled", count(both("CANCELLED"))],
    ["Device time", seconds(Math.round(probes + training)), `${seconds(probes)} probes, ${seconds(training)} jobs`],
    ["Gain in speed", speedupWords(gains), gainNote(gains)],
    ["Served from the store", percent(stored.hit_rate), `${count(stored.hits)} of ${plural(submitted, "tuning")}`],
  ];
}

function gainNote({ recommendations, speedups, measured, memory_gain: memory }) {
  if (recommendations === 0) {
    return "no recommendation with a baseline";
  }
  const source = speedups === 0 ? "" : `, ${count(measured)} measured, ${count(speedups - measured)} estimated`;
  return `median of ${plural(recommendations, "recommendation")}${source}; ${points(memory)} of memory`;
}

function figure([label, value, note = null]) {
  return h("div", {}, h("div", { class: "figure-label" }, label), h("div", { class: "figure-value" }, value), note && h("div", { class: "muted small" }, note));
}

// --- the page -------------------------------------------------------------------------------------------------------

/** Puts a node into a part of the page, unless a node of this kind is already there. */
function showOnce(id, kind, make) {
  const container = byId(id);
  if (container.dataset.shows !== kind) {
    container.dataset.shows = kind;
    replace(container, make());
  }
}

async function refreshNow(signal) {
  const [running, served, waiting] = await Promise.all([
    readRunning(signal),
    READS_ALL && get("/v1/devices", { signal }),
    READS_ALL && get("/v1/queue", { query: { limit: QUEUE_SHOWN }, signal }),
  ]);
  showRunning(running);
  if (READS_ALL) {
    showDevices(served.items);
    showQueue(waiting.items);
    replace(byId("overview-problem"));
  }
}

/** Hides the sections that the key may not read, and names the scope that they need. */
function hideForbidden() {
  const hidden = may("jobs:read") ? ["devices", "queue", "figures"] : ["running", "devices", "queue", "figures"];
  hidden.forEach((id) => (byId(id).closest("section").hidden = true));
  replace(byId("overview-problem"), scopeAlert("tunings:read"));
}

async function refreshSummary(signal) {
  const requested = period;
  const summary = await get("/v1/summary", { query: { period: requested }, signal });
  if (requested === period) {
    showSummary(summary);
    replace(byId("summary-problem"));
  }
}

let summaries = null;

if (READS_ALL) {
  showPeriods();
  byId("periods").addEventListener("click", choosePeriod);
  summaries = poll(refreshSummary, SUMMARY_SECONDS, {
    onProblem: (problem) => showProblem(byId("summary-problem"), problemAlert(problem)),
  });
} else {
  hideForbidden();
}
if (READS_ALL || may("jobs:read")) {
  poll(refreshNow, NOW_SECONDS, {
    onProblem: (problem) => showProblem(byId("overview-problem"), problemAlert(problem)),
  });
}
