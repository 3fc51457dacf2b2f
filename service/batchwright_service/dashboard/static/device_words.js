/**
 * Short words for a failed allocation, a proof and a peak. The allocator's own message is kept behind details.
 *
 *   shortened("out of memory in phase warmup: [enforce fail ...")   "asked for 2.00 MiB more in the warm-up"
 *   withDetails(message, details)                                   the short words, then the raw text to open
 *   provenWords(proof)                                              "Proven: 317 fits, 318 does not."
 *   heldBytes(probe), peakWords(probe)                              its peak, as recommendations have it
 */

import { bytes, bytesExactly, count, number } from "./format.js";
import { withCode } from "./components.js";
import { html } from "./preact-htm.js";

const PHASES = { start: "at the start", build: "while the model was built", warmup: "in the warm-up", measure: "in the measured update" };
const IN_PHASE = "(?:out of memory in phase (?<phase>\\w+): )?";
const OF_CPU = new RegExp(
  `${IN_PHASE}\\[enforce fail at [^\\]]*\\](?:(?!enforce fail)[^])*?tried to allocate (?<requested>\\d+) bytes\\.?(?: Error code \\d+ \\([^)]*\\))?`,
  "gu",
);
const OF_CUDA = new RegExp(
  `${IN_PHASE}CUDA out of memory\\. Tried to allocate (?<requested>[\\d.]+ [KMGT]?i?B)(?:[^]*?environment-variables\\)|[^]*)`,
  "gu",
);

/** Replaces the allocator's own text in a message by short words, and rounds sizes as the pages do. */
export function shortened(message) {
  return message
    .replaceAll(/(\d+\.\d\d) (?=[KMGT]iB)/gu, (_, figure) => `${number(Number(figure), 3)} `)
    .replaceAll(OF_CPU, (...found) => allocationWords(found.at(-1), bytes(Number(found.at(-1).requested))))
    .replaceAll(OF_CUDA, (...found) => allocationWords(found.at(-1), found.at(-1).requested));
}

function allocationWords({ phase }, size) {
  return `asked for ${size} more${phase ? ` ${PHASES[phase] ?? `in the phase ${phase}`}` : ""}`;
}

/** Returns a message as nodes: the short words, and the raw text behind details. */
export function withDetails(message, details = null) {
  const short = shortened(message);
  const raw = details ?? (short === message ? null : message);
  return [withCode(short), raw !== null && rawText("Message of the allocator", raw)];
}

/** Returns text behind details. */
export function rawText(title, text) {
  return html`<details class="small"><summary>${title}</summary><pre class="small" tabindex="0">${text}</pre></details>`;
}

const LARGER_FAIL = new Set(["oom", "invalid-size", "warm-start"]);

/** Says what is proven: the next size fails only if a probe has shown it. */
export function provenWords({ stopped_by: reason, fits, next_size: next }) {
  if (LARGER_FAIL.has(reason)) {
    return `Proven: ${count(fits)} fits, ${count(next)} does not.`;
  }
  return `Proven: ${count(fits)} fits. ${reason === "bound" || reason === "quick" ? "Larger sizes were not tried." : "Larger sizes may fit too."}`;
}

/** The peak of all memory that a probe held, in bytes: reserved, with the context, on CUDA; of the process on the CPU. */
export function heldBytes(probe) {
  return probe.peak_reserved_bytes === null ? probe.process_peak_bytes : probe.peak_reserved_bytes + (probe.context_bytes ?? 0);
}

/** That peak in words: of a probe that failed, what it held until then. */
export function peakWords(probe) {
  const held = heldBytes(probe);
  return held === null ? bytes(null) : html`<span title=${bytesExactly(held)}>${probe.outcome === "FIT" ? "" : "≥ "}${bytes(held)}</span>`;
}
