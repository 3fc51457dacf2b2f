/**
 * Exports of a recommendation: choose a target and its options, see its files, copy or download them.
 *
 *   exportForm({form, result, path, formats})   `path` of the recommendation in the API; `formats` as /v1/exports lists them
 */

import { get } from "./api.js";
import { h, replace } from "./dom.js";
import { count } from "./format.js";
import { quoted } from "./repeating.js";
import { alertBox, codeBlock, problemAlert } from "./parts.js";

const LAUNCHER_FIELDS = [
  ["script", "Script", "train.py"],
  ["job_name", "Job name", "batchwright"],
  ["queue", "Queue", ""],
  ["image", "Image", "pytorch/pytorch:latest"],
  ["processes_per_node", "Devices of a node", ""],
];

/** Fills `form` with the choice of targets, and `result` with what the chosen one is given. */
export function exportForm({ form, result, path, formats }) {
  const target = select("export-format", "Target", formats.map((it) => [it.format, `${it.title}`]));
  const version = select("export-version", "Version", []);
  const passing = select("export-arguments", "Arguments of", [["", "none: by environment"], ...formats.filter((it) => it.gives_arguments).map((it) => [it.format, it.title])]);
  const fields = LAUNCHER_FIELDS.map(([name, label, usual]) => textField(name, label, usual));
  const inexact = h("input", { id: "export-inexact", type: "checkbox" });
  const allow = h("div", { class: "choice" }, inexact, h("label", { for: "export-inexact" }, "Allow another effective batch"));
  const asking = { controller: new AbortController() };

  function chosen() {
    return formats.find((it) => it.format === target.input.value);
  }

  function adapt() {
    const { versions, kind } = chosen();
    replace(version.input, versions.map((it) => h("option", { value: it }, it)));
    version.element.hidden = versions.length < 2;
    [passing, ...fields].forEach((field) => (field.element.hidden = kind !== "launcher"));
    show();
  }

  async function show() {
    asking.controller.abort();
    asking.controller = new AbortController();
    const { signal } = asking.controller;
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
      arguments_of: launcher ? passing.input.value : "",
      ...Object.fromEntries(launcher ? fields.map(({ input }) => [input.name, input.value.trim()]) : []),
    };
  }

  replace(form, target.element, version.element, passing.element, fields.map((it) => it.element), allow);
  target.input.addEventListener("change", adapt);
  [version.input, passing.input, inexact, ...fields.map((it) => it.input)].forEach((input) => input.addEventListener("change", show));
  adapt();
}

function exported(made, format) {
  const { plan } = made;
  return [
    h("p", {}, `${made.title} ${made.target_version}: ${count(plan.effective_batch_size)} samples per update.`),
    h("p", { class: "muted small" }, `Checked: ${format.checked}.`),
    !plan.exact && alertBox("warn", "Not the requested effective batch", `${count(plan.effective_batch_size)} instead of ${count(plan.requested_effective_batch_size)}.`),
    made.files.map((file) => codeBlock(file.content, { label: file.name, download: file.name.split("/").at(-1) })),
    made.command.length > 0 && codeBlock(made.command.map(quoted).join(" "), { label: "Start it with" }),
    made.warnings.length > 0 && h("details", { open: true }, h("summary", {}, "What to know"), h("ul", { class: "text" }, made.warnings.map((it) => h("li", {}, it.message)))),
  ];
}

function select(id, label, choices) {
  const input = h("select", { id, class: "input" }, choices.map(([value, text]) => h("option", { value }, text)));
  return { input, element: h("div", { class: "field" }, h("label", { for: id }, label), input) };
}

function textField(name, label, usual) {
  const id = `export-${name}`;
  const input = h("input", { id, name, class: "input", type: "text", placeholder: usual, autocomplete: "off", spellcheck: "false", maxlength: 1000 });
  return { input, element: h("div", { class: "field" }, h("label", { for: id }, label), input) };
}
