/** The page of a tuning: the recommendation, its probes as they end, and how to reproduce it. */

import { addressOf, get, keyId } from "./api.js";
import { Chart } from "./chart.js";
import { badge, codeBlock, definitions, emptyState, linkTo, nameFacts, tag } from "./components.js";
import { Table } from "./data_table.js";
import { heldBytes, peakWords, rawText, shortened, withDetails } from "./device_words.js";
import { byId } from "./dom.js";
import { bytes, bytesExactly, count, number, percent, plural, seconds } from "./format.js";
import { ENDED } from "./live.js";
import { curveOf, memoryFigure, memoryInWords, sizeWords } from "./memory_chart.js";
import { infeasible, planAndProof, warnings } from "./plan.js";
import { html, render, useState } from "./preact-htm.js";
import { asCommand, asCurl, raisedLimit, submissionAgain } from "./reproduce.js";
import { Card, failure, positionInWords, runFacts, useWork, WorkPage } from "./work.js";

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
  const again = tuning && ENDED.has(tuning.state) && html`<a class="button button-primary" href=${addressOf("/tunings/new", { repeat: tuning.id })}>Repeat</a>`;
  return html`<${WorkPage} work=${work} writeScope="tunings:write" deletion="Its probes and events are deleted too. Its recommendation stays." action=${again}>
    ${tuning && sections(tuning, probes)}
  <//>`;
}

function sections(tuning, own) {
  const found = tuning.recommendation;
  const isAnswered = own.length === 0 && found !== null;
  const probes = isAnswered ? found.evidence.probes.map((result, index) => ({ ordinal: index + 1, result })) : own;
  return html`
    ${failure(tuning)}
    ${found && warnings(found)}
    <div id="progress" role="status">${isAnswered ? answeredFrom(found) : progressText(tuning, probes)}</div>
    ${found && html`<div id="answer"><${Card} name="answer" title="Recommendation" aside=${html`<a href="/recommendations/${encodeURIComponent(found.id)}">Recommendation and exports</a>`}>
      <div class="stack">${found.feasible ? planAndProof(found) : html`${infeasible(found)}<p class="text">${shortened(found.evidence.proof.statement)}</p>`}</div>
    <//></div>`}
    <${Memory} probes=${probes.map((probe) => probe.result)} tuning=${tuning} />
    <${Card} name="probes" title="Probes" aside=${html`<span class="muted small">each probe runs full optimizer updates in its own process</span>`}><div id="probes">
      ${probes.length > 0 ? html`<${Table} caption="Probes" columns=${PROBES} rows=${probes} keyOf=${(row) => row.ordinal} />` : emptyState({ title: "No probe has ended yet", text: "Each probe appears here when it ends." })}
    </div><//>
    ${found && alternatives(found)}
    <${Card} name="facts" title="Request"><div id="facts">${definitions(facts(tuning))}</div><//>
    <${Card} name="again" title="Reproduce"><div class="stack">${reproduction(tuning)}</div><//>`;
}

/** Where the answer of a tuning came from that ran no probe. */
function answeredFrom({ evidence: { tuning_id: id } }) {
  return html`<p>Answered from ${id ? html`tuning ${linkTo("tunings", id)}` : "a stored recommendation"}, whose probes are below. No probe ran for this tuning.</p>`;
}

function progressText(tuning, probes) {
  if (tuning.state === "QUEUED") {
    return html`<p>${positionInWords(tuning.queue)} <a href="/">The queue is on the overview.</a></p>`;
  }
  if (tuning.state !== "RUNNING") {
    return null;
  }
  const last = probes.at(-1)?.result;
  return html`<p>Probing: ${plural(probes.length, "probe")} so far${last ? `, the last: ${sizeWords(last)} samples, ${last.outcome}` : ""}.</p>`;
}

