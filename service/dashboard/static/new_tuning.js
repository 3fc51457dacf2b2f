/** The page of a new tuning: the form, its value as JSON, and an estimate. */

import { get, LEAVING, may, post } from "./api.js";
import { commandDocument } from "./command_form.js";
import { alertBox, codeBlock, problemAlert } from "./components.js";
import { announce, busy, byId, h, replace } from "./dom.js";
import { estimateTable } from "./estimate_table.js";
import { seconds } from "./format.js";
import { eventually } from "./live.js";
import { makeForm } from "./schema_form.js";

const USUAL_GPUS = ["H100-80GB", "A100-80GB", "L4"];
const LATER = ["spec.optimizer", "spec.schedule", "spec.parallelism", "spec.data"];
const NOT_OF_COMMANDS = ["what_if", "allow_batch_coupling"];
const DRAFT = "batchwright.new-tuning";

start();

async function start() {
  try {
    const reads = may("tunings:read");
    const nothing = { items: [] };
    const [document, devices, commands] = await eventually(() =>
      Promise.all([get("/tunings/new/schema"), ...["/v1/devices", "/v1/commands"].map((path) => (reads ? get(path) : nothing))]),
    );
    show(document, devices.items, commands.items);
  } catch (problem) {
    replace(byId("notices"), problemAlert(problem, { retry: start }));
  }
}

function show(document, devices, commands) {
  const suggestions = { device: [...new Set(devices.map((row) => row.device.id))] };
  const page = { document: commandDocument(document, commands), suggestions, hasCommands: commands.length > 0 };
  replace(byId("gpus"), (page.gpus = gpuChoice()).element);
  offerKinds(page);
  choose(page, false);
  offerExamples(page, document.examples);
  byId("form").addEventListener("input", () => preview(page));
  byId("form").addEventListener("change", () => preview(page));
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    busy(byId("submit"), () => submit(page));
  });
  byId("estimate").addEventListener("click", () => busy(byId("estimate"), () => estimate(page)));
  byId("paste").addEventListener("click", () => busy(byId("paste"), () => fillFromText(page)));
  byId("submit").disabled = !may("tunings:write");
  byId("form").hidden = false;
  restoreDraft(page);
  window.addEventListener(LEAVING, () => keepDraft(page));
  preview(page);
}

/** Offers registered commands, if there are any, beside workloads that are described. */
function offerKinds(page) {
  const kinds = [["described", "Described: its model, batch and optimizer"], ["command", "A command that the operator has registered"]];
  const select = h("select", { id: "workload-kind", class: "input", on: { change: () => choose(page, select.value === "command", valueOf(page).value) } },
    kinds.map(([value, text]) => h("option", { value }, text)));
  page.kind = select;
  replace(byId("kind"), page.hasCommands && h("div", { class: "field" }, h("label", { for: "workload-kind" }, "Workload"), select));
}

/** Shows the form of workloads or of commands, filled with the fields that both have. */
function choose(page, isCommand, value = {}) {
  page.isCommand = isCommand;
  page.kind.value = isCommand ? "command" : "described";
  page.form = makeForm(page.document, isCommand ? "CommandSubmission" : "TuningSubmission", { suggestions: page.suggestions });
  arrangeFields(page);
  page.form.write({ ...value, spec: undefined });
  byId("training-card").hidden = isCommand;
  byId("estimate-parts").hidden = isCommand;
  byId("estimate").hidden = isCommand;
  byId("estimate").disabled = !may("tunings:write");
}

/** Fills the form of the value's kind. */
function fillForm(page, value) {
  choose(page, page.hasCommands && value.spec?.model?.kind === "command");
  page.form.write(value);
  preview(page);
}

/** Returns the form's value and the problems of its fields. */
function valueOf(page) {
  const { value, problems } = page.form.read();
  if (page.isCommand) {
    value.spec.model = { kind: "command", ...value.spec.model };
  }
  return { value, problems };
}

/** Keeps the form's value in this tab when the session has expired, until the next sign-in. */
function keepDraft(page) {
  try {
    sessionStorage.setItem(DRAFT, JSON.stringify(valueOf(page).value));
  } catch {
    // no storage, no draft
  }
}

function restoreDraft(page) {
  try {
    const kept = sessionStorage.getItem(DRAFT);
    sessionStorage.removeItem(DRAFT);
    if (kept !== null) {
      fillForm(page, JSON.parse(kept));
      announce("The form is restored.");
    }
  } catch {
    // no storage, no draft
  }
}

function arrangeFields({ form, isCommand }) {
  const model = isCommand ? ["spec.model"] : ["spec.model", "spec.batch", "spec.precision"];
  replace(byId("model-fields"), model.map(form.field));
  replace(byId("batch-fields"), ["name", "project", "labels", "effective_batch_size", "device", "memory_limit_bytes", "objective", "baseline"].map(form.field));
  replace(byId("training-fields"), !isCommand && [...LATER.map(form.field), ...form.rest("spec")]);
  replace(byId("search-fields"), form.rest("", ["spec", ...(isCommand ? NOT_OF_COMMANDS : [])]));
}

