/** What the pages of webhooks share: the name of a receiver, what is not delivered, and how a secret is shown. */

import { mark } from "./components.js";
import { count } from "./format.js";
import { html } from "./preact-htm.js";

/** The receiver's host, or the whole address where it is none. */
export function hostOf(url) {
  return URL.canParse(url) ? new URL(url).host : url;
}

/** What waits for an attempt, and what had its last one. */
export function backlog({ pending, dead }) {
  if (pending + dead === 0) {
    return mark("ok", "check", "none");
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
