/**
 * A plan drawn to scale: the effective batch cut into ranks (rows) and micro-batches (pieces).
 *
 *   drawPlan(sizes)     sizes: for each rank, the sizes of its micro-batches in order -> a node
 *   planInWords(sizes)  "8 ranks, 3 micro-batches each: 34 + 33 + 33"
 *   showPlan(plan)      the plan of a recommendation: its figures, drawn, and in words -> nodes
 *   gainBox(found)         what a recommendation gains over the baseline -> a node; null where it names none
 *   figure(value, label)   a large figure with what it counts -> a node
 *   memoryParts(headroom)  the allocator's and the process's part of a peak on CUDA -> a node; null on the CPU
 */

import { h } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { alertBox } from "./parts.js";

const MOST_PIECES = 40;
const MOST_ROWS = 12;
const MOST_RUNS = 8; // in words

export function figure(value, label) {
  return h("div", {}, h("div", { class: "figure-value" }, value), h("div", { class: "figure-label" }, label));
}

export function memoryParts(headroom) {
  if (!headroom || headroom.reserved_bytes === null) {
    return null;
  }
  const { allocated_bytes: allocated, reserved_bytes: reserved, context_bytes: context, peak_bytes: peak } = headroom;
  return h("p", { class: "muted small" },
    `Of the ${bytes(peak)} held, the allocator reserves ${bytes(reserved)} (${bytes(allocated)} in tensors); the process takes ${bytes(context)} outside of it.`);
}

export function showPlan(plan) {
  return [
    h("div", { class: "figures" },
      figure(count(plan.gradient_accumulation_steps), plan.gradient_accumulation_steps === 1 ? "accumulation step" : "accumulation steps"),
      figure(count(plan.micro_batch_size), "samples in the plan's largest micro-batch"),
      figure(count(plan.world_size), plan.world_size === 1 ? "rank" : "ranks"),
      figure(count(plan.effective_batch_size), plan.exact ? "samples per update, exactly" : "samples per update")),
    drawPlan(plan.micro_batch_sizes),
    h("p", { class: "muted small" }, planInWords(plan.micro_batch_sizes)),
  ];
}

/** The plan as rows of pieces; ranks with the same sizes share a row. */
export function drawPlan(sizes) {
  const groups = groupsOf(sizes);
  const largest = groups.reduce((most, group) => Math.max(most, total(group.sizes)), 1);
  const shown = groups.slice(0, MOST_ROWS);
  const rest = groups.length - shown.length;
  return h(
    "div",
    { class: "plan", role: "img", "aria-label": planInWords(sizes) },
    shown.map((group) => drawRank(group, largest)),
    rest > 0 && h("p", { class: "muted small" }, `and ${plural(rest, "more group", "more groups")} of ranks`),
  );
}

/** The plan in a sentence. */
export function planInWords(sizes) {
  const parts = groupsOf(sizes).slice(0, 4).map(
    ({ first, last, sizes: own }) => `${rankNames(first, last)}: ${runsInWords(runsOf(own))}`,
  );
  return `${count(sizes.reduce((sum, own) => sum + total(own), 0))} samples per update over ${plural(sizes.length, "rank")}. ${parts.join("; ")}`;
}

function drawRank({ first, last, sizes }, largest) {
  const pieces = sizes.length > MOST_PIECES ? runsOf(sizes).slice(0, MOST_PIECES) : sizes.map((size) => ({ size, times: 1 }));
  const row = h("div", { class: "plan-pieces" }, pieces.map(drawPiece));
  row.style.setProperty("inline-size", `${((100 * total(sizes)) / largest).toFixed(3)}%`);
  return h(
    "div",
    { class: "plan-rank" },
    h("div", { class: "plan-name" }, rankNames(first, last), h("span", { class: "muted" }, ` ${plural(total(sizes), "sample")}${first === last ? "" : " each"}`)),
    h("div", { class: "plan-track" }, row),
  );
}

function drawPiece(run, index) {
  const text = runInWords(run);
  const piece = h("div", { class: `plan-piece plan-piece-${index % 2 === 0 ? "even" : "odd"}`, title: text }, h("span", {}, text));
  piece.style.setProperty("flex-grow", run.size * run.times);
  return piece;
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

/** Neighbouring ranks with the same sizes. */
function groupsOf(sizes) {
  const groups = [];
  sizes.forEach((own, rank) => {
    const group = groups.at(-1);
    if (group !== undefined && same(group.sizes, own)) {
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

function same(one, other) {
  return one.length === other.length && one.every((size, index) => size === other[index]);
}

function total(sizes) {
  return sizes.reduce((sum, size) => sum + size, 0);
}

/** What a recommendation gains over the baseline of its request; null where it names none. */
export function gainBox({ gain }) {
  return gain && alertBox(gain.baseline_fits === false ? "warn" : "info", "Gain", gain.statement);
}
