/**
 * The answer of a recommendation, with which the pages of tunings and recommendations begin, and what proves it.
 *
 *   html`<${Answer} found=${found}>links<//>`   what to train with, what is proven and gained; or why there is no plan, and what to try
 *   html`<${Proof} found=${found} />`           the plan drawn to scale, and the proof in sentences
 *   answerInWords(found)                        {plan, batch, proof, gain} of a feasible recommendation
 *   warnings(found)                             its warnings -> nodes
 *   readingInWords(data)                        what was read of the data: "a sample: 120,000 of 3,000,000 rows"
 */

import { may, post } from "./api.js";
import { commandOf } from "./command.js";
import { alertBox, Button, CopyButton, linkTo, problemAlert } from "./components.js";
import { provenWords, shortened } from "./device_words.js";
import { OtherGpus } from "./estimate_table.js";
import { bytes, count, number, percent, plural, sentences, words } from "./format.js";
import { useRead } from "./hooks.js";
import { drawPlan, planInWords, planText } from "./plan.js";
import { html, useState } from "./preact-htm.js";
import { submissionAgain } from "./reproduce.js";
import { openTrainDialog } from "./train_dialog.js";

const REMEDIES = "What can make it fit: "; // infeasibility.py

export function answerInWords({ plan, evidence, gain, warnings: found }) {
  const isVerified = !found.some((warning) => warning.code === "samples-not-verified");
  const end = plan.exact ? (isVerified ? " exactly" : "") : `, ${count(plan.requested_effective_batch_size)} requested`;
  return { plan: planInWords(plan.micro_batch_sizes), batch: `= ${count(plan.effective_batch_size)}${end}`, proof: provenWords(evidence.proof), gain: gain && gainInWords(gain) };
}

function gainInWords({ baseline, baseline_fits: fits, speedup, speed_source: source }) {
  const before = planText(baseline);
  if (fits === false) {
    return `${before} runs out of memory.`;
  }
  const compared = speedup && `${number(speedup, speedup < 1 ? 2 : 3)}× ${speedup < 1 ? "the speed of" : "faster than"} ${before}`;
  return compared && (source === "measured" ? `${compared}.` : `About ${compared} (estimated).`);
}

export function Answer({ found, children }) {
  const [problem, setProblem] = useState(null);
  return html`<section class="card answer" id="answer" aria-labelledby="answer-title">
    ${found.feasible ? plannedAnswer(found, setProblem) : infeasibleAnswer(found, setProblem)}
    ${problem && problemAlert(problem)}
    <p class="small links">${children}<${Jobs} fingerprint=${found.fingerprint} /></p>
  </section>`;
}

function plannedAnswer(found, setProblem) {
  const { plan, batch, proof, gain } = answerInWords(found);
  const address = `/recommendations/${encodeURIComponent(found.id)}`;
  const copied = [`Train with ${plan} (${batch}).`, proof, gain, location.origin + address].filter(Boolean).join(" ");
  return html`
    <h2 id="answer-title">Train with <strong>${plan.split(" + ").map((part, index) => html`${index > 0 && " + "}<span class="nowrap">${part}</span>`)}</strong> <span class="muted">(${batch})</span></h2>
    <p class="proven">${settingsInWords(found)} ${proof} ${gain}</p>
    <div class="page-actions">
      ${may("jobs:run") && html`<button type="button" class="button button-primary" aria-haspopup="dialog" onClick=${() => openTrainDialog(found).catch(setProblem)}>Train</button>`}
      <a class="button" href="${address}#exports">Export</a>
      <${CopyButton} text=${copied} label="Copy plan" style="" />
    </div>`;
}

/** What a framework is set to, and the memory that takes, which may be less than that of the largest size. */
function settingsInWords({ plan: { gradient_accumulation_steps: steps, micro_batch_size: size, micro_batch_sizes: sizes }, alternatives, headroom }) {
  const isUniform = sizes.flat().every((each) => each === size);
  const peak = alternatives.find(({ chosen }) => chosen)?.peak_bytes;
  const memory = peak && headroom && `; peak ${bytes(peak)} of ${bytes(headroom.limit_bytes)}`;
  return `${plural(steps, "accumulation step")}, micro-batches of ${isUniform ? "" : "at most "}${count(size)}${memory ?? ""}.`;
}

