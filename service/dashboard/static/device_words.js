/**
 * Short words for a failed allocation, in place of the allocator's own text, which is kept behind details.
 *
 *   shortened("out of memory in phase warmup: [enforce fail ...")   "asked for 2.00 MiB more in the warm-up"
 *   withDetails(message, details)                                   the short words, then the raw text to open
 *   largestWords(proof)                                             what the largest micro-batch of a proof is
 */

import { h } from "./dom.js";
import { bytes } from "./format.js";

const PHASES = { start: "at the start", build: "while the model was built", warmup: "in the warm-up", measure: "in the measured update" };
const IN_PHASE = "(?:out of memory in phase (?<phase>\\w+): )?";
const OF_CPU = new RegExp(
  `${IN_PHASE}\\[enforce fail at [^\\]]*\\](?:(?!enforce fail)[^])*?tried to allocate (?<asked>\\d+) bytes\\.?(?: Error code \\d+ \\([^)]*\\))?`,
  "gu",
);
const OF_CUDA = new RegExp(
  `${IN_PHASE}CUDA out of memory\\. Tried to allocate (?<asked>[\\d.]+ [KMGT]?i?B)(?:[^]*?environment-variables\\)|[^]*)`,
  "gu",
);

/** A message without the allocator's own text; any other message as it is. */
export function shortened(message) {
  return message
    .replaceAll(OF_CPU, (...found) => asked(found.at(-1), bytes(Number(found.at(-1).asked))))
    .replaceAll(OF_CUDA, (...found) => asked(found.at(-1), found.at(-1).asked));
}

function asked({ phase }, size) {
  return `asked for ${size} more${phase ? ` ${PHASES[phase] ?? `in the phase ${phase}`}` : ""}`;
}

/** A message as nodes: short, and where there is more to read, behind details. */
export function withDetails(message, details = null) {
  const short = shortened(message);
  const raw = details ?? (short === message ? null : message);
  return raw === null ? [short] : [short, rawText("The device's own words", raw)];
}

/** Text that few need, to be opened. */
export function rawText(title, text) {
  return h("details", { class: "small" }, h("summary", {}, title), h("pre", { class: "small", tabindex: 0 }, text));
}

const LARGER_FAIL = new Set(["oom", "invalid-size", "warm-start"]);

/** What the largest micro-batch is: only a size above it that failed makes it the largest that fits. */
export function largestWords(proof) {
  if (LARGER_FAIL.has(proof.stopped_by)) {
    return "largest micro-batch that fits";
  }
  return proof.stopped_by === "bound" ? "micro-batch that fits; larger ones were not tried" : "micro-batch that fits; larger ones may";
}
