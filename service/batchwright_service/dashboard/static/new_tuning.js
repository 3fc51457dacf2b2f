/** The page of a new tuning: the form, its value as JSON, and an estimate. */

import { get, LEAVING, may, post } from "./api.js";
import { commandDocument } from "./command_form.js";
import { alertBox, Button, codeBlock, elapsed, linkTo, problemAlert } from "./components.js";
import { announce, byId } from "./dom.js";
import { estimateTable } from "./estimate_table.js";
import { bytes, count, seconds } from "./format.js";
import { eventually } from "./live.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./preact-htm.js";
import { raisedLimit, submissionAgain } from "./reproduce.js";
import { Field, useForm } from "./schema_form.js";

const USUAL_GPUS = ["H100-80GB", "A100-80GB", "L4"];
const OF_SPEC = ["spec.model", "spec.batch", "spec.precision"];
const CARD = ["device", "memory_limit_bytes"];
const NAMES = ["name", "project", "labels"];
const GOAL = ["objective", "baseline"];
const LATER = ["spec.optimizer", "spec.schedule", "spec.parallelism", "spec.data"];
const NOT_OF_COMMANDS = ["what_if", "allow_batch_coupling"];
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
  const known = new Map(devices.items.map(({ device }) => [device.id, `${device.name}, ${bytes(device.total_bytes)}`]));
  const whole = useRef(commandDocument(document, commands)).current;
  const form = useForm(whole, "TuningSubmission", { suggestions: { device: [...known] }, without: (name) => (name === "CommandSubmission" ? NOT_OF_COMMANDS : []) });
  const isCommand = form.name === "CommandSubmission";
  const schemaOf = ({ spec }) => (commands.length > 0 && spec?.model?.kind === "command" ? "CommandSubmission" : "TuningSubmission");
  const fill = (value) => form.write(value, schemaOf(value));
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
  const written = valueOf(form).value;
  const preview = JSON.stringify(written, null, 2);
  return html`${page.notice}
    <form id="form" class="columns" novalidate onSubmit=${(event) => event.preventDefault()}>
      <div class="stack">
        <section class="card" aria-labelledby="model-title"><h2 id="model-title">1. Which model?</h2>
        ${commands.length > 0 && html`<${Kinds} form=${form} />`}
        <${Presets} presets=${document.presets} fill=${fill} />
        <div class="form-buttons" role="group" aria-label="Examples"><span class="label">Or an example</span>${Object.entries(document.examples).map(([name, { value }]) => html`<button type="button" class="button button-small" onClick=${() => {
          fill(value);
          announce(`Filled with: ${name}`);
        }}>${name}</button>`)}</div>
        <${Paste} page=${page} />
        ${isCommand ? fields(form, ["spec.model"]) : html`<details><summary>Describe the model: ${modelName(written.spec?.model)}</summary>${fields(form, ["spec.model"])}</details>`}</section>
        <section class="card" aria-labelledby="batch-title"><h2 id="batch-title">2. Which batch?</h2>${fields(form, ["effective_batch_size"])}
          ${!isCommand && html`<details><summary>The largest sample: ${sampleName(written.spec?.batch)}</summary>${fields(form, ["spec.batch"])}</details>${fields(form, ["spec.precision"])}`}</section>
        <section class="card" aria-labelledby="card-title"><h2 id="card-title">3. Which card?</h2>${fields(form, CARD)}
          ${!isCommand && html`<${Estimate} page=${page} served=${devices.hardware ?? []} />`}</section>
        <details class="card"><summary>Name, project and labels${[written.name, written.project].filter(Boolean).map((text, at) => `${at === 0 ? ": " : ", "}${text}`)}</summary>${fields(form, NAMES)}</details>
        <details class="card"><summary>Advanced: objective, baseline${isCommand ? "" : ", optimizer, parallelism, data"} and search</summary>
          ${fields(form, [...GOAL, ...(isCommand ? [] : [...LATER, ...form.rest("spec", [...OF_SPEC, ...LATER])]), ...form.rest("", ["spec", "effective_batch_size", ...CARD, ...NAMES, ...GOAL])])}</details>
      </div>
      <div class="stack aside">
        <div class="form-buttons submit-bar"><${Button} type="submit" class="button-primary" act=${submit} onProblem=${page.complain} disabled=${!may("tunings:write")}>Submit the tuning<//></div>
        <div id="preview">${codeBlock(preview, { label: "Request body of POST /v1/tunings", download: "tuning.json" })}</div>
      </div>
    </form>`;
}

