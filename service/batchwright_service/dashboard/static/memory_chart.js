/**
 * Peak memory against micro-batch size: every probe, the curve through the fits, the limit with and without the margin.
 *
 *   memoryFigure(probes, {limitBytes, probeLimitBytes, chosen})   {data, layout} for a chart; `chosen` is the size of the plan
 *   memoryInWords(probes, ...)                                    the same in a sentence, for screen readers
 *   sizeWords(probe)                                              its micro-batch size, or the sizes of its plan
 */

import { heldBytes, shortened } from "./device_words.js";
import { colour } from "./dom.js";
import { bytes, count, plural, seconds } from "./format.js";
import { level, line, points } from "./chart.js";

const GIB = 1024 ** 3;
const MIB = 1024 ** 2;
const FEW_SIZES = 10; // up to which every size has its tick

/** The micro-batches of a probe: its size, or those of a plan, which differ, as a sum. */
export function sizeWords(probe) {
  const sizes = probe.micro_batch_sizes;
  return new Set(sizes).size > 1 ? sizes.join(" + ") : count(probe.micro_batch_size);
}

/**
 * The peaks by rising size, in bytes, between which recommendations interpolate: of updates that accumulate, the timed fit of a size or else
 * its last, and what is held between updates as the peak of no sample. Null without two fits.
 */
export function curveOf(probes) {
  const untimedFirst = probes.filter((probe) => probe.outcome === "FIT").sort((one, other) => one.measures_time - other.measures_time);
  const bySize = new Map(untimedFirst.map((probe) => [probe.micro_batch_size, probe]));
  const fits = [...bySize.values()].filter((probe) => probe.accumulates && heldBytes(probe)).sort((one, other) => one.micro_batch_size - other.micro_batch_size);
  const resident = Math.min(...fits.map((probe) => probe.resident_bytes).filter(Boolean));
  return fits.length < 2 ? null : [...(Number.isFinite(resident) ? [[0, resident]] : []), ...fits.map((probe) => [probe.micro_batch_size, heldBytes(probe)])];
}

/** The bytes at a size: on the curve, or on the straight line through its two nearest points. */
export function expectedBytes(curve, size) {
  const above = curve.findIndex(([at], index) => index > 0 && at >= size);
  const [[low, less], [high, more]] = curve.slice((above === -1 ? curve.length - 1 : above) - 1);
  return less + ((more - less) * (size - low)) / (high - low);
}

/** The figure of the chart. */
export function memoryFigure(probes, { limitBytes, probeLimitBytes, chosen }) {
  const unit = (limitBytes ?? probeLimitBytes ?? GIB) >= GIB ? [GIB, "GiB"] : [MIB, "MiB"];
  const curve = curveOf(probes);
  const levels = [
    limitBytes && level(limitBytes / unit[0], `limit ${bytes(limitBytes)}`, "--bad"),
    probeLimitBytes && probeLimitBytes !== limitBytes && level(probeLimitBytes / unit[0], `after the margin ${bytes(probeLimitBytes)}`, "--warn", { above: false }),
  ].filter(Boolean);
  return {
    data: [...curveTrace(curve, unit), ...outcomeTraces(probes, curve, unit, probeLimitBytes ?? limitBytes)],
    layout: {
      xaxis: { ...axis(), title: { text: "micro-batch size (samples)" }, rangemode: "tozero", tickformat: ",d", dtick: largestOf(probes) <= FEW_SIZES ? 1 : undefined },
      yaxis: { ...axis(), title: { text: `peak memory (${unit[1]})` }, rangemode: "tozero" },
      shapes: [...levels.map((drawn) => drawn.shape), ...chosenShape(chosen)],
      annotations: levels.map((drawn) => drawn.annotation),
    },
  };
}

/** The chart in a sentence. */
export function memoryInWords(probes, { limitBytes, fits: proven }) {
  const { FIT: fits = 0, OOM: failed = 0 } = Object.fromEntries(Object.entries(Object.groupBy(probes, (probe) => probe.outcome)).map(([name, each]) => [name, each.length]));
  const unknown = probes.length - fits - failed;
  const curve = curveOf(probes);
  const [[low, less], [high, more]] = curve === null ? [[0, 0], [1, 0]] : [curve[0], curve.at(-1)];
  const growth = curve === null ? "" : ` Memory grows by about ${bytes((more - less) / (high - low))} per sample.`;
  const answer = proven ? ` Micro-batches of up to ${count(proven)} fit.` : "";
  const limit = limitBytes === null ? "" : ` The limit is ${bytes(limitBytes)}.`;
  const parts = [[fits, "fit"], [failed, "ran out of memory"], [unknown, "ended without a verdict"]].filter(([number]) => number > 0);
  return `${plural(probes.length, "probe")}: ${parts.map(([number, words]) => `${number} ${words}`).join(", ")}.${limit}${growth}${answer}`;
}

function largestOf(probes) {
  return Math.max(...probes.map((probe) => probe.micro_batch_size));
}

function axis() {
  return { gridcolor: colour("--grid"), linecolor: colour("--edge"), automargin: true };
}

/** The curve, and its last part as far again as a quarter of the largest size. */
function curveTrace(curve, [unit]) {
  if (curve === null) {
    return [];
  }
  const end = 1.25 * curve.at(-1)[0];
  const points = [...curve, [end, expectedBytes(curve, end)]];
  return [line("between the fits, interpolated", points.map(([size]) => size), points.map(([, held]) => held / unit), "--chart-1")];
}

const MARKS = {
  FIT: { token: "--ok", symbol: "circle" },
  OOM: { token: "--bad", symbol: "x-open" }, // open: nobody measured the height
  OTHER: { token: "--warn", symbol: "diamond-open" },
};

/** A trace for each kind of outcome. A failed probe has no measured peak, and is drawn on the curve or at the limit. */
function outcomeTraces(probes, curve, [unit], limit) {
  const kinds = Object.groupBy(probes, (probe) => (probe.outcome in MARKS ? probe.outcome : "OTHER"));
  return Object.entries(MARKS).filter(([kind]) => kinds[kind]).map(([kind, style]) => {
    const shown = kinds[kind];
    const heights = shown.map((probe) => heightOf(probe, curve, limit) / unit);
    const name = kind === "FIT" ? "FIT, measured" : `${kind === "OTHER" ? "neither" : kind}, peak not measured`;
    return points(name, shown.map((probe) => probe.micro_batch_size), heights, { ...style, hover: shown.map(everyFigure) });
  });
}

function heightOf(probe, curve, limit) {
  if (probe.outcome === "FIT" && heldBytes(probe)) {
    return heldBytes(probe);
  }
  const expected = curve === null ? limit : expectedBytes(curve, probe.micro_batch_size);
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
