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
];

/** The command line for a tuning request whose spec is in `spec.json`; options at their defaults are left out. */
export function asCommand(request) {
  const parts = ["batchwright tune spec.json", `--effective-batch-size ${request.effective_batch_size}`];
  for (const [field, option, defaultValue] of OPTIONS) {
    if (request[field] === true) {
      parts.push(option);
    } else if (request[field] !== defaultValue && request[field] !== false) {
      parts.push(`${option} ${quoted(String(request[field]))}`);
    }
  }
  return parts.join(" \\\n  ");
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
