/**
 * A plan and its proof, as the pages of tunings and recommendations show them.
 *
 *   planInWords(sizes)     "8 ranks, 3 micro-batches each: 34 + 33 + 33"; sizes: for each rank, those of its micro-batches in order
 *   planAndProof(found)    a feasible recommendation: its plan drawn to scale, its gain, and its proof -> nodes
 *   infeasible(found)      why nothing fits -> a node
 *   warnings(found)        its warnings -> nodes
 */

import { alertBox, figure } from "./components.js";
import { largestWords, shortened } from "./device_words.js";
import { bytes, count, percent, plural, words } from "./format.js";
import { html } from "./preact-htm.js";

const MOST_PIECES = 40;
const MOST_ROWS = 12;
const MOST_RUNS = 8; // in words

export function planAndProof(found) {
  const { headroom, evidence, plan, gain } = found;
  const steps = plan.gradient_accumulation_steps;
  const isVerified = !found.warnings.some((warning) => warning.code === "samples-not-verified");
  return html`
    <div class="figures">
      ${figure(count(steps), steps === 1 ? "accumulation step" : "accumulation steps")}
      ${figure(count(plan.micro_batch_size), isEven(plan) ? "micro-batch size" : "largest micro-batch of the plan")}
      ${figure(count(plan.world_size), plan.world_size === 1 ? "rank" : "ranks")}
      ${figure(count(plan.effective_batch_size), plan.exact && isVerified ? "samples per update, exactly" : "samples per update")}
    </div>
    ${drawPlan(plan.micro_batch_sizes)}
    <p class="muted small">${planInWords(plan.micro_batch_sizes)}</p>
    ${gain && alertBox(gain.baseline_fits === false ? "warn" : "info", "Gain", gain.statement)}
    <h3>Proof</h3>
    <div class="figures">
      ${figure(count(found.largest_micro_batch_size && evidence.proof.fits), largestWords(evidence.proof))}
      ${headroom && figure(percent(headroom.free_fraction), `of ${bytes(headroom.limit_bytes)} stayed free`)}
    </div>
    <p class="text">${shortened(evidence.proof.statement)} ${found.choice}</p>
    ${evidence.plan_proof && html`<p class="text">${shortened(evidence.plan_proof)}</p>`}
    ${memoryParts(headroom)}`;
}

/** Whether all micro-batches of a plan have the same size. */
function isEven({ world_size: ranks, gradient_accumulation_steps: steps, micro_batch_size: size, effective_batch_size: samples }) {
  return ranks * steps * size === samples;
}

export function infeasible(found) {
  return alertBox("warn", found.evidence.proof.fits > 0 ? "No plan" : "No micro-batch fits", shortened(found.infeasible_reason));
}

export function warnings(found) {
  return found.warnings.map(({ code, message }) => alertBox("warn", words(code.replaceAll("-", "_")), shortened(message)));
}

/** The allocator's and the process's part of a peak on CUDA; null on the CPU. */
function memoryParts(headroom) {
  if (!headroom || headroom.reserved_bytes === null) {
    return null;
  }
  const { allocated_bytes: allocated, reserved_bytes: reserved, context_bytes: context, peak_bytes: peak } = headroom;
  return html`<p class="muted small">Of the ${bytes(peak)} held, the allocator reserves ${bytes(reserved)} (${bytes(allocated)} in tensors); the process takes ${bytes(context)} outside of it.</p>`;
}

// --- drawn ----------------------------------------------------------------------------------------------------------

/** The plan as rows of pieces; neighbouring ranks with the same sizes share a row. */
function drawPlan(sizes) {
  const groups = groupsOf(sizes);
  const largest = groups.reduce((most, group) => Math.max(most, total(group.sizes)), 1);
  const rest = groups.length - MOST_ROWS;
  return html`<div class="plan" role="img" aria-label=${planInWords(sizes)}>
    ${groups.slice(0, MOST_ROWS).map((group) => drawRanks(group, largest))}
    ${rest > 0 && html`<p class="muted small">and ${plural(rest, "more group", "more groups")} of ranks</p>`}
  </div>`;
}

function drawRanks({ first, last, sizes }, largest) {
  const pieces = sizes.length > MOST_PIECES ? runsOf(sizes).slice(0, MOST_PIECES) : sizes.map((size) => ({ size, times: 1 }));
  const width = { inlineSize: `${((100 * total(sizes)) / largest).toFixed(3)}%` };
  return html`<div class="plan-rank">
    <div class="plan-name">${rankNames(first, last)}<span class="muted"> ${plural(total(sizes), "sample")}${first === last ? "" : " each"}</span></div>
    <div class="plan-track"><div class="plan-pieces" style=${width}>${pieces.map(drawPiece)}</div></div>
  </div>`;
}

function drawPiece(run, index) {
  const text = runInWords(run);
  return html`<div class="plan-piece plan-piece-${index % 2 === 0 ? "even" : "odd"}" title=${text} style=${{ flexGrow: run.size * run.times }}><span>${text}</span></div>`;
}

// --- in words -------------------------------------------------------------------------------------------------------

export function planInWords(sizes) {
  const parts = groupsOf(sizes).slice(0, 4).map(({ first, last, sizes: own }) => `${rankNames(first, last)}: ${runsInWords(runsOf(own))}`);
  return `${count(sizes.reduce((sum, own) => sum + total(own), 0))} samples per update over ${plural(sizes.length, "rank")}. ${parts.join("; ")}`;
}

function runInWords({ size, times }) {
  return times === 1 ? count(size) : `${count(times)} × ${count(size)}`;
}

function runsInWords(runs) {
  const rest = runs.length > MOST_RUNS ? ` + ${count(runs.length - MOST_RUNS)} more` : "";
  return runs.slice(0, MOST_RUNS).map(runInWords).join(" + ") + rest;
}

function rankNames(first, last) {
  return first === last ? `Rank ${first}` : `Ranks ${first} to ${last}`;
}

function groupsOf(sizes) {
  const groups = [];
  sizes.forEach((own, rank) => {
    const group = groups.at(-1);
    if (group !== undefined && group.sizes.join() === own.join()) {
      group.last = rank;
    } else {
      groups.push({ first: rank, last: rank, sizes: own });
    }
  });
  return groups;
}

function runsOf(sizes) {
  const runs = [];
  for (const size of sizes) {
    if (runs.at(-1)?.size === size) {
      runs.at(-1).times += 1;
    } else {
      runs.push({ size, times: 1 });
    }
  }
  return runs;
}

function total(sizes) {
  return sizes.reduce((sum, size) => sum + size, 0);
}
