/** The page of webhooks, for admins. */

import { get, post } from "./api.js";
import { alertBox, both, emptyState, problemAlert, tag, time } from "./components.js";
import { Table } from "./data_table.js";
import { byId } from "./dom.js";
import { usePolled } from "./hooks.js";
import { html, render } from "./preact-htm.js";
import { openSecretForm } from "./secret_form.js";
import { backlog, EVENTS, hostOf, secretOf } from "./webhook_words.js";

const REFRESH_SECONDS = 15;

function WebhooksPage() {
  const { data, problem, now } = usePolled((signal) => get("/v1/webhooks", { signal }), REFRESH_SECONDS);
  const isAllowed = data !== null && data.hosts.length > 0;
  return html`
    <div class="page-head">
      <h1>Webhooks</h1>
      ${isAllowed && html`<div class="page-actions"><button class="button button-primary" type="button" onClick=${() => openForm(now, data.hosts)}>New webhook</button></div>`}
      <p class="page-lead">Receivers are told by a signed message when a tuning or job ends.</p>
    </div>
    ${problem && problemAlert(problem)}
    ${data === null && !problem && html`<p class="muted">Loading…</p>`}
    ${data && !isAllowed && alertBox("warn", "Webhooks are off", html`<p>Set <code>BATCHWRIGHT_WEBHOOK_HOSTS</code> on the server to allow receivers.</p>`)}
    ${data && (data.items.length > 0 ? html`<div class="list-body"><${Table} caption="Webhooks" columns=${COLUMNS} rows=${data.items} /></div>` : isAllowed && emptyState({
      title: "No webhooks yet",
      text: "A webhook tells a chat, a pager or a pipeline when a tuning or a job has ended.",
    }))}`;
}

const COLUMNS = [
  { title: "Webhook", class: "model", cell: (row) => both(html`<a href="/webhooks/${encodeURIComponent(row.id)}" title=${row.id}>${row.name || hostOf(row.url)}</a>`, row.url) },
  { title: "Events", class: "wide", cell: (row) => html`<div class="tags">${row.events.length > 0 ? row.events.map(tag) : tag("all")}</div>` },
  { title: "Project", class: "nowrap", cell: (row) => row.project ?? "all" },
  { title: "Not delivered", class: "nowrap", cell: (row) => backlog(row) },
  { title: "Created", class: "nowrap", cell: (row) => time(row.created_at) },
];

function openForm(onEnd, hosts) {
  const send = (fields) => post("/v1/webhooks", {
    url: fields.get("url").trim(), name: fields.get("name").trim(), events: fields.getAll("event"), project: fields.get("project").trim() || null,
  });
  openSecretForm({ name: "new-webhook", title: "New webhook", action: "Create the webhook", fields: () => formFields(hosts), send, shown: secretOf, onEnd });
}

function formFields(hosts) {
  const event = ([name, meaning]) => html`<label class="choice"><input type="checkbox" name="event" value=${name} /><span><code>${name}</code><span class="muted small"> ${meaning}</span></span></label>`;
  return html`
    <div class="field"><label for="webhook-url">Address</label>
      <input id="webhook-url" name="url" type="url" class="input" required maxlength="2000" pattern="https?://.+" placeholder="https://hooks.example.org/tunings" autocomplete="off" autofocus aria-describedby="url-hint" />
      <p id="url-hint" class="field-hint">Messages are sent there by POST. The operator allows ${hosts.join(", ")}.</p></div>
    <div class="field"><label for="webhook-name">Name</label><input id="webhook-name" name="name" class="input" maxlength="100" autocomplete="off" /></div>
    <fieldset class="scopes"><legend>Events (none chosen: all)</legend>${Object.entries(EVENTS).map(event)}</fieldset>
    <div class="field"><label for="webhook-project">Project</label>
      <input id="webhook-project" name="project" class="input" maxlength="63" autocomplete="off" aria-describedby="project-hint" />
      <p id="project-hint" class="field-hint">Only work of this project is reported. Without a project, all work is.</p></div>`;
}

render(html`<${WebhooksPage} />`, byId("page"));
