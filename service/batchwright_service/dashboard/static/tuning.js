/** The page of a tuning: its answer, or what it does now; then the proof, its probes, and how to reproduce it. */

import { addressOf, get, keyId, may } from "./api.js";
import { Answer, changesInWords, Proof, readingInWords, warnings } from "./answer.js";
import { Chart } from "./chart.js";
import { badge, codeBlock, definitions, elapsed, emptyState, linkTo, nameFacts, tag, time } from "./components.js";
import { Table } from "./data_table.js";
import { heldBytes, peakWords, rawText, withDetails } from "./device_words.js";
import { byId } from "./dom.js";
import { bytes, bytesExactly, count, number, percent, plural, seconds } from "./format.js";
import { useRead } from "./hooks.js";
import { ENDED } from "./live.js";
import { memoryFigure, memoryInWords, modelOf, sizeWords, speedFigure } from "./memory_chart.js";
import { html, render, useState } from "./preact-htm.js";
import { asCommand, asCurl, raisedLimit, submissionAgain } from "./reproduce.js";
import { Card, deviceOf, failure, runFacts, useWork, Waiting, WorkPage } from "./work.js";

function TuningPage() {
  const [probes, setProbes] = useState([]);
  const add = (found) => setProbes((before) => {
    const all = new Map([...before, ...found].map((probe) => [probe.ordinal, probe]));
    return [...all.values()].sort((one, other) => one.ordinal - other.ordinal);
  });
  const work = useWork("tuning", {
    /** Reads the tuning, then its probes, which include every event that the tuning counts. */
    read: async (path) => {
      const tuning = await get(path);
      add((await get(`${path}/probes`)).items);
      return tuning;
    },
    after: (tuning) => (ENDED.has(tuning.state) ? null : tuning.events),
    onEvent: (event) => event.kind === "probe" && add([event.probe]),
  });
  const tuning = work.current;
  const again = tuning && ENDED.has(tuning.state) && may("tunings:write") && html`<a class="button" href=${repeatAddress(tuning)}>Edit and repeat</a>`;
  return html`<${WorkPage} work=${work} deletion="Its probes and events are deleted too. Its recommendation stays." action=${again}>
    ${tuning && sections(work, probes)}
  <//>`;
}

function repeatAddress({ id }) {
  return addressOf("/tunings/new", { repeat: id });
}

