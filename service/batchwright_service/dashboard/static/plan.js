/**
 * A plan in words and drawn to scale.
 *
 *   planInWords(sizes)     "2 × 300", "8 ranks × (34 + 2 × 33)"; sizes: for each rank, those of its micro-batches in order
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

function drawPiece(run, index) {
  const text = runInWords(run);
  return html`<div class="plan-piece plan-piece-${index % 2 === 0 ? "even" : "odd"}" title=${text} style=${{ flexGrow: run.size * run.times }}><span>${text}</span></div>`;
}

export function planInWords(sizes) {
  const groups = groupsOf(sizes);
  const parts = groups.slice(0, MOST_GROUPS).map(({ first, last, sizes: own }) => {
    const text = own.length === 1 ? `1 × ${count(own[0])}` : runsInWords(runsOf(own));
    return sizes.length === 1 ? text : `${plural(last - first + 1, "rank")} × (${text})`;
  });
  return parts.join(" + ") + (groups.length > MOST_GROUPS ? " + …" : "");
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
