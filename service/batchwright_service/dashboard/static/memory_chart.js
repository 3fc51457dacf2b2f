/**
 * Peak memory against micro-batch size: every probe, the planner's model, the limit with and without the margin; and speed beside it.
 *
 *   modelOf(probes, expected)                the bytes of a size as a function; `expected` is the estimate of the evidence, if any
 *   memoryFigure(probes, model, {limitBytes, probeLimitBytes, fits, next, chosen})   {data, layout}; `next` does not fit, `chosen` is of the plan
 *   memoryInWords(probes, model, ...)        the same in a sentence, for screen readers
 *   speedFigure(found)                       the samples per second of a recommendation's plans
 *   sizeWords(probe)                         its micro-batch size, or the sizes of its plan
 */

import { heldBytes, shortened } from "./device_words.js";
import { colour } from "./dom.js";
import { bytes, count, number, plural, seconds } from "./format.js";
import { level, line, points } from "./chart.js";

const GIB = 1024 ** 3;
const MIB = 1024 ** 2;
const FEW_SIZES = 10; // up to which every size has its tick
const FAR = 3; // times the largest fit: a next size beyond that is not shown beside it
const STEPS = 100;
const ROOM = 0.12; // above the highest level, for its words
const NOISE = 0.01; // of a peak, as a share
const SLOPE_ERROR = 0.1; // of an estimate, as a share of its slope

/** The micro-batches of a probe: its size, or those of a plan, which differ, as a sum. */
export function sizeWords(probe) {
  const sizes = probe.micro_batch_sizes;
  return new Set(sizes).size > 1 ? sizes.join(" + ") : count(probe.micro_batch_size);
}

/**
 * Peak memory in bytes as a function of the size, as the planner models it: the estimated curve, with the level and the slope that the fits
 * of accumulated updates show; where nothing was estimated a straight line through them, and through what is held between updates as the
 * peak of no sample. Null where that takes more fits than there are.
 */
export function modelOf(probes, expected = null) {
  const fits = probes.filter((probe) => probe.outcome === "FIT" && probe.accumulates && heldBytes(probe));
  const points = fits.map((probe) => [expected === null ? probe.micro_batch_size : estimated(expected, probe.micro_batch_size), heldBytes(probe)]);
  const resident = Math.min(...fits.map((probe) => probe.resident_bytes).filter(Boolean));
  if (expected === null && Number.isFinite(resident)) {
    points.push([0, resident]);
  }
  const mean = (place) => points.reduce((sum, point) => sum + point[place], 0) / points.length;
  const [centre, level] = [mean(0), mean(1)];
  const spread = points.reduce((sum, [at]) => sum + (at - centre) ** 2, 0);
  if (points.length === 0 || (expected === null && spread === 0)) {
    return null;
  }
  const doubt = expected === null ? 0 : ((NOISE * level) / SLOPE_ERROR) ** 2; // few fits close together say less of the slope than the estimate
  const slope = (points.reduce((sum, [at, held]) => sum + (at - centre) * (held - level), 0) + doubt) / (spread + doubt);
  return (size) => level + slope * ((expected === null ? size : estimated(expected, size)) - centre);
}

/** The estimated bytes at a size: linear between the points of the estimate and beyond them. */
function estimated({ points }, size) {
  const above = Math.max(1, points.findIndex((point) => point.micro_batch_size >= size));
  const [low, high] = points.slice((size > points.at(-1).micro_batch_size ? points.length - 1 : above) - 1);
  return low.used_bytes + ((high.used_bytes - low.used_bytes) * (size - low.micro_batch_size)) / (high.micro_batch_size - low.micro_batch_size);
}

/** The figure of the chart, around the proven limit once there is one. */
export function memoryFigure(probes, model, { limitBytes, probeLimitBytes, chosen, fits, next }) {
  const unit = (limitBytes ?? probeLimitBytes ?? GIB) >= GIB ? [GIB, "GiB"] : [MIB, "MiB"];
  const levels = [
    limitBytes && level(limitBytes / unit[0], `limit ${bytes(limitBytes)}`, "--bad"),
    probeLimitBytes && probeLimitBytes !== limitBytes && level(probeLimitBytes / unit[0], `after the margin ${bytes(probeLimitBytes)}`, "--warn", { above: false }),
  ].filter(Boolean);
  const largest = Math.max(...probes.map((probe) => probe.micro_batch_size));
  const [low, high] = fits ? [Math.floor(0.8 * (chosen ?? fits)), Math.ceil(1.1 * Math.max(fits, next < FAR * fits ? next : 0)) + 1] : [0, 1.1 * largest];
  const heights = probes.map((probe) => heightOf(probe, model, probeLimitBytes ?? limitBytes) / unit[0]);
  const shown = heights.filter((_, index) => probes[index].micro_batch_size >= low && probes[index].micro_batch_size <= high);
  const most = Math.max(...shown, (limitBytes ?? 0) / unit[0]);
  const bottom = fits ? 0.97 * Math.min(...shown, model ? model(low) / unit[0] : most) : 0;
  return {
    data: [...modelTrace(model, [low, high], unit), ...outcomeTraces(probes, heights)],
    layout: {
      xaxis: { ...axis(), title: { text: "micro-batch size (samples)" }, range: [low, high], tickformat: ",d", dtick: high - low <= FEW_SIZES ? 1 : undefined },
      yaxis: { ...axis(), title: { text: `peak memory (${unit[1]})` }, range: [bottom, most + ROOM * (most - bottom)] },
      shapes: [...levels.map((drawn) => drawn.shape), ...chosenShape(chosen)],
      annotations: levels.map((drawn) => drawn.annotation),
    },
  };
}