function sections(work, own) {
  const tuning = work.current;
  const found = tuning.recommendation;
  const Now = { QUEUED: Waiting, RUNNING: Running, CANCELLING: Stopping, CANCELLED: Cancelled }[tuning.state];
  const isAnswered = own.length === 0 && found !== null;
  const probes = isAnswered ? found.evidence.probes.map((result, index) => ({ ordinal: index + 1, result })) : own;
  return html`
    ${tuning.problem && html`<${Failure} tuning=${tuning} />`}
    ${Now && html`<section class="card answer" role="status" id="progress"><${Now} work=${work} tuning=${tuning} probes=${probes.map((probe) => probe.result)} /></section>`}
    ${found && html`<${Answer} found=${found}>
      ${isAnswered && html`<${Source} evidence=${found.evidence} />`}
      <span>${found.feasible ? "Recommendation" : "Result"}: ${linkTo("recommendations", found.id)}</span>
    <//>
    ${warnings(found)}`}
    <${Evidence} probes=${probes.map((probe) => probe.result)} tuning=${tuning} />
    ${(probes.length > 0 || tuning.state === "RUNNING") && html`<${Card} name="probes" title="Probes" aside=${html`<span class="muted small">each probe runs full optimizer updates in its own process</span>`}><div id="probes" class="list-body">
      ${probes.length > 0 ? html`<${Table} caption="Probes" columns=${PROBES} rows=${probes} keyOf=${(row) => row.ordinal} />` : emptyState({ title: "No probe has ended yet", text: "Each probe appears here when it ends." })}
    </div><//>`}
    ${found && alternatives(found)}
    <${Card} name="facts" title="Request"><div id="facts">${definitions(facts(tuning))}</div><//>
    <details class="card"><summary>Reproduce: the spec, the command and the HTTP call</summary><div class="stack">${reproduction(tuning)}</div></details>`;
}

/** Which tuning ran the probes of a stored answer. */
function Source({ evidence: { tuning_id: id, probes } }) {
  const found = useRead(id && `/v1/tunings?limit=1&q=${id}`)?.items[0];
  return html`<span id="source">Answered from ${id ? html`tuning ${linkTo("tunings", id, found?.name)}` : "a stored recommendation"}${found && html` of ${time(found.ended_at, { relative: false })}`}: ${plural(probes.length, "probe")}.</span>`;
}

function Stopping() {
  return html`<h2>Cancelling…</h2><p>The running probe is being stopped.</p>`;
}

/** Who cancelled it and when, what was proven until then, and how to go on; only administrators are told by whom. */
function Cancelled({ tuning, probes }) {
  const { id, ended_at: ended } = tuning;
  const by = useRead(may("admin") ? addressOf("/v1/audit", { action: "cancelled", object_id: id, limit: 1 }) : null)?.items[0]?.key_name;
  return html`<h2>Cancelled ${by && html`by <strong>${by}</strong> `}${time(ended)}${probes.length > 0 ? `, after ${plural(probes.length, "probe")}` : ", before its first probe ended"}</h2>
    <p class="proven">${probes.length > 0 ? `Until then: ${bracketInWords(probes)}.` : "Nothing was proven."}</p>
    <p class="muted">If you repeat it, the search starts again from its first probe.</p>`;
}

/** What a tuning does now, what it has found so far, and how long it takes. */
function Running({ tuning, probes }) {
  const { activity, started_at: started, model, device } = tuning;
  const others = useRead(addressOf("/v1/tunings", { state: "SUCCEEDED", model, device, limit: 20 }));
  const counts = (others?.items ?? []).map((each) => each.probes).filter(Boolean).sort((one, other) => one - other);
  const usual = counts[Math.floor(counts.length / 2)];
  const left = (usual - probes.length) * (probes.reduce((sum, probe) => sum + probe.seconds.total, 0) / probes.length);
  const rest = left > 0 ? `: about ${seconds(left)} left` : probes.length > usual ? "; this one takes longer than usual" : "";
  return html`<h2>${activity ? activity[0].toUpperCase() + activity.slice(1) : "Starting"}…</h2>
    ${probes.length > 0 && html`<p class="proven">So far: ${bracketInWords(probes)}. ${reasonOf(activity)}</p>`}
    <progress class="progress" aria-label="Tuning in progress" />
    <p class="muted">Running for ${elapsed(started)}.${usual && ` Tunings of ${model} here take about ${plural(usual, "probe")}${rest}.`}</p>`;
}

/** Why the running probe is made, as far as its activity shows it. */
function reasonOf(activity) {
  const size = activity?.match(/^running .* at micro-batch ([\d,]+)$/)?.[1];
  return size ? `${size} is the next size to try.` : activity?.includes("of the plan") ? "The plan is run before it is recommended." : "";
}

/** The largest size that fits, and the smallest that does not or whose plan ran out of memory. */
function bracketInWords(probes) {
  const sizes = (shown, ...outcomes) => shown.filter(({ outcome }) => outcomes.includes(outcome)).map((probe) => probe.micro_batch_size);
  const fits = Math.max(0, ...sizes(probes, "FIT"));
  const ofPlan = Math.min(...sizes(probes, "OOM"));
  // A plan that fails after its micro-batches of the size does not refute the size.
  const ofSize = probes.filter(({ micro_batch_sizes: all, micro_batch_size: size, failed_micro_batch: failed }) => all.slice(0, failed ?? all.length).every((each) => each === size));
  const fails = Math.min(...sizes(ofSize, "OOM", "INVALID_SIZE"));
  const failed = fails < Infinity ? `, ${count(fails)} does not` : ofPlan < Infinity ? `; a plan with micro-batches of ${count(ofPlan)} ran out of memory` : ", none has run out of memory";
  return (fits > 0 ? `${count(fits)} fits` : "no size fits yet") + failed;
}

/** The cause of a failure, how many tunings had it, and what to try. */
function Failure({ tuning }) {
  const code = tuning.problem.code;
  const total = useRead(addressOf("/v1/tunings", { state: "FAILED", problem_code: code, limit: 1, total: true }))?.total;
  const limit = raisedLimit(tuning) && submissionAgain(tuning).probe_timeout_seconds;
  return failure(tuning, html`
    ${limit && may("tunings:write") && html`<p><a class="button button-primary" href=${repeatAddress(tuning)}>Try with ${seconds(limit)}</a></p>`}
    ${total > 1 && html`<p>${plural(total, "tuning")} failed with this code. <a href=${addressOf("/tunings", { state: "FAILED", problem_code: code })}>Show all</a></p>`}`);
}

function facts(tuning) {
  const { request, recommendation } = tuning;
  return [
    ...nameFacts(tuning, "tunings"),
    ["Device", deviceOf(tuning)],
    ["Effective batch size", `${count(request.effective_batch_size)} samples`],
    ...workloadFacts(request.spec),
    ["Objective", request.objective.replaceAll("_", " ")],
    ["Memory limit", request.memory_limit_bytes === null ? "the whole device" : bytes(request.memory_limit_bytes)],
    ["Margin", percent(request.memory_margin)],
    ["Data read", readingInWords(recommendation?.evidence.data)],
    ...runFacts(tuning),
  ];
}

function workloadFacts({ model, parallelism, precision }) {
  const ranks = count(parallelism.world_size);
  if (model.kind !== "command") {
    return [["Ranks", `${ranks} (${parallelism.strategy})`], ["Precision", precision]];
  }
  const given = Object.entries(model.arguments).map(([name, value]) => `${name}: ${value}`).join(", ");
  return [["Command", model.name], ["Arguments", given || "none"], ["Ranks", ranks]];
}

/** The proof: in sentences, and as charts of the peaks and the speed. */
function Evidence({ probes, tuning: { request, recommendation: found } }) {
  const limited = probes.find((probe) => probe.limit_bytes !== null);
  const model = modelOf(probes, found?.evidence.expected);
  const limits = {
    limitBytes: found?.headroom?.limit_bytes ?? request.memory_limit_bytes,
    probeLimitBytes: limited === undefined ? null : limited.limit_bytes + (limited.context_bytes ?? 0),
    fits: found?.evidence.proof.fits ?? null,
    next: found?.evidence.proof.next_size ?? null,
    chosen: found?.plan?.micro_batch_size ?? null,
  };
  const speed = found && speedFigure(found);
  return (found?.evidence.proof.fits > 0 || model) && html`<${Card} name="proof" title=${found ? "Proof" : "Memory"}><div id="proof" class="stack">
    ${found && html`<${Proof} found=${found} />`}
    ${probes.length > 0 && html`<p class="muted small">${memoryInWords(probes, model, limits)}</p>`}
    ${model && html`<div class="curves">
      <figure><figcaption>Peak memory</figcaption><${Chart} id="chart" figure=${() => memoryFigure(probes, model, limits)} /></figure>
      ${speed && html`<figure><figcaption>Samples per second</figcaption><${Chart} id="speed" figure=${() => speedFigure(found)} /></figure>`}
    </div>`}
  </div><//>`;
}

