/** The page of a new tuning: the form, its value as JSON, and an estimate. */

import { get, LEAVING, may, post } from "./api.js";
import { commandDocument } from "./command_form.js";
import { alertBox, Button, codeBlock, elapsed, linkTo, problemAlert } from "./components.js";
import { announce, byId } from "./dom.js";
import { estimateTable, verdictWords } from "./estimate_table.js";
import { bytes, count, seconds } from "./format.js";
import { useRead } from "./hooks.js";
import { eventually } from "./live.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./preact-htm.js";
import { raisedLimit, submissionAgain } from "./reproduce.js";
import { Field, useForm } from "./schema_form.js";

const SHOWN = ["spec", "effective_batch_size", "device"];
const OF_SPEC = ["spec.model", "spec.batch"];
const FIRST = ["name", "project", "labels", "memory_limit_bytes", "spec.precision", "objective", "baseline"];
const LATER = ["spec.optimizer", "spec.schedule", "spec.parallelism", "spec.data"];
const NOT_OF_COMMANDS = ["what_if", "allow_batch_coupling"];
const PAUSE_MILLISECONDS = 1000; // of typing, before an estimate
const DRAFT = "batchwright.new-tuning";

function NewTuning() {
  const [{ found, problem }, setState] = useState({});
  const start = () => {
    const nothing = { items: [] };
    const repeated = new URLSearchParams(location.search).get("repeat");
    const paths = ["/v1/devices", "/v1/commands", repeated && `/v1/tunings/${encodeURIComponent(repeated)}`].filter(Boolean);
    eventually(() => Promise.all([get("/tunings/new/schema"), ...paths.map((path) => (may("tunings:read") ? get(path) : nothing))])).then(
      ([document, devices, commands, tuning]) => setState({ found: { document, devices, commands: commands.items, tuning } }),
      (caught) => setState({ problem: caught }),
    );
  };
  useLayoutEffect(start, []);
  return html`${problem && problemAlert(problem, { retry: start })}${found && html`<${Form} ...${found} />`}`;
}

function Form({ document, devices, commands, tuning }) {
  const served = devices.items.filter(({ alive }) => alive);
  const whole = useRef(commandDocument(document, commands)).current;
  const form = useForm(whole, "TuningSubmission", { choices: { device: deviceChoices(served) }, without: (name) => (name === "CommandSubmission" ? NOT_OF_COMMANDS : []) });
  const isCommand = form.name === "CommandSubmission";
  const schemaOf = ({ spec }) => (commands.length > 0 && spec?.model?.kind === "command" ? "CommandSubmission" : "TuningSubmission");
  const fill = (value) => form.write(value, schemaOf(value));
  const fillModel = (value) => { // the card stays, unless the preset names one
    const { device, hardware } = form.read().value;
    fill(value.device || value.hardware ? value : { ...value, ...(device && { device }), ...(hardware && { hardware }) });
  };
  const page = { form, fill, schemaOf, ...useChecks(form) };
  useExample(document.examples, fill);
  useRepeated(tuning, page);
  useDraft(page); // which goes before an example
  const submit = async () => {
    const value = page.checked();
    if (value !== null) {
      const tuning = await post("/v1/tunings", value, { idempotencyKey: crypto.randomUUID?.() });
      location.assign(`/tunings/${encodeURIComponent(tuning.id)}`);
    }
  };
  const { value: written, problems, missing } = valueOf(form);
  const preview = JSON.stringify(written, null, 2);
  const needed = [...new Set([...(isCommand || modelName(written.spec?.model) ? [] : ["model"]), ...missing.map(stepOf)])];
  return html`${page.notice}
    <form id="form" class="columns" novalidate onSubmit=${(event) => event.preventDefault()}>
      <div class="stack">
        <section class="card" aria-labelledby="model-title"><h2 id="model-title">1. Which model?</h2>
        ${commands.length > 0 && html`<${Kinds} form=${form} />`}
        <${Presets} presets=${document.presets} fill=${fillModel} />
        <div class="form-buttons" role="group" aria-label="Examples"><span class="label">Or an example</span>${Object.entries(document.examples).map(([name, { value }]) => html`<button type="button" class="button button-small" onClick=${() => {
          fillModel(value);
          announce(`Filled with: ${name}`);
        }}>${name}</button>`)}</div>
        <${Paste} page=${page} />
        ${isCommand ? fields(form, ["spec.model"]) : html`<details><summary>${modelName(written.spec?.model) ? `Describe the model: ${modelName(written.spec.model)}` : "Describe your own model"}</summary>${fields(form, ["spec.model"])}</details>`}</section>
        <section class="card" aria-labelledby="batch-title"><h2 id="batch-title">2. Which batch?</h2>${fields(form, ["effective_batch_size"])}
          ${!isCommand && html`<details><summary>The largest sample: ${sampleName(written.spec?.batch)}</summary>${fields(form, ["spec.batch"])}</details>`}</section>
        <section class="card" aria-labelledby="card-title"><h2 id="card-title">3. Which device?</h2>${fields(form, ["device"])}
          ${!isCommand && may("tunings:write") && html`<${Estimate} request=${written} isComplete=${problems.length + missing.length === 0 && modelName(written.spec?.model) !== null} cards=${cardsOf(written, served, devices.hardware ?? [])} />`}</section>
        <details class="card"><summary>Advanced: name, memory limit, ${isCommand ? "" : "precision, optimizer, data, "}objective and search</summary>
          ${fields(form, [...FIRST.filter((path) => !isCommand || !path.startsWith("spec.")), ...(isCommand ? [] : [...LATER, ...form.rest("spec", [...OF_SPEC, ...FIRST, ...LATER])]), ...form.rest("", [...SHOWN, ...FIRST])])}</details>
        <div class="form-buttons submit-bar"><${Button} type="submit" class="button-primary" act=${submit} onProblem=${page.complain} disabled=${!may("tunings:write")}>Submit the tuning<//>${needed.length > 0 && html`<span class="needed muted">Still needed: ${needed.join(", ")}</span>`}</div>
      </div>
      <div id="preview" class="stack">${needed.length > 0 && html`<p class="muted small">Fills in as you answer</p>`}${codeBlock(preview, { label: "Request body of POST /v1/tunings", download: "tuning.json" })}</div>
    </form>`;
}

