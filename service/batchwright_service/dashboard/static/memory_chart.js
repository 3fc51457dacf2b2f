/**
 * Peak memory against micro-batch size: every probe, the line through the largest fits, the limit with and without the margin.
 *
 *   memoryFigure(probes, {limitBytes, probeLimitBytes, chosen})   {data, layout} for a chart
 *   memoryInWords(probes, ...)                                    the same in a sentence, for screen readers
 *   sizeWords(probe)                                              its micro-batch size, or the sizes of its plan
 */

import { shortened } from "./device_words.js";
import { colour } from "./dom.js";
import { bytes, count, plural, seconds } from "./format.js";
import { level, line, points } from "./chart.js";

const GIB = 1024 ** 3;
const MIB = 1024 ** 2;
const FEW_SIZES = 10; // up to which every size has its tick

/** The peak memory of a probe in bytes: reserved on CUDA, of the process on the CPU; null if not measured. */
export function heldBytes(probe) {
  if (probe.peak_reserved_bytes !== null) {
    return probe.peak_reserved_bytes;
  }
  return probe.process_peak_bytes;
}

/** The memory in bytes that grows with the micro-batch: tensors on CUDA, the process on the CPU. */
function usedBytes(probe) {
  return probe.peak_allocated_bytes ?? probe.process_peak_bytes;
}

/** The micro-batches of a probe: its size, or those of a plan, which differ, as a sum. */
export function sizeWords(probe) {
  const sizes = probe.micro_batch_sizes;
  return new Set(sizes).size > 1 ? sizes.join(" + ") : count(probe.micro_batch_size);
}

/** Whether the limit of the probes is without the memory that a CUDA process takes outside of the allocator. */
function hasContext(probes) {
  return probes.some((probe) => probe.context_bytes);
}

/** The line through the two largest fits of different sizes: {intercept, slope} in bytes; null where there are not two. */
function fittedLine(probes) {
  const fits = new Map(probes.filter((probe) => probe.outcome === "FIT" && usedBytes(probe)).map((probe) => [probe.micro_batch_size, usedBytes(probe)]));
  const [low, high] = [...fits].sort((one, other) => one[0] - other[0]).slice(-2);
  if (high === undefined) {
    return null;
  }
  const slope = (high[1] - low[1]) / (high[0] - low[0]);
  return { slope, intercept: low[1] - slope * low[0] };
}

/** Whether two fits say how memory grows. */
export function hasLine(probes) {
  return fittedLine(probes) !== null;
}

/** The figure of the chart. */
export function memoryFigure(probes, { limitBytes, probeLimitBytes, chosen }) {
  const unit = (limitBytes ?? probeLimitBytes ?? GIB) >= GIB ? [GIB, "GiB"] : [MIB, "MiB"];
  const fitted = fittedLine(probes);
  const levels = [
    limitBytes && level(limitBytes / unit[0], `limit ${bytes(limitBytes)}`, "--bad"),
    probeLimitBytes && probeLimitBytes !== limitBytes && level(probeLimitBytes / unit[0], `after the margin${hasContext(probes) ? " and the context" : ""} ${bytes(probeLimitBytes)}`, "--warn", { above: false }),
  ].filter(Boolean);
  return {
    data: [...lineTrace(probes, fitted, unit), ...outcomeTraces(probes, fitted, unit, probeLimitBytes ?? limitBytes)],
    layout: {
      xaxis: { ...axis(), title: { text: "micro-batch size (samples)" }, rangemode: "tozero", tickformat: ",d", dtick: largestOf(probes) <= FEW_SIZES ? 1 : undefined },
      yaxis: { ...axis(), title: { text: `peak memory (${unit[1]})` }, rangemode: "tozero" },
      shapes: [...levels.map((drawn) => drawn.shape), ...chosenShape(chosen)],
      annotations: levels.map((drawn) => drawn.annotation),
    },
  };
}

