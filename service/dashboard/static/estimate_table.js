/**
 * A table of an estimate, with a row for each GPU, marked as estimated, and the versions that were traced.
 *
 *   estimateTable(estimate)  a node
 */

import { h } from "./dom.js";
import { bytes, bytesExactly, count, plural } from "./format.js";
import { mark, tag } from "./parts.js";
import { makeTable } from "./table.js";

const VERDICTS = {
  fits: ["ok", "✓", "fits"],
  uncertain: ["warn", "?", "uncertain"],
  "does-not-fit": ["bad", "✕", "does not fit"],
};

/** Makes a row for each GPU: the verdict, the largest micro-batch with its interval, the plan. */
export function estimateTable(estimate) {
  const table = makeTable({
    caption: "Estimated, not measured",
    keyOf: (row) => row.gpu,
    columns: [
      { title: "GPU", class: "nowrap", cell: (row) => row.gpu },
      { title: "Verdict", cell: (row) => h("span", { class: "tags" }, mark(...VERDICTS[row.feasible]), tag("estimated")), value: (row) => row.feasible },
      { title: "Largest micro-batch", class: "number", cell: (row) => count(row.largest_micro_batch_size), value: (row) => row.largest_micro_batch_size },
      { title: "Surely / perhaps", class: "number", cell: (row) => `${count(row.surely_fits)} / ${count(row.may_fit)}` },
      { title: "Peak memory", class: "number", cell: peak },
      { title: "Reserved / outside the allocator", class: "number", cell: parts },
      { title: "Usable", class: "number", cell: (row) => h("span", { title: bytesExactly(row.usable_bytes) }, bytes(row.usable_bytes)), value: (row) => row.usable_bytes },
      { title: "Plan", cell: plan },
      { title: "Notes", cell: (row) => row.notes.join(" ") },
    ],
  });
  table.update(estimate.gpus);
  const versions = ["torch", "transformers"].filter((name) => name in estimate.versions).map((name) => `${name} ${estimate.versions[name]}`);
  return h("div", { class: "stack" }, table.element, h("p", { class: "muted small" }, `Traced with ${versions.join(", ")}.`));
}

function peak({ peak: found }) {
  return found === null ? "–" : `${bytes(found.device_bytes.low)} to ${bytes(found.device_bytes.high)}`;
}

function parts({ peak: found }) {
  return found === null ? "–" : `${bytes(found.reserved_bytes)} / ${bytes(found.outside_allocator_bytes.expected)}`;
}

function plan({ plan: found }) {
  if (found === null) {
    return "–";
  }
  const sizes = found.micro_batch_sizes[0];
  const [least, most] = sizes.reduce(([low, high], size) => [Math.min(low, size), Math.max(high, size)], [Infinity, 0]);
  return `${plural(found.gradient_accumulation_steps, "step")} of ${least === most ? count(most) : `${count(least)} to ${count(most)}`}`;
}