function facts(tuning) {
  const { request } = tuning;
  return [
    ...nameFacts(tuning, "tunings"),
    ["Device", tuning.device ?? tuning.hardware],
    ["Effective batch size", `${count(request.effective_batch_size)} samples`],
    ...workloadFacts(request.spec),
    ["Objective", request.objective.replaceAll("_", " ")],
    ["Memory limit", request.memory_limit_bytes === null ? "the whole device" : bytes(request.memory_limit_bytes)],
    ["Margin", percent(request.memory_margin)],
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

/** The peaks of the probes: in a sentence, and as a chart once two fits say how memory grows. */
function Memory({ probes, tuning: { request, recommendation } }) {
  const limited = probes.find((probe) => probe.limit_bytes !== null);
  const limits = {
    limitBytes: recommendation?.headroom?.limit_bytes ?? request.memory_limit_bytes,
    probeLimitBytes: limited === undefined ? null : limited.limit_bytes + (limited.context_bytes ?? 0),
    fits: recommendation?.evidence.proof.fits ?? null,
    chosen: recommendation?.plan?.micro_batch_size ?? null,
  };
  return probes.length > 0 && html`<${Card} name="chart" title="Peak memory against micro-batch size">
    <p class="muted small">${memoryInWords(probes, limits)}</p>
    ${curveOf(probes) && html`<${Chart} id="chart" figure=${() => memoryFigure(probes, limits)} />`}
  <//>`;
}

// --- tables ---------------------------------------------------------------------------------------------------------

const PROBES = [
  { title: "#", class: "number", cell: (row) => row.ordinal, value: (row) => row.ordinal },
  ofResult("Micro-batch", "number", sizeWords, (probe) => probe.micro_batch_size),
  ofResult("Outcome", "", (probe) => badge(probe.outcome), (probe) => probe.outcome),
  ofResult("Peak memory", "number", peakWords, heldBytes),
  ofResult("Tensors", "number", (probe) => exact(probe.peak_allocated_bytes), (probe) => probe.peak_allocated_bytes),
  ofResult("Context", "number", (probe) => exact(probe.context_bytes), (probe) => probe.context_bytes),
  ofResult("Limit", "number", (probe) => exact(probe.limit_bytes)),
  ofResult("Duration", "number", (probe) => seconds(probe.seconds.total), (probe) => probe.seconds.total),
  ofResult("Update", "number", (probe) => seconds(probe.timing?.update_seconds)),
  ofResult("Message", "message", (probe) => [withDetails(probe.message, probe.details), probe.traceback && rawText("Traceback", probe.traceback)]),
];

function ofResult(title, style, cell, value) {
  return { title, class: style, cell: ({ result }) => cell(result), value: value && (({ result }) => value(result)) };
}

function exact(value) {
  return html`<span title=${bytesExactly(value)}>${bytes(value)}</span>`;
}

const PLANS = [
  { title: "Steps", class: "number", cell: (row) => count(row.gradient_accumulation_steps) },
  { title: "Micro-batch", class: "number", cell: (row) => count(row.micro_batch_size) },
  { title: "Peak memory", class: "number", cell: (row) => exact(row.peak_bytes) },
  { title: "Samples per second and rank", class: "number", cell: (row) => number(row.samples_per_second, 3) },
  { title: "", cell: (row) => html`<span class="tags">${row.chosen && tag("recommended")}${tag(row.source)}${row.thrashing && tag("thrashing")}</span>` },
];
const changeColumns = ({ kind }) => [
  { title: "Change", cell: (row) => Object.entries(row.changes).map(changeInWords).join(", ") },
  { title: "Expected to fit", class: "number", cell: (row) => (row.largest_micro_batch_size === 0 ? "none" : count(row.largest_micro_batch_size)) },
  { title: "At least", class: "number", cell: (row) => (row.surely_fits === 0 ? "none" : count(row.surely_fits)) },
  { title: kind === "cuda" ? "Tensors" : "Peak memory", class: "number", cell: (row) => exact(row.peak_bytes) },
  { title: "", cell: () => tag("estimated") },
];

function changeInWords([field, value]) {
  const name = field.replaceAll("_", " ");
  return value === true ? name : `${name} ${value}`;
}

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
