/** The page of API keys, for admins. */

import { del, get, keyId, post } from "./api.js";
import { announce, byId, h, replace } from "./dom.js";
import { time, timeText } from "./format.js";
import { poll } from "./live.js";
import { alertBox, busy, codeBlock, confirmDialog, emptyState, mark, problemAlert, showProblem, tag } from "./parts.js";
import { makeTable } from "./table.js";

const REFRESH_SECONDS = 15;
const SCOPES = {
  "tunings:read": "Read tunings, their evidence, recommendations, devices and GPUs",
  "tunings:write": "Submit tunings and estimates, and cancel its own tunings",
  "jobs:read": "Read jobs, their logs and checkpoints",
  "jobs:run": "Configure and run jobs, and cancel its own",
  admin: "All of the above, what others submitted, and these keys",
};
const EXPIRIES = [[30, "30 days"], [90, "90 days"], [365, "One year"], ["", "Never"]];
const DEFAULT_DAYS = 90;

const table = makeTable({
  caption: "API keys",
  columns: [
    { title: "Name", cell: (key) => [key.name, key.id === keyId() && [" ", tag("yours")]] },
    { title: "State", class: "nowrap", cell: state },
    { title: "Prefix", class: "nowrap", cell: (key) => h("code", {}, key.prefix) },
    { title: "Scopes", class: "wide", cell: (key) => h("div", { class: "tags" }, key.scopes.map(tag)) },
    { title: "Created", class: "nowrap", cell: (key) => time(key.created_at) },
    { title: "Last used", class: "nowrap", cell: (key) => (key.last_used_at === null ? "never" : time(key.last_used_at)) },
    { title: "Expires", class: "nowrap", cell: (key) => (key.expires_at === null ? "never" : time(key.expires_at)) },
    { title: "Action", cell: revokeButton },
  ],
});

function isExpired(key) {
  return key.expires_at !== null && Date.parse(key.expires_at) <= Date.now();
}

function isValid(key) {
  return key.revoked_at === null && !isExpired(key);
}

function state(key) {
  if (key.revoked_at !== null) {
    return [mark("neutral", "⊘", "Revoked"), " ", time(key.revoked_at)];
  }
  return isExpired(key) ? mark("warn", "◷", "Expired") : mark("ok", "✓", "Valid");
}

function revokeButton(key) {
  const label = `Revoke ${key.name}`;
  const act = (event) => revoke(key, event.currentTarget);
  const attributes = { type: "button", class: "button button-small button-danger", "aria-label": label, on: { click: act } };
  return isValid(key) && key.id !== keyId() && h("button", attributes, "Revoke");
}

// --- revoking -------------------------------------------------------------------------------------------------------

async function revoke(key, button) {
  const text = h("p", {}, `Requests with “${key.name}” (${key.prefix}…) are refused within five seconds. Its submitted work continues. This cannot be undone.`);
  if (await confirmDialog({ title: `Revoke “${key.name}”?`, text, action: "Revoke" })) {
    try {
      await busy(button, () => del(`/v1/keys/${key.id}`));
      announce(`${key.name} is revoked`);
      replace(byId("key-problem"));
    } catch (problem) {
      replace(byId("key-problem"), problemAlert(problem));
    }
    polling.now();
  }
}

// --- creating ---------------------------------------------------------------------------------------------------------

function openForm() {
  const place = h("div", { class: "stack" });
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "new-key-title", on: { close: () => closed(dialog), cancel: (event) => isLocked(dialog) && event.preventDefault() } }, place);
  replace(place, newKeyForm(dialog, place));
  document.body.append(dialog);
  dialog.showModal();
}

function closed(dialog) {
  dialog.remove();
  polling.now();
}

/** Locks the dialog while a key is created: Escape must not close it, because the key is shown only once. */
function lock(dialog, locked) {
  dialog.setAttribute("closedby", locked ? "none" : "closerequest");
  dialog.querySelectorAll("button[type=button]").forEach((button) => (button.disabled = locked));
}

function isLocked(dialog) {
  return dialog.getAttribute("closedby") === "none";
}