// --- tables ---------------------------------------------------------------------------------------------------------

const PROBES = [
  { title: "#", class: "number", cell: (row) => row.ordinal, value: (row) => row.ordinal },
  ofResult("Micro-batch", "number", sizeWords, (probe) => probe.micro_batch_size),
  ofResult("Outcome", "", (probe) => badge(probe.outcome), (probe) => probe.outcome),
  ofResult("Peak memory", "number", peakWords, heldBytes),
  ofResult("Tensors", "number", (probe) => exact(probe.peak_allocated_bytes), (probe) => probe.peak_allocated_bytes),
  ofResult("Context", "number", (probe) => exact(probe.context_bytes), (probe) => probe.context_bytes),
  ofResult("Limit", "number", (probe) => exact(probe.limit_bytes), (probe) => probe.limit_bytes),
  ofResult("Duration", "number", (probe) => seconds(probe.seconds.total), (probe) => probe.seconds.total),
  ofResult("Update", "number", (probe) => seconds(probe.timing?.update_seconds), (probe) => probe.timing?.update_seconds),
  ofResult("Message", "message wide", (probe) => [withDetails(probe.message, probe.details), probe.traceback && rawText("Traceback", probe.traceback)]),
];

function ofResult(title, style, cell, value) {
  return { title, class: style, cell: ({ result }) => cell(result), value: value && (({ result }) => value(result)) };
}

