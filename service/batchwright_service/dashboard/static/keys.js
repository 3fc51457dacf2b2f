/** The page of API keys, for admins. */

import { del, get, keyId, post } from "./api.js";
import { Button, codeBlock, confirmDialog, emptyState, mark, problemAlert, tag, time } from "./components.js";
import { Table } from "./data_table.js";
import { announce, byId } from "./dom.js";
import { timeText } from "./format.js";
import { usePolled } from "./hooks.js";
import { html, render, useRef, useState } from "./preact-htm.js";
import { openSecretForm, Refusal } from "./secret_form.js";

const REFRESH_SECONDS = 15;
const SCOPES = {
  "tunings:read": "Read tunings, their evidence, recommendations, devices and GPUs",
  "tunings:write": "Submit tunings and estimates; cancel its own tunings",
  "jobs:read": "Read jobs, their logs and checkpoints",
  "jobs:run": "Configure and run jobs; cancel its own jobs",
  admin: "All of the above, what others submitted, and these keys",
};
const EXPIRIES = [[30, "30 days"], [90, "90 days"], [365, "One year"], ["", "Never"]];
const DEFAULT_DAYS = 90;

function KeysPage() {
  const { data, problem, now } = usePolled((signal) => get("/v1/keys", { signal }), REFRESH_SECONDS);
  const [failed, setFailed] = useState(null);
  const keys = data?.items ?? [];
  const revoke = async (key) => {
    const text = `Requests with “${key.name}” (${key.prefix}…) are refused within five seconds. Its submitted work continues. This cannot be undone.`;
    if (await confirmDialog({ title: `Revoke “${key.name}”?`, text, action: "Revoke" })) {
      await del(`/v1/keys/${key.id}`).then(() => setFailed(null), setFailed);
      announce(`${key.name} is revoked`);
      now();
    }
  };
  const columns = useRef(columnsOf(revoke)).current;
  const order = (key) => (isValid(key) ? 0 : 1);
  const sorted = keys.toSorted((one, other) => order(one) - order(other) || other.created_at.localeCompare(one.created_at));
  return html`
    <div class="page-head">
      <h1>API keys</h1>
      ${keys.length > 0 && html`<div class="page-actions"><button class="button button-primary" type="button" onClick=${() => openForm(now)}>New key</button></div>`}
      <p class="page-lead">A key identifies a caller and its scopes. The key is shown once, when it is created; the service stores only its digest.</p>
    </div>
    ${[problem, failed].filter(Boolean).map((each) => problemAlert(each))}
    ${data === null && !problem && html`<p class="muted">Loading…</p>`}
    ${keys.length > 0 ? html`<div class="list-body"><${Table} caption="API keys" columns=${columns} rows=${sorted} /></div>` : data && emptyState({
      title: "No keys yet: every caller on this machine has full access",
      text: "After the first key is created, every caller needs one. Create it on the service's host with the scope admin, then sign in here with it to create others:",
      action: codeBlock("batchwright admin keys create operator --scope admin", { label: "The first key" }),
    })}`;
}

function columnsOf(revoke) {
  const button = (key) => html`<${Button} class="button-small button-danger" aria-label="Revoke ${key.name}" act=${() => revoke(key)}>Revoke<//>`;
  return [
    { title: "Name", cell: (key) => html`${key.name}${key.id === keyId() && html` ${tag("yours")}`}` },
    { title: "State", class: "nowrap", cell: state },
    { title: "Prefix", class: "nowrap", cell: (key) => html`<code class="nowrap">${key.prefix}</code>` },
    { title: "Scopes", class: "wide", cell: (key) => html`<div class="tags">${key.scopes.map(tag)}</div>` },
    { title: "Created", class: "nowrap", cell: (key) => time(key.created_at) },
    { title: "Last used", class: "nowrap", cell: (key) => (key.last_used_at === null ? "never" : time(key.last_used_at)) },
    { title: "Expires", class: "nowrap", cell: (key) => (key.expires_at === null ? "never" : time(key.expires_at)) },
    { title: "Action", cell: (key) => isValid(key) && key.id !== keyId() && button(key) },
  ];
}

function isExpired(key) {
  return key.expires_at !== null && Date.parse(key.expires_at) <= Date.now();
}

function isValid(key) {
  return key.revoked_at === null && !isExpired(key);
}

function state(key) {
  if (key.revoked_at !== null) {
    return html`${mark("neutral", "ban", "Revoked")} ${time(key.revoked_at)}`;
  }
  return isExpired(key) ? mark("warn", "clock", "Expired") : mark("ok", "check", "Valid");
}

// --- creating ---------------------------------------------------------------------------------------------------------

function openForm(onEnd) {
  openSecretForm({ name: "new-key", title: "New API key", action: "Create the key", fields: formFields, send: create, shown: secretOf, onEnd });
}

async function create(fields) {
  const scopes = fields.getAll("scope");
  if (scopes.length === 0) {
    throw new Refusal("Choose at least one scope");
  }
  const days = fields.get("days");
  return post("/v1/keys", { name: fields.get("name").trim(), scopes, expires_in_days: days === "" ? null : Number(days) });
}

/** How the dialog shows the new key. */
function secretOf(made) {
  return {
    title: `The key for “${made.name}”`,
    warning: "It is not shown again. The service stores only its digest.",
    label: "API key",
    secret: made.key,
    note: made.expires_at === null ? "It does not expire." : `It expires ${timeText(made.expires_at)}.`,
  };
}

function formFields() {
  const scope = ([name, meaning]) => html`<label class="choice"><input type="checkbox" name="scope" value=${name} defaultChecked=${name === "tunings:read"} /><span><code>${name}</code><span class="muted small"> ${meaning}</span></span></label>`;
  return html`
    <div class="field"><label for="key-name">Name</label>
      <input id="key-name" name="name" class="input" required maxlength="100" autocomplete="off" autofocus aria-describedby="name-hint" />
      <p id="name-hint" class="field-hint">A name that says who or what uses the key.</p></div>
    <fieldset class="scopes"><legend>Scopes</legend>${Object.entries(SCOPES).map(scope)}</fieldset>
    <div class="field"><label for="key-days">Expires after</label>
      <select id="key-days" name="days" class="input">${EXPIRIES.map(([days, text]) => html`<option value=${days} selected=${days === DEFAULT_DAYS}>${text}</option>`)}</select></div>`;
}

render(html`<${KeysPage} />`, byId("page"));