function offerExamples(page, examples) {
  const buttons = Object.entries(examples).map(([name, example]) => {
    const fill = () => {
      fillForm(page, example.value);
      announce(`Filled with: ${name}`);
    };
    return h("button", { type: "button", class: "button button-small", on: { click: fill } }, name);
  });
  replace(byId("examples"), h("span", { class: "label" }, "Start from"), buttons);
}

/** Offers the usual GPUs, and all others once they are asked for: the table is large. */
function gpuChoice() {
  const option = (name) => h("option", { value: name, selected: USUAL_GPUS.includes(name) }, name);
  const input = h("select", { id: "gpu-choice", class: "input", multiple: true, size: 6 }, USUAL_GPUS.map(option));
  const others = h("button", { type: "button", class: "button button-small", hidden: !may("tunings:read") }, "Offer all GPUs");
  others.addEventListener("click", () => busy(others, async () => {
    const { items } = await get("/v1/gpus");
    input.append(...items.map((gpu) => gpu.name).filter((name) => !USUAL_GPUS.includes(name)).map(option));
    others.hidden = true;
    input.focus();
  }));
  return {
    element: h("div", { class: "field" }, h("label", { for: "gpu-choice" }, "GPUs to estimate for"), input, h("div", {}, others)),
    chosen: () => [...input.selectedOptions].map(({ value }) => value),
  };
}

function preview(page) {
  const { value } = valueOf(page);
  replace(byId("preview"), codeBlock(JSON.stringify(value, null, 2), { label: "Request body of POST /v1/tunings", download: "tuning.json" }));
}

/** Returns the form's value, or null if a field cannot be read; its message is then shown beside the field. */
function checked(page) {
  const { value, problems } = valueOf(page);
  page.form.place(problems);
  replace(byId("notices"));
  if (problems.length > 0) {
    focusFirstInvalid(problems.length);
    return null;
  }
  return value;
}

async function submit(page) {
  const value = checked(page);
  if (value === null) {
    return;
  }
  try {
    const tuning = await post("/v1/tunings", value, { idempotencyKey: crypto.randomUUID?.() });
    location.assign(`/tunings/${encodeURIComponent(tuning.id)}`);
  } catch (problem) {
    complain(page, problem);
  }
}

async function estimate(page) {
  const value = checked(page);
  if (value === null) {
    return;
  }
  replace(byId("estimated"), h("p", { class: "muted", role: "status" }, "Estimating. This takes a few seconds…"));
  try {
    const { spec, effective_batch_size, memory_margin } = value;
    const body = { spec, gpus: page.gpus.chosen(), effective_batch_size, memory_margin };
    const found = await post("/v1/estimates", body);
    replace(byId("estimated"),
      h("p", { class: "muted small" }, `Estimated in ${seconds(found.seconds)}, not measured.`),
      estimateTable(found), found.notes.map((note) => h("p", { class: "small" }, note)));
    announce("The estimate is ready.");
  } catch (problem) {
    replace(byId("estimated"));
    complain(page, problem);
  }
}

async function fillFromText(page) {
  replace(byId("paste-problem"));
  try {
    const parsed = await parse(byId("paste-text").value);
    const whole = "spec" in parsed ? parsed : { ...valueOf(page).value, spec: parsed };
    fillForm(page, whole);
    const unknown = page.form.unknownFields(whole).map((problem) => `${problem.field}: ${problem.message}`);
    replace(byId("paste-problem"), unknown.length > 0 && alertBox("warn", "Not everything could be filled in", ...unknown));
    announce("The form is filled in.");
  } catch (problem) {
    replace(byId("paste-problem"), problemAlert(problem));
  }
}

/** Parses JSON here, and YAML with the service. */
async function parse(text) {
  try {
    const value = JSON.parse(text);
    if (value !== null && typeof value === "object" && !Array.isArray(value)) {
      return value;
    }
  } catch {
    // then it is YAML
  }
  return (await post("/tunings/new/yaml", { text })).value;
}

function complain(page, problem) {
  const left = page.form.place(problem.errors ?? []);
  const placed = (problem.errors ?? []).length - left.length;
  if (placed > 0) {
    focusFirstInvalid(placed, left.map((error) => `${error.field}: ${error.message}`));
  } else {
    replace(byId("notices"), problemAlert(problem));
    byId("notices").scrollIntoView({ block: "nearest" });
  }
}

/** Focuses the first invalid field. */
function focusFirstInvalid(number, others = []) {
  const words = number === 1 ? "One field is invalid" : `${number} fields are invalid`;
  replace(byId("notices"), alertBox("bad", words, "See the messages below.", ...others));
  document.querySelector('#form [aria-invalid="true"]')?.focus();
}
