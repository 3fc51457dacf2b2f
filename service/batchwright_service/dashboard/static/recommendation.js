/** The page of a recommendation: plan and proof, exports, estimates for other GPUs, and the evidence. */

import { get, may, post } from "./api.js";
import { commandOf, modelName } from "./command.js";
import { Button, codeBlock, definitions, linkTo, nameFacts, problemAlert, scopeAlert, time } from "./components.js";
import { byId } from "./dom.js";
import { estimateTable } from "./estimate_table.js";
import { Exports } from "./export_form.js";
import { plural, seconds } from "./format.js";
import { eventually } from "./live.js";
import { infeasible, planAndProof, warnings } from "./plan.js";
import { html, render, useEffect, useLayoutEffect, useState } from "./preact-htm.js";
import { StaleAlert } from "./staleness.js";
import { openTrainDialog } from "./train_dialog.js";
import { Card, headline } from "./work.js";

const { id } = byId("page").dataset;
const path = `/v1/recommendations/${encodeURIComponent(id)}`;

function RecommendationPage() {
  const [{ found, formats, problem }, setState] = useState({});
  const start = () => eventually(() => Promise.all([get(path), get("/v1/exports")])).then(
    ([read, { items }]) => setState({ found: read, formats: items }),
    (caught) => setState({ problem: caught }),
  );
  useLayoutEffect(() => may("tunings:read") && start(), []);
  const title = found ? headline(found, modelName(found.request.spec.model)) : id;
  useEffect(() => {
    document.title = `${title} · Recommendation · Batchwright`;
  }, [title]);
  return html`
    <div class="page-head">
      <nav class="crumbs small" aria-label="Breadcrumb"><a href="/recommendations">Recommendations</a></nav>
      <h1>Recommendation ${found && html`<span id="model">${title}</span>`}</h1>
      ${found && html`<${Actions} found=${found} />`}
      <p class="page-lead"><code>${id}</code>${found && ` for ${found.device.name}`}</p>
    </div>
    ${!may("tunings:read") && scopeAlert("tunings:read")}
    ${problem && problemAlert(problem, { retry: start })}
    ${found && sections(found, formats)}`;
}

function Actions({ found }) {
  const [problem, setProblem] = useState(null);
  const train = () => openTrainDialog(found).catch(setProblem);
  return html`<div class="page-actions">
    ${problem && problemAlert(problem)}
    ${found.feasible && may("jobs:run") && html`<button type="button" class="button button-primary" aria-haspopup="dialog" onClick=${train}>Train</button>`}
    <a class="button" href="/recommendations?fingerprint=${found.fingerprint}">Same request</a>
  </div>`;
}

function sections(found, formats) {
  const command = commandOf(found.request);
  const environment = Object.entries(found.environment).map(([name, value]) => `${name}=${value}`).join("\n");
  return html`
    <${StaleAlert} id=${id} />
    ${warnings(found)}
    <${Card} name="answer" title="Plan"><div id="answer" class="stack">
      ${found.feasible ? planAndProof(found) : infeasible(found)}
      ${found.feasible && environment && codeBlock(environment, { label: "Environment variables of the job" })}
    </div><//>
    ${found.feasible && html`<div id="exports"><${Card} name="exports" title="Exports"><${Exports} path=${path} formats=${formats} command=${command} /><//></div>`}
    <${Card} name="gpus" title="On other GPUs" aside=${html`<span class="muted small">estimated, not measured</span>`}><div id="gpus" class="stack">
      ${command ? html`<p class="text">Nothing of a command is estimated: only a run shows its memory.</p>` : html`<${OtherGpus} request=${found.request} />`}
    </div><//>
    <${Card} name="facts" title="Evidence"><div id="facts" class="stack">
      ${definitions(facts(found))}
      ${codeBlock(JSON.stringify(found.request, null, 2), { label: "Request", download: `${id}.json` })}
    </div><//>`;
}

function facts(found) {
  return [
    ...nameFacts(found, "recommendations"),
    ["Device", `${found.device.id}: ${found.device.name}`],
    ["Created", time(found.created_at)],
    ["Tuning that ran the probes", found.evidence.tuning_id && linkTo("tunings", found.evidence.tuning_id)],
    ["Probes", `${plural(found.timings.probes, "probe")} in ${seconds(found.timings.probe_seconds)}, ${found.timings.out_of_memory_probes} out of memory`],
    ["Fingerprint", html`<code>${found.fingerprint}</code>`],
    ["Versions", Object.entries(found.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ];
}

/** An estimate for every GPU of the table, once it is asked for. */
function OtherGpus({ request: { spec, effective_batch_size, memory_margin } }) {
  const [shown, setShown] = useState(null);
  const estimate = async () => {
    setShown(html`<p class="muted" role="status">Estimating…</p>`);
    const { items } = await get("/v1/gpus");
    const body = { spec, effective_batch_size, memory_margin, gpus: items.map((gpu) => gpu.name) };
    setShown(estimateTable(await post("/v1/estimates", body)));
  };
  return html`
    <p class="text">Estimate which GPUs can run this spec, and with which plan. This takes a few seconds and runs no probe.</p>
    <p><${Button} act=${estimate} onProblem=${(problem) => setShown(problemAlert(problem))} disabled=${!may("tunings:write")}>Estimate for every GPU of the catalogue<//></p>
    <div class="stack">${shown}</div>`;
}

render(html`<${RecommendationPage} />`, byId("page"));