/** The chart in a sentence. */
export function memoryInWords(probes, { limitBytes, chosen }) {
  const fits = probes.filter((probe) => probe.outcome === "FIT").length;
  const rest = probes.length - fits;
  const fitted = fittedLine(probes);
  const growth = fitted === null ? "" : ` Memory grows by ${bytes(fitted.slope)} per sample.`;
  const answer = chosen ? ` Micro-batches of up to ${count(chosen)} fit.` : "";
  const limit = limitBytes === null ? "" : `; the limit is ${bytes(limitBytes)}`;
  const all = fits === 1 ? "The one probe fits" : `All ${fits} probes fit`;
  const outcomes = rest === 0 ? all : `${fits} of ${plural(probes.length, "probe")} fit, ${rest} did not`;
  return `${outcomes}${limit}.${growth}${answer}`;
}

function largestOf(probes) {
  return Math.max(...probes.map((probe) => probe.micro_batch_size));
}

function axis() {
  return { gridcolor: colour("--grid"), linecolor: colour("--edge"), automargin: true };
}

function lineTrace(probes, fitted, [unit]) {
  if (fitted === null) {
    return [];
  }
  const largest = Math.max(...probes.filter((probe) => probe.outcome === "FIT").map((probe) => probe.micro_batch_size));
  const sizes = [0, 1.25 * largest];
  return [line("line through the largest fits", sizes, sizes.map((size) => (fitted.intercept + fitted.slope * size) / unit), "--chart-1")];
}

const MARKS = {
  FIT: { token: "--ok", symbol: "circle" },
  OOM: { token: "--bad", symbol: "x-open" }, // open: nobody measured the height
  OTHER: { token: "--warn", symbol: "diamond-open" },
};

/** A trace for each kind of outcome. A failed probe has no measured peak, and is drawn on the line or at the limit. */
function outcomeTraces(probes, fitted, [unit], limit) {
  const kinds = Object.groupBy(probes, (probe) => (probe.outcome in MARKS ? probe.outcome : "OTHER"));
  return Object.entries(MARKS).filter(([kind]) => kinds[kind]).map(([kind, style]) => {
    const shown = kinds[kind];
    const heights = shown.map((probe) => heightOf(probe, fitted, limit) / unit);
    const name = kind === "FIT" ? "FIT, measured" : `${kind === "OTHER" ? "neither" : kind}, extrapolated`;
    return points(name, shown.map((probe) => probe.micro_batch_size), heights, { ...style, hover: shown.map(everyFigure) });
  });
}

function heightOf(probe, fitted, limit) {
  if (probe.outcome === "FIT" && usedBytes(probe)) {
    return usedBytes(probe);
  }
  const expected = fitted === null ? limit : fitted.intercept + fitted.slope * probe.micro_batch_size;
  return Math.min(expected ?? 0, 1.3 * (limit ?? expected ?? 0));
}

function everyFigure(probe) {
  const figures = [
    ["tensors", probe.peak_allocated_bytes], ["reserved", probe.peak_reserved_bytes], ["process", probe.process_peak_bytes],
    ["between updates", probe.resident_bytes], ["context", probe.context_bytes], ["other processes", probe.other_processes_bytes],
    ["limit", probe.limit_bytes],
  ];
  return [
    `${sizeWords(probe)} samples: ${probe.outcome}${probe.accumulates ? ", accumulating" : ""}`,
    ...figures.filter(([, value]) => value !== null).map(([name, value]) => `${name}: ${bytes(value)}`),
    ...(probe.allocator_retries ? [`allocator retries: ${probe.allocator_retries}`] : []),
    `took: ${seconds(probe.seconds.total)}`,
    ...wrapped(probe.outcome === "FIT" ? "" : shortened(probe.message)),
  ].join("\n");
}

/** Text in lines of some sixty characters, at most four. */
function wrapped(text) {
  const lines = text.match(/.{1,60}(\s|$)|\S{60}/gu) ?? [];
  return lines.length > 4 ? [...lines.slice(0, 4), "…"] : lines;
}

function chosenShape(chosen) {
  if (!chosen) {
    return [];
  }
  const style = { color: colour("--ok"), width: 1.5, dash: "dot" };
  return [{ type: "line", yref: "paper", y0: 0, y1: 1, x0: chosen, x1: chosen, line: style }];
}
