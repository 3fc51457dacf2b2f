/**
 * The same request again: as a submission, and as the command and the HTTP call that submit it.
 *
 *   submissionAgain(tuning)       the submission of a tuning, with its names; a probe time limit that was too short is raised
 *   raisedLimit(tuning)           a sentence about that limit; null for a limit that is kept
 *   asCommand(submission)         `batchwright tune spec.json ...` for a POSIX shell
 *   asCurl(submission, origin, key)  the call, with the header of a key where one is needed
 */

import { seconds } from "./format.js";

const DEFAULT_TIMEOUT_SECONDS = 300;
const LONGEST_TIMEOUT_SECONDS = 86_400;

const OPTIONS = [
  ["objective", "--objective", "largest"],
  ["device", "--device", null],
  ["memory_limit_bytes", "--memory-limit", null],
  ["memory_margin", "--memory-margin", 0.03],
  ["granularity", "--granularity", 1],
  ["max_micro_batch_size", "--max-micro-batch-size", null],
  ["uniform", "--uniform", false],
  ["what_if", "--what-if", false],
  ["quick", "--quick", false],
  ["allow_batch_coupling", "--allow-batch-coupling", false],
  ["probe_timeout_seconds", "--probe-timeout", DEFAULT_TIMEOUT_SECONDS],
  ["baseline", "--baseline", null],
  ["name", "--name", null],
  ["project", "--project", null],
];

const HARDWARE_OPTIONS = [
  ["gpu", "--gpu", null],
  ["min_memory_bytes", "--min-memory", null],
]; // the command line runs on the host where it is typed: no pattern of products, no number of devices

/** The time limit of a probe: longer where one did not end in time, so that the tuning failed or its proof leaves larger sizes open. */
function timeoutOf({ request: { probe_timeout_seconds: given }, problem, recommendation }) {
  const isTooShort = problem?.code === "probe-timed-out" || recommendation?.evidence.proof.stopped_by === "timeout";
  return isTooShort ? Math.min(Math.max(DEFAULT_TIMEOUT_SECONDS, 2 * given), LONGEST_TIMEOUT_SECONDS) : given;
}

export function raisedLimit(tuning) {
  const [given, raised] = [tuning.request.probe_timeout_seconds, timeoutOf(tuning)];
  return raised === given ? null : `The probe time limit is raised from ${seconds(given)} to ${seconds(raised)}, because ${seconds(given)} was too short.`;
}

/** The submission that runs a tuning again; it probes again what a stored recommendation would answer. */
export function submissionAgain(tuning) {
  const { request, name, project, labels, priority, recommendation } = tuning;
  return {
    ...request,
    ...(name !== null && { name }), ...(project !== null && { project }), ...(Object.keys(labels).length > 0 && { labels }),
    ...(priority !== 0 && { priority }), ...(recommendation !== null && { fresh: true }),
    probe_timeout_seconds: timeoutOf(tuning),
  };
}

/** The command line for a submission whose spec is in `spec.json`; options at their defaults are left out. */
export function asCommand(request) {
  const hardware = request.hardware ?? {};
  const values = { ...request, baseline: sizeAndSteps(request.baseline), memory_limit_bytes: typed(request.memory_limit_bytes) };
  const labels = Object.entries(request.labels ?? {}).map(([key, value]) => `--label ${quoted(`${key}=${value}`)}`);
  const anySize = request.uniform_only === false ? ["--no-uniform-only"] : []; // of a command, whose default is true
  const options = [...given(values, OPTIONS), ...given({ ...hardware, min_memory_bytes: typed(hardware.min_memory_bytes) }, HARDWARE_OPTIONS), ...anySize, ...labels];
  return ["batchwright tune spec.json", `--effective-batch-size ${request.effective_batch_size}`, ...options].join(" \\\n  ");
}

/** A size as people type it: `128MiB`. */
function typed(value) {
  const unit = ["GiB", "MiB", "KiB"].find((_, index) => value && value % 1024 ** (3 - index) === 0);
  return unit ? `${value / 1024 ** { GiB: 3, MiB: 2, KiB: 1 }[unit]}${unit}` : value;
}

/** A baseline as the option takes it: `8`, or `8x16` with its steps. */
function sizeAndSteps(baseline) {
  return baseline && [baseline.micro_batch_size, baseline.accumulation_steps].filter(Boolean).join("x");
}

function given(values, options) {
  return options
    .filter(([field, , defaultValue]) => ![undefined, defaultValue, false].includes(values[field]))
    .map(([field, option]) => (values[field] === true ? option : `${option} ${quoted(String(values[field]))}`));
}

/** The call for a submission. */
export function asCurl(request, origin, key) {
  const header = key ? ' -H "Authorization: Bearer $BATCHWRIGHT_API_KEY"' : "";
  const body = `-H 'Content-Type: application/json' -d ${quoted(JSON.stringify(request))}`; // `--json` came with curl 7.82
  return `curl -sS ${quoted(`${origin}/v1/tunings`)}${header} \\\n  ${body}`;
}

/** A word as a POSIX shell reads it back. */
export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
}
