/**
 * The occupancy of a device in the last day, as a strip with a bar for each half hour.
 *
 *   strip(occupancyOf(row.slot, occupancy))     of a device of `GET /v1/occupancy`; of one that held no work the strip is empty
 */

import { percent, timeText } from "./format.js";
import { html } from "./preact-htm.js";

const HEIGHT = 24;

/** The shares of one device, with the times of the buckets. */
export function occupancyOf(slot, { start, bucket_seconds: seconds, devices }) {
  const found = devices.find((device) => device.slot === slot) ?? { tunings: [], jobs: [], busy: 0 };
  return { ...found, start: Date.parse(start), milliseconds: 1000 * seconds };
}

/** Tunings below, jobs above them; the words have what the bars show. */
export function strip({ tunings, jobs, busy, start, milliseconds }) {
  const shares = tunings.map((share, at) => share + jobs[at]);
  const last = shares.findLastIndex((share) => share > 0);
  const text = last < 0 ? "Held no work in the last 24 hours" : `Busy ${percent(busy)} of the last 24 hours, last in the half hour from ${timeText(new Date(start + last * milliseconds).toISOString())}`;
  const rect = (at, share, above, kind) => share > 0 && html`<rect class=${kind} x=${at} width="0.9" y=${HEIGHT - heightOf(above + share)} height=${heightOf(above + share) - heightOf(above)} />`;
  return html`<div class="strip"><svg viewBox="0 0 48 ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${text}><title>${text}</title>
    <rect class="strip-base" x="0" width="48" y=${HEIGHT - 0.5} height="0.5" />
    ${tunings.map((share, at) => [rect(at, share, 0, "strip-tunings"), rect(at, jobs[at], share, "strip-jobs")])}
  </svg><span class="small muted">${percent(busy)} busy</span></div>`;
}

/** A share that is not nothing can be seen. */
function heightOf(share) {
  return share === 0 ? 0 : Math.max(1.5, HEIGHT * Math.min(share, 1));
}
