/**
 * The occupancy of a device in the last day or week, as a strip with a bar for each bucket.
 *
 *   strip(occupancyOf(row.slot, occupancy))     of a device of `GET /v1/occupancy`; of one that held no work the strip is empty
 *   busyWords(...), secondsHeld(...)            the same in words and in durations
 */

import { percent, seconds, timeText } from "./format.js";
import { html } from "./preact-htm.js";

const HEIGHT = 24;
const DAY_SECONDS = 86_400;

/** The shares of one device, with the times of the buckets. */
export function occupancyOf(slot, { start, end, bucket_seconds: length, devices }) {
  const found = devices.find((device) => device.slot === slot) ?? { tunings: [], jobs: [], busy: 0 };
  return { ...found, start: Date.parse(start), end: Date.parse(end), milliseconds: 1000 * length };
}

/** Tunings below, jobs above them; the words have what the bars show. */
export function strip(occupancy) {
  const { tunings, jobs, busy, start, end, milliseconds } = occupancy;
  const buckets = Math.ceil((end - start) / milliseconds);
  const text = busyWords(occupancy);
  const rect = (at, share, above, kind) => share > 0 && html`<rect class=${kind} x=${at} width="0.9" y=${HEIGHT - heightOf(above + share)} height=${heightOf(above + share) - heightOf(above)} />`;
  return html`<div class="strip"><svg viewBox="0 0 ${buckets} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${text}><title>${text}</title>
    <rect class="strip-base" x="0" width=${buckets} y=${HEIGHT - 0.5} height="0.5" />
    ${tunings.map((share, at) => [rect(at, share, 0, "strip-tunings"), rect(at, jobs[at], share, "strip-jobs")])}
  </svg><span class="small muted">${percent(busy)} busy</span></div>`;
}

/** The share of the whole time, and when it was last. */
export function busyWords({ tunings, jobs, busy, start, end, milliseconds }) {
  const isWeek = end - start > 2000 * DAY_SECONDS;
  const period = isWeek ? "last 7 days" : "last 24 hours";
  const last = tunings.findLastIndex((share, at) => share + jobs[at] > 0);
  const when = timeText(new Date(start + last * milliseconds).toISOString());
  return last < 0 ? `Held no work in the ${period}` : `Busy ${percent(busy)} of the ${period}, last in the ${isWeek ? "two hours" : "half hour"} from ${when}`;
}

/** For how long tunings, and jobs, held the device. */
export function secondsHeld({ tunings, jobs, start, end, milliseconds }) {
  const held = (shares) => shares.reduce((sum, share, at) => sum + share * Math.min(milliseconds, end - start - at * milliseconds), 0) / 1000;
  return { tunings: seconds(Math.round(held(tunings))), jobs: seconds(Math.round(held(jobs))) };
}

/** A share that is not nothing can be seen. */
function heightOf(share) {
  return share === 0 ? 0 : Math.max(1.5, HEIGHT * Math.min(share, 1));
}
