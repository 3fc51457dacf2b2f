/**
 * Values as people read them. Every function takes null or undefined too and gives "–" (an en dash).
 *
 *   bytes(1610612736)     "1.50 GiB"          bytesExactly(n)  "1,610,612,736 bytes"
 *   seconds(93.2)         "1 min 33 s"        count(12345)     "12,345"
 *   number(2.30258, 3)    "2.303"             percent(0.9312)  "93.1 %"
 *   timeText(iso)         "21 Nov 2026, 21:14:03"              ago(iso)  "3 min ago"
 *   shortId("tun_0192f3a1b2c3700089abcdef01234567")  "tun_…01234567"
 *   plural(2, "probe")    "2 probes"          words("CANCELLING")  "Cancelling"
 */

const NONE = "–";
const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DATE = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const DAY = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium" });
const MONTH = 30 * 86_400; // seconds
const DATE_AND_ZONE = new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long" });
const COUNT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A size with three significant digits and a binary unit. */
export function bytes(value) {
  if (!known(value)) {
    return NONE;
  }
  const power = Math.min(Math.floor(Math.log2(Math.max(Math.abs(value), 1)) / 10), UNITS.length - 1);
  return power === 0 ? `${value} bytes` : `${number(value / 1024 ** power, 3)} ${UNITS[power]}`;
}

/** A size to the byte. */
export function bytesExactly(value) {
  return known(value) ? `${count(value)} bytes` : NONE;
}

/** A duration in at most two units. */
export function seconds(value) {
  if (!known(value)) {
    return NONE;
  }
  if (value === 0) {
    return "0 s";
  }
  if (value < 60) {
    return value < 1 ? `${Math.round(value * 1000)} ms` : `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  }
  const whole = Math.round(value);
  return twoUnits(whole, [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]]);
}

/** A whole number with separators. */
export function count(value) {
  return known(value) ? COUNT.format(value) : NONE;
}

/** A number with so many significant digits; very small and very large ones with an exponent. */
export function number(value, digits = 4) {
  if (!known(value)) {
    return NONE;
  }
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) {
    return value.toExponential(Math.max(digits - 2, 0));
  }
  return value.toLocaleString("en-US", { minimumSignificantDigits: digits, maximumSignificantDigits: digits });
}

/** A share of one. */
export function percent(value) {
  return known(value) ? `${(100 * value).toFixed(1)} %` : NONE;
}

/** A number of things: `plural(1, "probe")`, `plural(2, "query", "queries")`. */
export function plural(value, one, many = `${one}s`) {
  return known(value) ? `${count(value)} ${value === 1 ? one : many}` : NONE;
}

/** The name of work or of a recommendation, or what it is for: "gpt2, 512 samples". */
export function nameOrPurpose({ name, model, effective_batch_size: samples }) {
  return name ?? `${model}, ${plural(samples, "sample")}`;
}

/** A constant of the API ("CANCELLING", "INVALID_SIZE") in words ("Cancelling", "Invalid size"). */
export function words(constant) {
  return constant.charAt(0).toUpperCase() + constant.slice(1).toLowerCase().replaceAll("_", " ");
}

/** The sentences of a text. */
export function sentences(text) {
  return text.split(/(?<=[.?!])\s+(?=[A-Z])/u);
}

/** The end of an identifier, where they differ; the whole one belongs into `title` or a page's heading. */
export function shortId(identifier) {
  return known(identifier) ? identifier.replace(/^([a-z]{3}_)[0-9a-f]{24}([0-9a-f]{8})$/, "$1…$2") : NONE;
}

/** A point in time in the reader's zone. */
export function timeText(iso) {
  return known(iso) ? DATE.format(new Date(iso)) : NONE;
}

/** The date with the weekday, and the time with its zone. */
export function fullTime(iso) {
  return DATE_AND_ZONE.format(new Date(iso));
}

/** The time since then, or until then; the date of what was over a month ago. */
export function ago(iso, now = Date.now()) {
  if (!known(iso)) {
    return NONE;
  }
  const passed = (now - Date.parse(iso)) / 1000;
  if (Math.abs(passed) < 5) {
    return "just now";
  }
  return passed > MONTH ? DAY.format(new Date(iso)) : passed > 0 ? `${coarse(passed)} ago` : `in ${coarse(-passed)}`;
}

function known(value) {
  return value !== null && value !== undefined && !Number.isNaN(value);
}

function twoUnits(whole, units) {
  const first = units.findIndex(([size]) => whole >= size);
  const [size, name] = units[first];
  const rest = units[first + 1] === undefined ? 0 : Math.floor((whole % size) / units[first + 1][0]);
  const major = `${count(Math.floor(whole / size))} ${name}`;
  return rest === 0 ? major : `${major} ${rest} ${units[first + 1][1]}`;
}

function coarse(passed) {
  const units = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, name] = units.find(([least]) => passed >= least) ?? [1, "s"];
  return `${Math.floor(passed / size)} ${name}`;
}