/** What the form says of the model, in a few words. */
function modelName({ kind, pretrained, config, architecture, target } = {}) {
  return pretrained ?? config?.model_type ?? architecture?.name ?? target ?? `${kind}, not described yet`;
}

/** What the form says of a sample, such as "sequence length 1,024". */
function sampleName(batch = {}) {
  const sizes = Object.entries(batch).filter(([, value]) => typeof value === "number");
  return sizes.map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`).join(", ") || "not described yet";
}

function fields(form, paths) {
  return html`<div class="stack">${paths.map((path) => html`<${Field} key=${path} form=${form} path=${path} />`)}</div>`;
}

/** The form's value and the problems of its fields. */
function valueOf(form) {
  const { value, problems } = form.read();
  if (form.name === "CommandSubmission") {
    value.spec.model = { kind: "command", ...value.spec.model };
  }
  return { value, problems };
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

/** An estimate before anything is submitted, for the served cards or for others: it says for how long it has been under way. */
function Estimate({ page, served }) {
  const [shown, setShown] = useState(null);
  const first = useRef([...new Set(served.map(({ gpu }) => gpu).filter(Boolean))]).current;
  const preferred = first.length > 0 ? first : USUAL_GPUS;
  const [gpus, setGpus] = useState([...new Set([...preferred, ...USUAL_GPUS])]);
  const [hasAll, setHasAll] = useState(false);
  const choice = useRef(null);
  const estimate = async () => {
    const value = page.checked();
    if (value === null) {
      return;
    }
    const { spec, effective_batch_size, memory_margin } = value;
    const cancelling = new AbortController();
    setShown(html`<div class="stack" role="status"><p class="muted">Estimating for ${elapsed(new Date().toISOString())}. This takes seconds, and minutes for large models.</p>
      <progress class="progress" aria-label="Estimate in progress" />
      <div><button type="button" class="button button-small" onClick=${() => cancelling.abort()}>Cancel the estimate</button></div></div>`);
    const chosen = [...choice.current.selectedOptions].map(({ value }) => value);
    const found = await post("/v1/estimates", { spec, gpus: chosen, effective_batch_size, memory_margin }, { signal: cancelling.signal });
    setShown(html`<p class="muted small">Estimated in ${seconds(found.seconds)}, not measured.</p>${estimateTable(found)}${found.notes.map((note) => html`<p class="small">${note}</p>`)}`);
    announce("The estimate is ready.");
  };
  const failed = (problem) => {
    const isCancelled = problem.name === "AbortError";
    setShown(isCancelled && html`<p class="muted" role="status">The estimate is cancelled.</p>`);
    if (!isCancelled) {
      page.complain(problem);
    }
  };
  const offerAll = async () => {
    const { items } = await get("/v1/gpus");
    setGpus([...new Set([...gpus, ...items.map((gpu) => gpu.name)])]);
    setHasAll(true);
    choice.current.focus();
  };
  return html`<div class="stack">
    <div class="form-buttons"><${Button} act=${estimate} onProblem=${failed} disabled=${!may("tunings:write")}>Estimate first<//><span class="muted small">What fits, without a GPU and without submitting anything.</span></div>
    <details><summary>Cards to estimate for: ${preferred.join(", ")}</summary>
      <div class="field"><label for="gpu-choice">GPUs to estimate for</label>
        <select id="gpu-choice" class="input" multiple size="6" ref=${choice}>${gpus.map((name) => html`<option key=${name} value=${name} defaultSelected=${preferred.includes(name)}>${name}</option>`)}</select>
        ${!hasAll && may("tunings:read") && html`<div><${Button} class="button-small" act=${offerAll} onProblem=${failed}>Show all GPUs<//></div>`}</div>
    </details>
    <div id="estimated" class="stack">${shown}</div>
  </div>`;
}

render(html`<${NewTuning} />`, byId("page"));
