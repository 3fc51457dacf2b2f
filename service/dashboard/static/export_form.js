/**
 * Exports of a recommendation: choose a target and its options, then view, copy or download the files.
 *
 *   exportForm({form, result, path, formats, command})   `path` of the recommendation in the API; `formats` as /v1/exports
 *                                                        lists them; `command` that was tuned, or null: launchers carry it
 */

import { get } from "./api.js";
import { takesUpdates } from "./command.js";
import { h, replace } from "./dom.js";
import { count } from "./format.js";
import { quoted } from "./reproduce.js";
import { alertBox, codeBlock, problemAlert } from "./parts.js";

const LAUNCHER_FIELDS = [
  ["script", "Script", "train.py"],
  ["job_name", "Job name", "batchwright"],
  ["queue", "Queue", ""],
  ["image", "Image", "pytorch/pytorch:latest"],
  ["processes_per_node", "Devices per node", ""],
];
const NOT_OF_COMMANDS = ["script", "processes_per_node"]; // which start their program and ranks themselves
const UPDATES = ["updates", "Updates", "", "100"];

/** Fills `form` with the targets and their options, and `result` with the export to the chosen one. */
export function exportForm({ form, result, path, formats: all, command }) {
  const formats = command ? all.filter((format) => format.kind === "launcher") : all;
  const target = select("export-format", "Target", formats.map((format) => [format.format, format.title]));
  const version = select("export-version", "Version", []);
  const argumentsOf = select("export-arguments", "Arguments of", [["", "none: by environment"], ...formats.filter((format) => format.gives_arguments).map((format) => [format.format, format.title])]);
  const ofCommand = command && [...(takesUpdates(command) ? [UPDATES] : []), ...LAUNCHER_FIELDS.filter(([name]) => !NOT_OF_COMMANDS.includes(name))];
  const fields = (ofCommand ?? LAUNCHER_FIELDS).map((field) => textField(...field));
  const inexact = h("input", { id: "export-inexact", type: "checkbox" });
  const allow = h("div", { class: "choice" }, inexact, h("label", { for: "export-inexact" }, "Allow another effective batch"));
  const inFlight = { controller: new AbortController() };

  function chosen() {
    return formats.find((format) => format.format === target.input.value);
  }

  function adapt() {
    const { versions, kind } = chosen();
    replace(version.input, versions.map((name) => h("option", { value: name }, name)));
    version.element.hidden = versions.length < 2;
    fields.forEach((field) => (field.element.hidden = kind !== "launcher"));
    argumentsOf.element.hidden = kind !== "launcher" || command !== null;
    show();
  }

  async function show() {
    inFlight.controller.abort();
    inFlight.controller = new AbortController();
    const { signal } = inFlight.controller;
    try {
      const made = await get(`${path}/exports/${encodeURIComponent(target.input.value)}`, { query: query(), signal });
      replace(result, exported(made, chosen()));
    } catch (problem) {
      if (problem.name !== "AbortError") {
        replace(result, problemAlert(problem));
      }
    }
  }

  function query() {
    const launcher = chosen().kind === "launcher";
    return {
      target_version: version.input.value,
      allow_inexact: inexact.checked ? "true" : "",
      arguments_of: launcher ? argumentsOf.input.value : "",
      ...Object.fromEntries(launcher ? fields.map(({ input }) => [input.name, input.value.trim()]) : []),
    };
  }

  replace(form, target.element, version.element, argumentsOf.element, fields.map((field) => field.element), allow);
  target.input.addEventListener("change", adapt);
  [version.input, argumentsOf.input, inexact, ...fields.map((field) => field.input)].forEach((input) => input.addEventListener("change", show));
  adapt();
}

function exported(made, format) {
  const { plan } = made;
  return [
    h("p", {}, `${made.title} ${made.target_version}: ${count(plan.effective_batch_size)} samples per update.`),
    h("p", { class: "muted small" }, `Checked: ${format.checked}.`),
    h("p", { class: "muted small" }, made.verification),
    !plan.exact && alertBox("warn", "Not the requested effective batch", `${count(plan.effective_batch_size)} instead of ${count(plan.requested_effective_batch_size)}.`),
    made.files.map((file) => codeBlock(file.content, { label: file.name, download: file.name.split("/").at(-1) })),
    made.command.length > 0 && codeBlock(made.command.map(quoted).join(" "), { label: "Start command" }),
    made.warnings.length > 0 && h("details", { open: true }, h("summary", {}, "Notes"), h("ul", { class: "text" }, made.warnings.map((warning) => h("li", {}, warning.message)))),
  ];
}

function select(id, label, choices) {
  const input = h("select", { id, class: "input" }, choices.map(([value, text]) => h("option", { value }, text)));
  return { input, element: h("div", { class: "field" }, h("label", { for: id }, label), input) };
}

function textField(name, label, placeholder, value = "") {
  const id = `export-${name}`;
  const input = h("input", { id, name, class: "input", type: "text", value, placeholder, autocomplete: "off", spellcheck: "false", maxlength: 1000 });
  return { input, element: h("div", { class: "field" }, h("label", { for: id }, label), input) };
}
