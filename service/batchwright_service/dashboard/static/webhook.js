/** The page of a webhook with its deliveries, for admins. */

import { del, get, post } from "./api.js";
import { alertBox, Button, confirmDialog, definitions, linkTo, mark, problemAlert, tag, time } from "./components.js";
import { announce, byId } from "./dom.js";
import { count, plural, shortId, words } from "./format.js";
import { usePolled } from "./hooks.js";
import { ApiList } from "./list.js";
import { html, render, useState } from "./preact-htm.js";
import { openSecretForm } from "./secret_form.js";
import { backlog, EVENTS, hostOf, secretOf } from "./webhook_words.js";

const REFRESH_SECONDS = 5;
const OVERLAPS = [[0, "At once"], [3600, "After an hour"], [86_400, "After a day"], [604_800, "After a week"]];
const DEFAULT_OVERLAP = 86_400;
const STATES = { pending: ["info", "clock"], delivered: ["ok", "check"], dead: ["bad", "cross"] };
const STATE_WORDS = { pending: "Pending", delivered: "Delivered", dead: "Given up" };

const root = byId("page");
const path = `/v1/webhooks/${encodeURIComponent(root.dataset.id)}`;

function WebhookPage() {
  const { data, problem, now } = usePolled(readWebhook, REFRESH_SECONDS);
  const [failed, setFailed] = useState(null);
  if (data === null) {
    return problem ? problemAlert(problem) : html`<p class="muted">Loading…</p>`;
  }
  const webhook = data.found;
  if (webhook === undefined) {
    return html`<div class="page-head"><h1>No such webhook</h1><p class="page-lead">It may have been deleted. <a href="/webhooks">All webhooks</a></p></div>`;
  }
  const title = webhook.name || hostOf(webhook.url);
  return html`
    <div class="page-head">
      <nav class="crumbs small" aria-label="Breadcrumbs"><a href="/webhooks">Webhooks</a></nav>
      <h1>${title}</h1>
      <div class="page-actions">
        <${Button} act=${() => sendTest(setFailed)}>Send a test message<//>
        <button type="button" class="button" onClick=${() => openRotation(title, now)}>Rotate the secret</button>
        <${Button} class="button-danger" act=${() => remove(title, webhook, setFailed)}>Delete<//>
      </div>
    </div>
    ${[problem, failed].filter(Boolean).map((each) => problemAlert(each))}
    <section class="card" id="facts" aria-label="Webhook">${definitions([
      ["Address", html`<code class="whole">${webhook.url.split(/(?<=[^/]\/)(?!\/)/).map((part) => [part, html`<wbr />`])}</code>`],
      ["Events", webhook.events.length > 0 ? html`<span class="tags">${webhook.events.map(tag)}</span>` : "all"],
      ["Project", webhook.project ?? "all"],
      ["Not delivered", backlog(webhook, data.isUsed ? mark("ok", "check", "none") : "nothing sent yet")],
      ["Created", time(webhook.created_at)],
      ["The replaced secret signs too until", isFuture(webhook.previous_secret_until) && time(webhook.previous_secret_until, { relative: false })],
    ])}</section>
    <section aria-labelledby="deliveries-title"><h2 id="deliveries-title">Deliveries</h2>
      <div class="list"><${ApiList} ...${DELIVERIES} empty=${emptyOf(webhook)} /></div></section>`;
}

async function readWebhook(signal) {
  const { items } = await get("/v1/webhooks", { signal });
  const found = items.find(({ id }) => id === root.dataset.id);
  const isUsed = found !== undefined && (await get(`${path}/deliveries`, { query: { limit: 1 }, signal })).items.length > 0;
  return { found, isUsed };
}

/** Which messages will appear in the list while it is empty. */
function emptyOf({ events }) {
  const when = events.length > 0 ? events.map((event) => EVENTS[event]).join(", or ") : "when a tuning or a job ends";
  return { title: "No messages yet", text: `A message appears here ${when}. Delivered ones are kept for seven days.` };
}

