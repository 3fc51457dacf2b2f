/**
 * The dialog that starts a job from a recommendation: the settings, a preview of the command, and the start.
 *
 *   await openTrainDialog(found)      `found` as /v1/recommendations/{id} gives it
 */

import { get, post } from "./api.js";
import { commandOf, takesUpdates } from "./command.js";
import { codeBlock, definitions, problemAlert } from "./components.js";
import { announce, busy, h, replace } from "./dom.js";
import { html } from "./preact-htm.js";
import { quoted } from "./reproduce.js";
import { makeForm } from "./schema_form.js";

const SCHEMA = "TrainingRequest";
const FIRST = ["updates", "checkpoint_every", "keep_checkpoints", "seed", "workers"];
const NOT_TAKEN = "The command makes as many updates as it decides itself, and keeps its own checkpoints.";

/** Opens the dialog; nothing runs before its last button is pressed. */
export async function openTrainDialog(found) {
  const document = await get("/jobs/new/schema");
  const fields = makeForm(document, SCHEMA);
  const command = commandOf(found.request);
  const page = { found, fields, command, problem: h("div"), shown: h("div", { class: "stack" }), sending: false, keys: new Map() };
  const form = h("form", { class: "form", novalidate: true, on: { input: () => replace(page.shown) } }, content(page));
  fields.write(defaultsOf(document.components.schemas[SCHEMA]));
  form.querySelector("input, .button-primary").setAttribute("autofocus", "");
  open(page, form);
}

function open(page, form) {
  const dialog = h("dialog", { class: "dialog", "aria-labelledby": "train-title" }, form);
  const [cancel, show, start] = form.querySelectorAll(".dialog-buttons > button");
  cancel.addEventListener("click", () => dialog.close());
  show.addEventListener("click", () => busy(show, () => showingProblems(page, () => showCommand(page))));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(page, [cancel, show], start);
  });
  dialog.addEventListener("cancel", (event) => page.sending && event.preventDefault()); // the job may already exist
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function content({ found, fields, command, problem, shown }) {
  return [
    h("h2", { id: "train-title" }, "Train with this recommendation"),
    h("p", { class: "muted" }, `The job runs on ${found.device.id}, ${found.device.name}. Nothing runs before you start it.`),
    problem,
    command ? fieldsOfCommand(command, fields) : [
      h("div", { class: "train-fields" }, FIRST.map((name) => fields.field(name))),
      h("details", {}, h("summary", {}, "More settings"), h("div", { class: "form" }, fields.rest(""))),
    ],
    shown,
    h("div", { class: "dialog-buttons" },
      h("button", { class: "button", type: "button" }, "Cancel"),
      h("button", { class: "button", type: "button" }, "Show the command"),
      h("button", { class: "button button-primary" }, "Start training")),
  ];
}

function fieldsOfCommand(command, fields) {
  return takesUpdates(command) ? h("div", { class: "train-fields" }, fields.field("updates")) : h("p", {}, NOT_TAKEN);
}

/** The defaults of a schema. */
function defaultsOf(schema) {
  return Object.fromEntries(Object.entries(schema.properties).map(([name, { default: value }]) => [name, value]));
}

// --- actions ---------------------------------------------------------------------------------------------------

/** Returns the result of `act`, or null after a problem, which is shown beside its field or above the form. */
async function showingProblems(page, act) {
  replace(page.problem);
  page.fields.place([]);
  try {
    return await act();
  } catch (problem) {
    const named = (problem.errors ?? []).map((error) => ({ ...error, field: error.field.replace(/^training\./, "") }));
    const rest = page.fields.place(named);
    if (named.length === 0 || rest.length > 0) {
      replace(page.problem, problemAlert(problem));
      page.problem.scrollIntoView({ block: "nearest" });
    } else {
      page.problem.closest("form").querySelector("[aria-invalid]")?.focus();
    }
    return null;
  }
}

/** Returns the submission. Throws a problem like the service's if a field cannot be read. */
function submission(page) {
  const { value, problems } = page.fields.read();
  if (problems.length > 0) {
    throw Object.assign(new Error("Some fields cannot be read"), { title: "Some fields cannot be read", errors: problems });
  }
  const { updates } = value;
  return { recommendation_id: page.found.id, training: page.command === null ? value : { updates } };
}

async function showCommand(page) {
  const made = await post("/v1/jobs", { ...submission(page), dry_run: true });
  const environment = Object.entries(made.environment).map(([name, value]) => `${name}=${quoted(value)}`);
  replace(
    page.shown,
    definitions([["Working directory", html`<code>${made.working_directory}</code>`], ["Device", made.device]]),
    codeBlock(made.command.map(quoted).join(" "), { label: "Command" }),
    environment.length > 0 && codeBlock(environment.join("\n"), { label: "Environment" }),
    made.files.map((file) => h("details", {}, h("summary", {}, `File ${file.path}`), codeBlock(file.content, { label: file.path, download: file.path }))),
  );
  page.shown.scrollIntoView({ block: "nearest" });
  announce("The command is shown. Nothing runs yet.");
}

/** Starts the job once, however often the button is pressed; the other buttons are disabled meanwhile. */
async function send(page, others, start) {
  if (page.sending) {
    return;
  }
  page.sending = true;
  others.forEach((button) => (button.disabled = true));
  const job = await busy(start, () => showingProblems(page, () => startJob(page)));
  page.sending = false;
  others.forEach((button) => (button.disabled = false));
  if (job !== null) {
    location.assign(`/jobs/${encodeURIComponent(job.id)}`);
  }
}

function startJob(page) {
  const body = submission(page);
  const text = JSON.stringify(body);
  if (!page.keys.has(text)) {
    page.keys.set(text, crypto.randomUUID?.()); // undefined unless the page came over https or from this machine
  }
  return post("/v1/jobs", body, { idempotencyKey: page.keys.get(text) });
}
