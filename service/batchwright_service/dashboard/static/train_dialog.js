/**
 * The dialog that starts a job from a recommendation: the settings, a preview of the command, and the start.
 *
 *   await openTrainDialog(found)      `found` as /v1/recommendations/{id} gives it
 */

import { get, post } from "./api.js";
import { commandOf, takesUpdates } from "./command.js";
import { codeBlock, definitions, Dialog, openDialog, problemAlert, variables } from "./components.js";
import { announce } from "./dom.js";
import { html, useLayoutEffect, useRef, useState } from "./preact-htm.js";
import { quoted } from "./reproduce.js";
import { Field, useForm } from "./schema_form.js";

const SCHEMA = "TrainingRequest";
const FIRST = ["updates", "checkpoint_every", "keep_checkpoints", "seed", "workers"];

/** Opens the dialog; nothing runs before its last button is pressed. */
export async function openTrainDialog(found) {
  const document = await get("/jobs/new/schema");
  openDialog((close) => html`<${TrainDialog} found=${found} document=${document} close=${close} />`);
}

function TrainDialog({ found, document, close }) {
  const form = useForm(document, SCHEMA);
  const own = useRef(null);
  const keys = useRef(new Map()).current;
  const [busy, setBusy] = useState(null); // "show" or "start"
  const [problem, setProblem] = useState(null);
  const [shown, setShown] = useState(null);
  useLayoutEffect(() => {
    form.write(defaultsOf(document.components.schemas[SCHEMA]));
    (own.current.querySelector("input") ?? own.current.querySelector(".button-primary")).focus();
  }, []);
  useLayoutEffect(() => own.current.querySelector("[aria-invalid]")?.focus(), [form.errors]);
  const command = commandOf(found.request);
  /** Runs an act with the submission; a problem is shown beside its field or above the form. */
  const attempt = async (name, act) => {
    if (busy === null) {
      setBusy(name);
      setProblem(null);
      form.place([]);
      try {
        await act(submission(form, found, command));
      } catch (caught) {
        const named = (caught.errors ?? []).map((error) => ({ ...error, field: error.field.replace(/^training\./, "") }));
        const rest = form.place(named);
        setProblem(named.length === 0 || rest.length > 0 ? caught : null);
      }
      setBusy(null);
    }
  };
  const show = (body) => post("/v1/jobs", { ...body, dry_run: true }).then((made) => {
    setShown(preview(made));
    announce("The command is shown. Nothing runs yet.");
  });
  const start = async (body) => {
    const text = JSON.stringify(body);
    if (!keys.has(text)) {
      keys.set(text, crypto.randomUUID?.()); // undefined unless the page came over https or from this machine
    }
    const job = await post("/v1/jobs", body, { idempotencyKey: keys.get(text) });
    location.assign(`/jobs/${encodeURIComponent(job.id)}`);
  };
  const submit = (event) => {
    event.preventDefault();
    attempt("start", start);
  };
  const isBusy = (name) => (busy === name ? "true" : null);
  // while the job is made, Escape does not close the dialog: the job may already exist
  return html`<${Dialog} titleId="train-title" isLocked=${busy === "start"} onClose=${close}>
    <form class="form" novalidate ref=${own} onSubmit=${submit} onInput=${() => setShown(null)}>
      <h2 id="train-title">Train with this recommendation</h2>
      <p class="muted">The job runs on ${found.device.id}, ${found.device.name}. Nothing runs before you start it.</p>
      ${problem && html`<div ref=${(place) => place?.scrollIntoView({ block: "nearest" })}>${problemAlert(problem)}</div>`}
      ${settings(form, command)}
      ${shown && html`<div class="stack" ref=${(place) => place?.scrollIntoView({ block: "nearest" })}>${shown}</div>`}
      <div class="dialog-buttons">
        <button class="button" type="button" disabled=${busy === "start"} onClick=${(event) => event.currentTarget.closest("dialog").close()}>Cancel</button>
        <button class="button" type="button" disabled=${busy !== null} aria-busy=${isBusy("show")} onClick=${() => attempt("show", show)}>Show the command</button>
        <button class="button button-primary" disabled=${busy === "start"} aria-busy=${isBusy("start")}>Start training</button>
      </div>
    </form>
  <//>`;
}

/** The settings of the run; a command takes the number of updates, if anything. */
function settings(form, command) {
  if (command && !takesUpdates(command)) {
    return html`<p>The command decides how many updates it makes, and keeps its own checkpoints.</p>`;
  }
  const field = (path) => html`<${Field} key=${path} form=${form} path=${path} />`;
  return html`
    <div class="train-fields">${(command ? ["updates"] : FIRST).map(field)}</div>
    ${!command && html`<details><summary>More settings</summary><div class="form">${form.rest("", FIRST).map(field)}</div></details>`}`;
}

/** The defaults of a schema. */
function defaultsOf(schema) {
  return Object.fromEntries(Object.entries(schema.properties).map(([name, { default: value }]) => [name, value]));
}

/** The submission. Throws a problem like the service's if a field cannot be read. */
function submission(form, found, command) {
  const { value, problems } = form.read();
  if (problems.length > 0) {
    throw Object.assign(new Error("Some fields cannot be read"), { title: "Some fields cannot be read", errors: problems });
  }
  const { updates } = value;
  return { recommendation_id: found.id, training: command === null ? value : { updates } };
}

function preview(made) {
  return html`
    ${definitions([["Working directory", html`<code>${made.working_directory}</code>`], ["Device", made.device]])}
    ${codeBlock(made.command.map(quoted).join(" "), { label: "Command" })}
    ${variables(made.environment, "Environment")}
    ${made.files.map((file) => html`<details><summary>File ${file.path}</summary>${codeBlock(file.content, { label: file.path, download: file.path })}</details>`)}`;
}
