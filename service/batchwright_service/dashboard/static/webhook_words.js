/** What the pages of webhooks share: the name of a receiver, what is not delivered, and how a secret is shown. */

import { mark } from "./components.js";
import { count } from "./format.js";
import { html } from "./preact-htm.js";

/** When messages of each event are sent. */
export const EVENTS = {
  "tuning.succeeded": "when a tuning ends with a plan",
  "tuning.infeasible": "when a tuning finds that nothing fits",
  "tuning.failed": "when a tuning fails",
  "tuning.cancelled": "when a tuning is cancelled",
  "job.succeeded": "when a job finishes its training",
  "job.failed": "when a job fails",
  "job.cancelled": "when a job is cancelled",
};

/** The receiver's host, or the whole address where it is none. */
export function hostOf(url) {
  return URL.canParse(url) ? new URL(url).host : url;
}

/** What waits for an attempt, and what had its last one; `none` where there is nothing of both. */
export function backlog({ pending, dead }, none = html`<span class="muted">none</span>`) {
  if (pending + dead === 0) {
    return none;
  }
  return html`<span class="tags">${dead > 0 && mark("bad", "cross", `${count(dead)} given up`)}${pending > 0 && mark("info", "clock", `${count(pending)} pending`)}</span>`;
}

/** How a dialog shows the secret of a webhook. */
export function secretOf(webhook) {
  return {
    title: `The secret of “${webhook.name || hostOf(webhook.url)}”`,
    warning: "It is not shown again. The receiver needs it to check that messages come from this service.",
    label: "Secret",
    secret: webhook.secret,
    note: "Messages are signed as in Standard Webhooks.",
  };
}
