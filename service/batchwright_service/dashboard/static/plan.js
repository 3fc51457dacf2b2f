/**
 * A plan in words and drawn to scale.
 *
 *   planInWords(sizes)     "2 × 300", "8 ranks × (34 + 2 × 33)"; sizes: for each rank, those of its micro-batches in order
 *   planText(summary)      the same of a plan without the list of its micro-batches
 *   drawPlan(sizes)        a row of pieces for each rank -> a node
 */

import { count, plural } from "./format.js";
import { html } from "./preact-htm.js";

const MOST_PIECES = 40;
const MOST_ROWS = 12;
const MOST_RUNS = 8; // in words
const MOST_GROUPS = 4; // in words

/** The plan as rows of pieces; neighbouring ranks with the same sizes share a row. */
export function drawPlan(sizes) {
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
    <div class="plan-name">${first === last ? `Rank ${first}` : `Ranks ${first} to ${last}`}<span class="muted"> ${plural(total(sizes), "sample")}${first === last ? "" : " each"}</span></div>
    <div class="plan-track"><div class="plan-pieces" style=${width}>${pieces.map(drawPiece)}</div></div>
  </div>`;
}

function drawPiece(run, _index, all) {
  const text = runInWords(run);
  return html`<div class="plan-piece ${run.size === all[0].size ? "" : "plan-piece-odd"}" title=${text} style=${{ flexGrow: run.size * run.times }}><span>${text}</span></div>`;
}

export function planInWords(sizes) {
  const groups = groupsOf(sizes);
  const parts = groups.slice(0, MOST_GROUPS).map(({ first, last, sizes: own }) => {
    const text = own.length === 1 ? `1 × ${count(own[0])}` : runsInWords(runsOf(own));
    return sizes.length === 1 ? text : `${plural(last - first + 1, "rank")} × (${text})`;
  });
  return parts.join(" + ") + (groups.length > MOST_GROUPS ? " + …" : "");
}

/**
 * A plan without the list of its micro-batches. Where ranks have equal shares, and its largest size is the smallest for so many steps, its sizes
 * are those of an even split: "8 × 37 + 6 × 36". Otherwise only the largest is known: "2 ranks × 3 steps × ≤ 17".
 */
export function planText({ world_size: ranks, gradient_accumulation_steps: steps, micro_batch_size: size, effective_batch_size: samples }) {
  const share = samples / ranks;
  const larger = share - steps * (size - 1); // micro-batches of the largest size; the others are smaller by one
  if (!Number.isInteger(share) || larger < 1 || larger > steps) {
    return `${ranks === 1 ? "" : `${plural(ranks, "rank")} × `}${plural(steps, "step")} × ≤\u00a0${count(size)}`;
  }
  const runs = [{ size, times: larger }, { size: size - 1, times: steps - larger }].filter((run) => run.size * run.times > 0);
  const text = steps === 1 ? `1 × ${count(size)}` : runsInWords(runs);
  return ranks === 1 ? text : `${plural(ranks, "rank")} × (${text})`;
}

function runInWords({ size, times }) {
  return times === 1 ? count(size) : `${count(times)} × ${count(size)}`;
}

function runsInWords(runs) {
  const rest = runs.length > MOST_RUNS ? ` + ${count(runs.length - MOST_RUNS)} more` : "";
  return runs.slice(0, MOST_RUNS).map(runInWords).join(" + ") + rest;
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
