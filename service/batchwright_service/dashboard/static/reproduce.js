/**
 * The command and the HTTP call that submit the same request again.
 *
 *   asCommand(request)            `batchwright tune spec.json ...` for a POSIX shell
 *   asCurl(request, origin, key)  the call, with the header of a key where one is needed
 */

const OPTIONS = [
  ["objective", "--objective", "largest"],
  ["device", "--device", null],
  ["memory_limit_bytes", "--memory-limit", null],
  ["memory_margin", "--memory-margin", 0.03],
  ["granularity", "--granularity", 1],
  ["max_micro_batch_size", "--max-micro-batch-size", null],
  ["uniform", "--uniform", false],
  ["what_if", "--what-if", false],
  ["allow_batch_coupling", "--allow-batch-coupling", false],
  ["probe_timeout_seconds", "--probe-timeout", 300],
  ["baseline", "--baseline", null],
];

const HARDWARE_OPTIONS = [
  ["gpu", "--gpu", null],
  ["min_memory_bytes", "--min-memory", null],
]; // the command line runs on the host where it is typed: no pattern of products, no number of devices

/** The command line for a tuning request whose spec is in `spec.json`; options at their defaults are left out. */
export function asCommand(request) {
  const options = [...given({ ...request, baseline: sizeAndSteps(request.baseline) }, OPTIONS), ...given(request.hardware ?? {}, HARDWARE_OPTIONS)];
  return ["batchwright tune spec.json", `--effective-batch-size ${request.effective_batch_size}`, ...options].join(" \\\n  ");
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

/** The call for a tuning request. */
export function asCurl(request, origin, key) {
  const header = key ? ' -H "Authorization: Bearer $BATCHWRIGHT_API_KEY"' : "";
  const body = `-H 'Content-Type: application/json' -d ${quoted(JSON.stringify(request))}`; // `--json` came with curl 7.82
  return `curl -sS ${quoted(`${origin}/v1/tunings`)}${header} \\\n  ${body}`;
}

/** A word as a POSIX shell reads it back. */
export function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;
}