/** The speed of the plans of a recommendation against their micro-batch size, with that of today's plan; null of less than two. */
export function speedFigure({ alternatives, gain, plan }) {
  const known = alternatives.filter((row) => row.samples_per_second !== null).map((row) => [row.micro_batch_size, row.samples_per_second, row.source]);
  if (gain?.baseline_samples_per_second) {
    known.push([gain.baseline.micro_batch_size, gain.baseline_samples_per_second, "today"]);
  }
  const rows = known.sort(([one], [other]) => one - other);
  const kinds = { measured: { token: "--ok" }, modelled: { token: "--chart-1", symbol: "circle-open" }, today: { token: "--warn", symbol: "diamond" } };
  const marks = Object.entries(kinds).map(([kind, style]) => [kind, style, rows.filter(([, , source]) => source === kind)]).filter(([, , shown]) => shown.length > 0);
  return rows.length < 2 ? null : {
    data: [
      { ...line("", rows.map(([size]) => size), rows.map(([, speed]) => speed), "--chart-1"), showlegend: false },
      ...marks.map(([kind, style, shown]) => points(kind, shown.map(([size]) => size), shown.map(([, speed]) => speed), { ...style, hover: shown.map(([size, speed]) => `${size} samples: ${number(speed, 3)} samples/s, ${kind}`) })),
    ],
    layout: {
      xaxis: { ...axis(), title: { text: "micro-batch size (samples)" }, tickformat: ",d" },
      yaxis: { ...axis(), title: { text: "samples per second" }, rangemode: "tozero" },
      shapes: chosenShape(plan?.micro_batch_size),
    },
  };
}

/** The chart in a sentence. */
export function memoryInWords(probes, model, { limitBytes }) {
  const { FIT: fits = 0, OOM: failed = 0 } = Object.fromEntries(Object.entries(Object.groupBy(probes, (probe) => probe.outcome)).map(([name, each]) => [name, each.length]));
  const largest = Math.max(...probes.map((probe) => probe.micro_batch_size));
  const growth = model === null ? "" : ` Memory grows by about ${bytes(model(largest) - model(largest - 1))} per sample.`;
  const limit = limitBytes === null ? "" : ` The limit is ${bytes(limitBytes)}.`;
  const parts = [[fits, "fit"], [failed, "ran out of memory"], [probes.length - fits - failed, "ended without a verdict"]].filter(([found]) => found > 0);
  return `${plural(probes.length, "probe")}: ${parts.map(([found, words]) => `${found} ${words}`).join(", ")}.${limit}${growth}`;
}

function axis() {
  return { gridcolor: colour("--grid"), linecolor: colour("--edge"), automargin: true };
}

function modelTrace(model, [low, high], [unit]) {
  const sizes = Array.from({ length: STEPS + 1 }, (_, step) => low + ((high - low) * step) / STEPS);
  return model === null ? [] : [line("the planner's model", sizes, sizes.map((size) => model(size) / unit), "--chart-1")];
}

const MARKS = {
  FIT: { token: "--ok", symbol: "circle" },
  OOM: { token: "--bad", symbol: "x-open" }, // open: nobody measured the height
  OTHER: { token: "--warn", symbol: "diamond-open" },
};

/** A trace for each kind of outcome. A failed probe has no measured peak, and is drawn where the model has it, above the limit. */
function outcomeTraces(probes, heights) {
  const kinds = Object.groupBy(probes.map((_, index) => index), (index) => (probes[index].outcome in MARKS ? probes[index].outcome : "OTHER"));
  return Object.entries(MARKS).filter(([kind]) => kinds[kind]).map(([kind, style]) => {
    const name = kind === "FIT" ? "FIT, measured" : `${kind === "OTHER" ? "neither" : kind}, peak not measured`;
    const shown = kinds[kind].map((index) => probes[index]);
    return points(name, shown.map((probe) => probe.micro_batch_size), kinds[kind].map((index) => heights[index]), { ...style, hover: shown.map(everyFigure) });
  });
}

function heightOf(probe, model, limit) {
  if (probe.outcome === "FIT" && heldBytes(probe)) {
    return heldBytes(probe);
  }
  const expected = Math.max(model?.(probe.micro_batch_size) ?? 0, probe.outcome === "OOM" ? limit ?? 0 : 0);
  return Math.min(expected, 1.3 * (limit ?? expected));
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