/** Why there is no plan, and changes with which there may be one. */
function infeasibleAnswer(found, setProblem) {
  const [reason, remedies = ""] = shortened(found.infeasible_reason).split(REMEDIES);
  const [cause, ...rest] = sentences(reason);
  const tried = changesToTry(found);
  const others = remedies.replace(/\.$/, "").split("; ").map(inWords).filter((each) => each !== "" && !tried.some((changes) => changesInWords(changes) === each));
  const again = async (changes) => location.assign(`/tunings/${encodeURIComponent((await post("/v1/tunings", changedSubmission(found, changes))).id)}`);
  return html`
    <h2 id="answer-title">${found.evidence.proof.fits > 0 ? "No plan" : "Nothing fits"}</h2>
    <p class="proven">${cause}</p>
    ${may("tunings:write") && html`<div class="page-actions">${tried.map((changes, at) => html`<${Button} class=${at === 0 ? "button-primary" : ""} act=${() => again(changes)} onProblem=${setProblem}>Try with ${changesInWords(changes)}<//>`)}</div>`}
    ${rest.length > 0 && html`<p class="text">${rest.join(" ")}</p>`}
    ${others.length > 0 && html`<div class="text"><p>What else can make it fit:</p><ul>${others.map((each) => html`<li>${each}</li>`)}</ul></div>`}
    ${commandOf(found.request) === null && html`<${OtherGpus} request=${found.request} />`}`;
}

/** Changes that are expected to fit; where nothing was estimated, those that take less memory. */
function changesToTry({ request, what_ifs: estimated }) {
  const { activation_checkpointing: isOn, precision } = request.spec;
  const isNew = commandOf(request) === null && !request.what_if;
  return isNew ? [!isOn && { activation_checkpointing: true }, precision === "fp32" && { precision: "bf16-mixed" }].filter(Boolean) : estimated.filter((each) => each.largest_micro_batch_size > 0).map((each) => each.changes);
}

/** The submission of a recommendation's request, with fields of its spec changed, which dotted paths name. */
function changedSubmission(found, changes) {
  const made = structuredClone(submissionAgain({ ...found, priority: 0, recommendation: null }));
  for (const [path, value] of Object.entries(changes)) {
    const names = path.split(".");
    names.slice(0, -1).reduce((part, name) => part[name], made.spec)[names.at(-1)] = value;
  }
  return made;
}

export function changesInWords(changes) {
  return Object.entries(changes).map(([field, value]) => inWords(`${field}: ${value}`)).join(", ");
}

/** A change of a spec in words: of "activation_checkpointing: true" the field alone. */
function inWords(change) {
  return change.replaceAll("_", " ").replaceAll(": true", "").replace(/^([a-z ]+): /, "$1 ");
}

/** Links to the jobs with this evidence. */
function Jobs({ fingerprint }) {
  const found = useRead(may("jobs:read") ? `/v1/jobs?limit=5&q=${fingerprint}` : null);
  return found?.items.length > 0 && html`<span>Jobs: ${found.items.map((job, index) => html`${index > 0 && ", "}${linkTo("jobs", job.id)} (${words(job.state).toLowerCase()})`)}</span>`;
}

export function Proof({ found: { headroom, evidence, plan, gain, choice, largest_micro_batch_size: largest } }) {
  return html`
    ${plan && drawPlan(plan.micro_batch_sizes)}
    <div class="text">
      ${evidence.proof.fits > 0 && html`<p>${shortened(evidence.proof.statement)} ${choice}</p>`}
      ${evidence.plan_proof && html`<p>${shortened(evidence.plan_proof)}</p>`}
      ${gain && html`<p>${shortened(gain.statement)}</p>`}
      ${headroom && html`<p>A micro-batch of ${count(largest)} leaves ${percent(headroom.free_fraction)} of ${bytes(headroom.limit_bytes)} free. ${memoryParts(headroom)}</p>`}
    </div>`;
}

/** The allocator's and the process's part of a peak on CUDA; null on the CPU. */
function memoryParts({ allocated_bytes: allocated, reserved_bytes: reserved, context_bytes: context, peak_bytes: peak }) {
  return reserved && `Of the ${bytes(peak)} held, the allocator reserves ${bytes(reserved)} (${bytes(allocated)} in tensors); the process takes ${bytes(context)} outside of it.`;
}

export function warnings(found) {
  return found.warnings.map(({ code, message }) => alertBox("warn", words(code.replaceAll("-", "_")), shortened(message)));
}

export function readingInWords(data) {
  if (!data) {
    return null;
  }
  const { read, total, unit, reason } = data;
  const part = `a sample: ${count(read)} of ${total === null ? "more" : count(total)} ${unit}`;
  return read === 0 ? `nothing${reason && `: ${reason}`}` : read === total ? `all ${count(total)} ${unit}` : part;
}
