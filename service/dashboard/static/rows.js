/** Cells of the lists of tunings, jobs and recommendations. */

import { h } from "./dom.js";
import { bytes, count, number, plural } from "./format.js";
import { bar, mark } from "./parts.js";

const MOST_COMPARED = 8;

/** The plan of a row in a list. */
export function planWords({ plan, feasible }) {
  if (plan === null) {
    return feasible === false ? mark("warn", "⊘", "nothing fits") : "–";
  }
  const ranks = plan.world_size === 1 ? "" : `${plural(plan.world_size, "rank")} × `;
  return `${ranks}${plural(plan.gradient_accumulation_steps, "step")} × ≤ ${count(plan.micro_batch_size)}`;
}

/** The samples per second of a row in a list, and how many times those of the baseline they are. */
export function rateWords({ samples_per_second: rate, speedup, speed_source: source }) {
  const gained = speedup === null ? "" : ` (${source === "measured" ? "" : "~"}${number(speedup, 3)}×)`;
  return number(rate, 3) + gained;
}

/** The peak of a row in a list against its limit. */
export function peakBar({ peak_bytes: peak, limit_bytes: limit }) {
  if (peak === null || limit === null) {
    return "–";
  }
  return bar({ value: peak, max: limit, label: "Peak memory against the limit", text: `${bytes(peak)} of ${bytes(limit)}` });
}

/** The act that compares the recommendations of chosen rows (selection.js); `idOf` is null for a row without one. */
export function compareAct(idOf) {
  const href = (rows) => `/recommendations/compare?${new URLSearchParams(rows.map((row) => ["id", idOf(row)]))}`;
  return { text: "Compare", noun: "recommendation", least: 2, most: MOST_COMPARED, applies: (row) => idOf(row) !== null, href };
}

/** A text with a lesser one below it, in one cell. */
export function both(first, second) {
  return h("div", {}, first, second && second !== "–" && h("div", { class: "muted small" }, second));
}