function isFuture(iso) {
  return iso !== null && Date.parse(iso) > Date.now();
}

// --- acts -----------------------------------------------------------------------------------------------------------

async function sendTest(setFailed) {
  await post(`${path}/test`).then(() => setFailed(null), setFailed);
  announce("A test message is on its way");
}

async function remove(title, { pending }, setFailed) {
  const text = `Its messages are deleted too${pending > 0 ? `, ${plural(pending, "message")} that ${pending === 1 ? "is" : "are"} not delivered yet included` : ""}. This cannot be undone.`;
  if (await confirmDialog({ title: `Delete “${title}”?`, text, action: "Delete" })) {
    await del(path).then(() => location.assign("/webhooks"), setFailed);
  }
}

function openRotation(title, onEnd) {
  openSecretForm({
    name: "rotation",
    title: `A new secret for “${title}”`,
    action: "Rotate the secret",
    fields: () => html`<div class="field"><label for="overlap">The old secret ends</label>
      <select id="overlap" name="overlap" class="input" aria-describedby="overlap-hint">${OVERLAPS.map(([seconds, text]) => html`<option value=${seconds} selected=${seconds === DEFAULT_OVERLAP}>${text}</option>`)}</select>
      <p id="overlap-hint" class="field-hint">Until then both secrets sign each message, so the receiver has time to switch.</p></div>`,
    send: (fields) => post(`${path}/rotate`, { overlap_seconds: Number(fields.get("overlap")) }),
    shown: secretOf,
    onEnd,
  });
}

/** Sends messages again one by one; those that are refused stay chosen. */
async function resend(rows) {
  const sent = new Map();
  let problem = null;
  for (const row of rows) {
    try {
      sent.set(row.id, await post(`${path}/deliveries/${row.id}/resend`));
    } catch (caught) {
      problem = caught;
    }
  }
  const report = html`<div class="stack">${sent.size > 0 && alertBox("ok", `${plural(sent.size, "message")} being sent again`)}${problem && problemAlert(problem)}</div>`;
  return { change: (row) => sent.get(row.id) ?? row, report, done: rows.filter(({ id }) => sent.has(id)) };
}

// --- deliveries -----------------------------------------------------------------------------------------------------

const DELIVERIES = {
  path: `${path}/deliveries`,
  caption: "Deliveries",
  noun: "message",
  ended: ({ state }) => state !== "pending",
  refreshSeconds: REFRESH_SECONDS,
  filters: [{ name: "state", label: "State", quick: true, options: Object.entries(STATE_WORDS) }],
  columns: [
    { title: "Message", class: "nowrap", cell: (row) => html`<code title=${row.id}>${shortId(row.id)}</code>` },
    { title: "State", class: "nowrap", cell: ({ state }) => mark(...STATES[state], STATE_WORDS[state]) },
    { title: "Event", class: "nowrap", cell: (row) => row.event },
    { title: "Work", class: "nowrap", cell: ({ work_id: id }) => id && linkTo(id.startsWith("job_") ? "jobs" : "tunings", id) },
    { title: "Attempts", class: "number", cell: (row) => count(row.attempts) },
    { title: "Last answer", class: "wide", cell: lastAnswer },
    { title: "Next attempt", class: "nowrap", cell: (row) => row.next_attempt_at && time(row.next_attempt_at) },
    { title: "Created", class: "nowrap", cell: (row) => time(row.created_at) },
  ],
  acts: [{ text: "Send again", applies: ({ state }) => state !== "pending", run: resend }],
};

function lastAnswer({ last_status: status, last_error: error }) {
  return [status !== null && `Status ${status}`, error && words(error.slice(0, 1)) + error.slice(1)].filter(Boolean).join(". ");
}

render(html`<${WebhookPage} />`, root);