/** What the field of the device offers: the devices of the workers; nothing where there are none, so that an id is typed. */
function deviceChoices(served) {
  const ids = [...new Set(served.map(({ device }) => device.id))].sort();
  const products = (id) => [...new Set(served.filter(({ device }) => device.id === id).map(({ device }) => `${device.name}, ${bytes(device.total_bytes)}`))];
  return ids.length > 0 ? [["", "Any: the first GPU, or the CPU"], ...ids.map((id) => [id, `${id}: ${products(id).join(" or ")}`])] : [];
}

/** The cards to estimate for, by the catalogue's name or their memory: those that may take the request, or one as large as its limit. */
function cardsOf({ device, hardware, memory_limit_bytes: limit }, served, kinds) {
  const cards = served.filter((row) => row.device.kind === "cuda" && (!device || row.device.id === device)).map(({ device: { name, total_bytes: total } }) =>
    kinds.find((kind) => kind.name === name && kind.total_bytes === total)?.gpu ?? size(total));
  return limit && cards.length > 0 ? [size(limit)] : hardware?.gpu ? [hardware.gpu] : [...new Set(cards)];
}

function size(total) {
  return bytes(total).replace(",", "");
}

/** What the form says of the model, in a few words; null before it does. */
function modelName({ pretrained, config, architecture, target } = {}) {
  return pretrained ?? config?.model_type ?? architecture?.name ?? target ?? null;
}