function newKeyForm(dialog, place) {
  const problem = h("div");
  const send = h("button", { class: "button button-primary" }, "Create the key");
  const form = h(
    "form",
    { class: "form" },
    h("h2", { id: "new-key-title" }, "New API key"),
    problem,
    nameField(),
    scopeFields(),
    expiryField(),
    h("div", { class: "dialog-buttons" }, h("button", { class: "button", type: "button", on: { click: () => dialog.close() } }, "Cancel"), send),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const scopes = new FormData(form).getAll("scope");
    if (scopes.length === 0) {
      replace(problem, alertBox("bad", "Choose at least one scope"));
      return;
    }
    lock(dialog, true);
    try {
      const made = await busy(send, () => post("/v1/keys", submission(form, scopes)));
      replace(place, newKey(made, dialog));
      byId("new-key-title").focus(); // the focused element is gone
    } catch (error) {
      lock(dialog, false);
      replace(problem, problemAlert(error));
    }
  });
  return form;
}

function submission(form, scopes) {
  const days = form.elements.days.value;
  return { name: form.elements.name.value.trim(), scopes, expires_in_days: days === "" ? null : Number(days) };
}

function nameField() {
  const hint = h("p", { id: "name-hint", class: "field-hint" }, "A name that says who or what uses the key.");
  const input = h("input", { id: "key-name", name: "name", class: "input", required: true, maxlength: 100, autocomplete: "off", autofocus: true, "aria-describedby": "name-hint" });
  return h("div", { class: "field" }, h("label", { for: "key-name" }, "Name"), input, hint);
}

function scopeFields() {
  const choices = Object.entries(SCOPES).map(([scope, meaning]) => {
    const checked = scope === "tunings:read";
    return h("label", { class: "choice" }, h("input", { type: "checkbox", name: "scope", value: scope, checked }), h("span", {}, h("code", {}, scope), h("span", { class: "muted small" }, ` ${meaning}`)));
  });
  return h("fieldset", { class: "scopes" }, h("legend", {}, "Scopes"), choices);
}

function expiryField() {
  const options = EXPIRIES.map(([days, text]) => h("option", { value: days, selected: days === DEFAULT_DAYS }, text));
  return h("div", { class: "field" }, h("label", { for: "key-days" }, "Expires after"), h("select", { id: "key-days", name: "days", class: "input" }, options));
}

/** The text of the new key, which cannot be shown again. */
function newKey(made, dialog) {
  announce("The key is created");
  const until = made.expires_at === null ? "It does not expire." : `It expires ${timeText(made.expires_at)}.`;
  return [
    h("h2", { id: "new-key-title", tabindex: -1 }, `The key for “${made.name}”`),
    alertBox("warn", "Copy it now", "It is not shown again. The service stores only its digest."),
    codeBlock(made.key, { label: "API key" }),
    h("p", { class: "muted" }, until),
    h("div", { class: "dialog-buttons" }, h("button", { type: "button", class: "button button-primary", on: { click: () => dialog.close() } }, "Done")),
  ];
}

// --- the page -------------------------------------------------------------------------------------------------------

function show(keys) {
  const order = (key) => (isValid(key) ? 0 : 1);
  table.update(keys.toSorted((one, other) => order(one) - order(other) || other.created_at.localeCompare(one.created_at)));
  const none = () => emptyState({
    title: "No keys yet: every caller on this machine has full access",
    text: "After the first key is created, every caller needs one. Create it on the service's host with the scope admin, then sign in here with it to create others:",
    action: codeBlock("batchwright keys create operator --scope admin", { label: "The first key" }),
  });
  byId("new-key").hidden = keys.length === 0; // the first is created on the service's host
  const wanted = keys.length > 0 ? table.element : none();
  if (byId("key-list").firstChild !== table.element || keys.length === 0) {
    replace(byId("key-list"), wanted);
  }
}

replace(byId("keys"), h("div", { id: "key-problem" }), h("div", { id: "key-list" }, h("p", { class: "muted" }, "Loading…")));
byId("new-key").addEventListener("click", openForm);
const polling = poll(async (signal) => show((await get("/v1/keys", { signal })).items), REFRESH_SECONDS, {
  onProblem: (problem) => showProblem(byId("key-list"), problemAlert(problem)),
});