function exact(value) {
  return html`<span title=${bytesExactly(value)}>${bytes(value)}</span>`;
}

const PLANS = [
  { title: "Steps", class: "number", cell: (row) => count(row.gradient_accumulation_steps), value: (row) => row.gradient_accumulation_steps },
  { title: "Micro-batch", class: "number", cell: (row) => count(row.micro_batch_size), value: (row) => row.micro_batch_size },
  { title: "Peak memory", class: "number", cell: (row) => exact(row.peak_bytes), value: (row) => row.peak_bytes },
  { title: "Samples per second and rank", class: "number", cell: (row) => number(row.samples_per_second, 3), value: (row) => row.samples_per_second },
  { title: "", cell: (row) => html`<span class="tags">${row.chosen && tag("recommended")}${tag(row.source)}${row.thrashing && tag("thrashing")}</span>` },
];
const changeColumns = ({ kind }) => [
  { title: "Change", cell: (row) => changesInWords(row.changes) },
  { title: "Expected to fit", class: "number", cell: (row) => (row.largest_micro_batch_size === 0 ? "none" : count(row.largest_micro_batch_size)) },
  { title: "At least", class: "number", cell: (row) => (row.surely_fits === 0 ? "none" : count(row.surely_fits)) },
  { title: kind === "cuda" ? "Tensors" : "Peak memory", class: "number", cell: (row) => exact(row.peak_bytes) },
  { title: "", cell: () => tag("estimated") },
];

function alternatives({ alternatives: plans, what_ifs: changes, device }) {
  return (plans.length > 1 || changes.length > 0) && html`<${Card} name="plans" title="Alternatives"><div class="stack">
    ${plans.length > 1 && html`<${Table} caption="Plans for the same effective batch" columns=${PLANS} rows=${plans} keyOf=${(row) => row.gradient_accumulation_steps} />`}
    ${changes.length > 0 && html`<${Table} caption="Effect of changes to the spec: estimated, not run" showCaption columns=${changeColumns(device)} rows=${changes} keyOf=${(row) => JSON.stringify(row.changes)} />`}
  </div><//>`;
}

function reproduction(tuning) {
  const submission = submissionAgain(tuning);
  return [
    raisedLimit(tuning) && html`<p class="text">${raisedLimit(tuning)}</p>`,
    codeBlock(JSON.stringify(submission.spec, null, 2), { label: "spec.json", download: "spec.json" }),
    codeBlock(asCommand(submission), { label: "On the command line" }),
    codeBlock(asCurl(submission, location.origin, keyId() !== ""), { label: "Over HTTP" }),
  ];
}

render(html`<${TuningPage} />`, byId("page"));