/** What the form says of a sample, such as "sequence length 1,024". */
function sampleName(batch = {}) {
  const sizes = Object.entries(batch).filter(([, value]) => typeof value === "number");
  return sizes.map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`).join(", ") || "not described yet";
}

/** The part of the form with a field that is still empty. */
function stepOf(path) {
  const name = path.startsWith("spec.model") ? "model" : path.startsWith("spec.batch") ? "largest sample" : path.split(".").at(-1);
  return name.replaceAll("_", " ");
}

function fields(form, paths) {
  return html`<div class="stack">${paths.map((path) => html`<${Field} key=${path} form=${form} path=${path} />`)}</div>`;
}

/** The form's value, the problems of its fields, and the required ones that are empty. */
function valueOf(form) {
  const { value, ...rest } = form.read();
  if (form.name === "CommandSubmission") {
    value.spec.model = { kind: "command", ...value.spec.model };
  }
  return { value, ...rest };
}

/** Requests of common models, by family; what they are filled with can be changed. */
function Presets({ presets, fill }) {
  const choose = ({ target }) => {
    const [family, name] = JSON.parse(target.value);
    fill(presets[family][name]);
    announce(`Filled with: ${name}`);
  };
  return html`<div class="field"><label for="preset">Model from the presets</label>
    <select id="preset" class="input" onInput=${choose}><option value="" hidden>Choose…</option>
      ${Object.entries(presets).map(([family, requests]) => html`<optgroup label=${family}>${Object.keys(requests).map((name) => html`<option value=${JSON.stringify([family, name])}>${name}</option>`)}</optgroup>`)}</select></div>`;
}

/** Registered commands beside workloads that are described; both keep the fields that they share. */
function Kinds({ form }) {
  const kinds = { described: "TuningSubmission", command: "CommandSubmission" };
  const choose = (event) => form.write({ ...valueOf(form).value, spec: undefined }, kinds[event.target.value]);
  return html`<div class="field"><label for="workload-kind">Workload</label>
    <select id="workload-kind" class="input" value=${form.name === kinds.command ? "command" : "described"} onInput=${choose}>
      <option value="described">Described: its model, batch and optimizer</option>
      <option value="command">A command that the operator has registered</option>
    </select></div>`;
}

/** Messages about fields: `checked` gives the form's value, or null after it has marked them; `complain` shows a problem. */
function useChecks(form) {
  const [notice, setNotice] = useState(null);
  useLayoutEffect(() => {
    const wrong = document.querySelector('#form [aria-invalid="true"]');
    for (let around = wrong?.closest("details"); around; around = around.parentElement.closest("details")) {
      around.open = true;
    }
    wrong?.focus();
  }, [form.errors]);
  const summarize = (number, others = []) => {
    const words = number === 1 ? "One field is invalid" : `${number} fields are invalid`;
    setNotice(alertBox("bad", words, "See the messages below.", ...others));
  };
  return {
    notice,
    setNotice,
    checked() {
      const { value, problems } = valueOf(form);
      form.place(problems);
      setNotice(null);
      if (problems.length > 0) {
        summarize(problems.length);
      }
      return problems.length > 0 ? null : value;
    },
    complain(problem) {
      const errors = problem.errors ?? [];
      const left = form.place(errors);
      if (left.length < errors.length) {
        summarize(errors.length - left.length, left.map((error) => `${error.field}: ${error.message}`));
      } else {
        setNotice(html`<div ref=${(place) => place?.scrollIntoView({ block: "nearest" })}>${problemAlert(problem)}</div>`);
      }
    },
  };
}

/** Fills the form with the example that the page's address names. */
function useExample(examples, fill) {
  useEffect(() => {
    const name = new URLSearchParams(location.search).get("example");
    if (Object.hasOwn(examples, name)) {
      fill(examples[name].value);
    }
  }, []);
}

/** Fills the form with the request of the tuning that the page's address names, and says what differs. */
function useRepeated(tuning, { form, fill, schemaOf, setNotice }) {
  useEffect(() => {
    if (tuning?.request) {
      const value = submissionAgain(tuning);
      const { kind, name, arguments: given } = value.spec.model;
      const filled = kind === "command" ? { ...value, spec: { model: { kind, name, arguments: given } } } : value; // the operator's part is read anew
      fill(filled);
      setNotice(alertBox(
        "info",
        null,
        html`<p>Filled with the request of ${linkTo("tunings", tuning.id, tuning.name)}. Nothing runs before you submit it.</p>`,
        raisedLimit(tuning),
        form.unknownFields(filled, schemaOf(filled)).map((problem) => `Not filled in: ${problem.field} ${problem.message}.`),
      ));
    }
  }, []);
}

/** Keeps the form's value in this tab when the session has expired, until the next sign-in. */
function useDraft({ form, fill }) {
  const latest = useRef(form);
  latest.current = form;
  useEffect(() => {
    const kept = stored((storage) => storage.getItem(DRAFT));
    stored((storage) => storage.removeItem(DRAFT));
    if (kept !== null) {
      fill(JSON.parse(kept));
      announce("The form is restored.");
    }
    window.addEventListener(LEAVING, () => stored((storage) => storage.setItem(DRAFT, JSON.stringify(valueOf(latest.current).value))));
  }, []);
}

/** What an act on the storage of this tab gives; null where storage is forbidden. */
function stored(act) {
  try {
    return act(sessionStorage);
  } catch {
    return null;
  }
}

// --- pasting --------------------------------------------------------------------------------------------------------

function Paste({ page: { form, fill, schemaOf } }) {
  const text = useRef(null);
  const [notice, setNotice] = useState(null);
  const act = async () => {
    setNotice(null);
    const found = await parse(text.current.value);
    const value = "spec" in found ? found : { ...valueOf(form).value, spec: found };
    fill(value);
    const unknown = form.unknownFields(value, schemaOf(value)).map((problem) => `${problem.field}: ${problem.message}`);
    setNotice(unknown.length > 0 && alertBox("warn", "Not everything could be filled in", ...unknown));
    announce("The form is filled in.");
  };
  return html`<details>
    <summary>Paste a spec as YAML or JSON</summary>
    <div class="field"><label for="paste-text">A spec, or a whole request</label>
      <textarea id="paste-text" class="input mono" rows="10" spellcheck=${false} ref=${text} placeholder=${"model: {kind: transformers, task: causal-lm, config: {model_type: gpt2}}\nbatch: {sequence_length: 1024}"} /></div>
    <div id="paste-problem">${notice}</div>
    <${Button} act=${act} onProblem=${(problem) => setNotice(problemAlert(problem))}>Fill the form<//>
  </details>`;
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

// --- estimate -------------------------------------------------------------------------------------------------------

/** What fits on the cards, by an estimate that is made anew when the typing pauses. Submitting does not wait for it. */
function Estimate({ request: { spec, effective_batch_size, memory_margin }, isComplete, cards }) {
  const [other, setOther] = useState("");
  const [isOpen, setOpen] = useState(false);
  const [shown, setShown] = useState(null);
  const known = useRead(isOpen && may("tunings:read") ? "/v1/gpus" : null);
  const gpus = other === "" ? cards : [other];
  const body = isComplete && gpus.length > 0 ? JSON.stringify({ spec, gpus, effective_batch_size, memory_margin }) : "";
  useEffect(() => {
    const cancelling = new AbortController();
    const { signal } = cancelling;
    const estimate = async () => {
      setShown(html`<p class="muted">Estimating what fits on ${gpus.join(", ")} (${elapsed(new Date().toISOString())})… You can submit meanwhile.</p>`);
      const found = await post("/v1/estimates", JSON.parse(body), { signal });
      setShown(html`${found.gpus.map(verdictWords)}<p class="muted small">Estimated in ${seconds(found.seconds)}, not measured: the tuning proves what fits.</p>
        <details><summary>Details of the estimate</summary>${estimateTable(found)}${found.notes.map((note) => html`<p class="small">${note}</p>`)}</details>`);
    };
    const attempt = () => estimate().catch((problem) => signal.aborted || setShown(html`<p class="muted">No estimate yet. ${problem.errors?.map(({ field, message }) => `${field}: ${message}.`).join(" ") || problem.detail}</p>
      ${problem.isTransient && html`<div><button type="button" class="button button-small" onClick=${attempt}>Try again</button></div>`}`));
    const timer = body && setTimeout(attempt, PAUSE_MILLISECONDS);
    setShown(null);
    return () => {
      clearTimeout(timer);
      cancelling.abort();
    };
  }, [body]);
  return html`<div id="estimated" class="stack" role="status">${shown}</div>
    <details onToggle=${({ target }) => setOpen(target.open)}><summary>${cards.length > 0 ? "Estimate for another GPU" : "Estimate for a GPU that is not here"}</summary>
      <div class="field"><label for="gpu-choice">GPU to estimate for</label>
        <select id="gpu-choice" class="input" value=${other} onInput=${({ target }) => setOther(target.value)}><option value="">${cards.join(", ") || "None"}</option>
          ${known?.items.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}</select></div>
    </details>`;
}

render(html`<${NewTuning} />`, byId("page"));
