/**
 * Exports of a recommendation: choose a target and its options, then view, copy or download the files.
 *
 *   html`<${Exports} path=${path} formats=${formats} command=${command} />`   `path` of the recommendation in the API; `formats` as
 *                                                          /v1/exports lists them; `command` that was tuned, or null: launchers carry it
 */

import { get } from "./api.js";
import { takesUpdates } from "./command.js";
import { alertBox, codeBlock, problemAlert, withCode } from "./components.js";
import { count } from "./format.js";
import { html, useEffect, useState } from "./preact-htm.js";
import { quoted } from "./reproduce.js";

const LAUNCHER_FIELDS = [
  ["script", "Script", "train.py"],
  ["job_name", "Job name", "batchwright"],
  ["queue", "Queue", ""],
  ["image", "Image", "pytorch/pytorch:latest"],
  ["processes_per_node", "Devices per node", ""],
];
const NOT_OF_COMMANDS = ["script", "processes_per_node"]; // which start their program and ranks themselves
const UPDATES = ["updates", "Updates", "", "100"];

export function Exports({ path, formats: all, command }) {
  const formats = command ? all.filter((each) => each.kind === "launcher") : all;
  const fields = command ? [...(takesUpdates(command) ? [UPDATES] : []), ...LAUNCHER_FIELDS.filter(([name]) => !NOT_OF_COMMANDS.includes(name))] : LAUNCHER_FIELDS;
  const [name, setName] = useState(formats[0].format);
  const [options, setOptions] = useState({ allow_inexact: "", arguments_of: "", ...Object.fromEntries(fields.map(([field, , , value = ""]) => [field, value])) });
  const [{ made, of, problem }, setShown] = useState({});
  const format = formats.find((each) => each.format === name);
  const launches = format.kind === "launcher";
  const version = format.versions.includes(options.target_version) ? options.target_version : format.versions[0];
  const { allow_inexact, ...ofLaunchers } = options;
  const query = { ...(launches ? ofLaunchers : {}), allow_inexact, target_version: version };
  useEffect(() => {
    const stopping = new AbortController();
    get(`${path}/exports/${encodeURIComponent(name)}`, { query, signal: stopping.signal }).then(
      (found) => setShown({ made: found, of: format }),
      (caught) => caught.name === "AbortError" || setShown({ problem: caught }),
    );
    return () => stopping.abort();
  }, [name, JSON.stringify(query)]);
  const set = (field) => (event) => setOptions((before) => ({ ...before, [field]: event.target.value.trim() }));
  const arguments_ = [["", "none: by environment"], ...formats.filter((each) => each.gives_arguments).map((each) => [each.format, each.title])];
  return html`
    <div id="export-form" class="export-form">
      ${select("export-format", "Target", formats.map((each) => [each.format, each.title]), name, (event) => setName(event.target.value))}
      ${format.versions.length > 1 && select("export-version", "Version", format.versions.map((each) => [each, each]), version, set("target_version"))}
      ${launches && !command && select("export-arguments", "Arguments of", arguments_, options.arguments_of, set("arguments_of"))}
      ${launches && fields.map(([field, label, placeholder, value = ""]) => html`<div key=${field} class="field"><label for="export-${field}">${label}</label>
        <input id="export-${field}" class="input" type="text" defaultValue=${value} placeholder=${placeholder} autocomplete="off" spellcheck=${false} maxlength="1000" onChange=${set(field)} /></div>`)}
      <div class="choice"><input id="export-inexact" type="checkbox" checked=${allow_inexact !== ""} onChange=${(event) => setOptions({ ...options, allow_inexact: event.target.checked ? "true" : "" })} />
        <label for="export-inexact">Allow an inexact batch size</label></div>
    </div>
    <div id="exported" class="stack" aria-live="polite">${problem ? problemAlert(problem) : made && exported(made, of)}</div>`;
}

function select(id, label, choices, value, onChange) {
  return html`<div class="field" key=${id}><label for=${id}>${label}</label>
    <select id=${id} class="input" value=${value} onChange=${onChange}>${choices.map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}</select></div>`;
}

function exported(made, format) {
  const { plan } = made;
  return html`
    <p>${made.title} ${made.target_version}: ${count(plan.effective_batch_size)} samples per update.</p>
    <p class="muted small">Checked: ${format.checked}.</p>
    <p class="muted small">${withCode(made.verification)}</p>
    ${!plan.exact && alertBox("warn", "Not the requested effective batch", `${count(plan.effective_batch_size)} instead of ${count(plan.requested_effective_batch_size)}.`)}
    ${made.files.map((file) => codeBlock(file.content, { label: file.name, download: file.name.split("/").at(-1) }))}
    ${made.command.length > 0 && codeBlock(made.command.map(quoted).join(" "), { label: "Start command" })}
    ${made.warnings.length > 0 && html`<details open><summary>Notes</summary><ul class="text">${made.warnings.map((warning) => html`<li>${withCode(warning.message)}</li>`)}</ul></details>`}`;
}
