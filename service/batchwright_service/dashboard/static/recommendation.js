/** The page of a recommendation: plan and proof, exports, estimates for other GPUs, and the evidence. */

import { get, may } from "./api.js";
import { Answer, Proof, readingInWords, warnings } from "./answer.js";
import { commandOf, modelName } from "./command.js";
import { codeBlock, definitions, linkTo, nameFacts, problemAlert, scopeAlert, time, variables } from "./components.js";
import { byId } from "./dom.js";
import { OtherGpus } from "./estimate_table.js";
import { Exports } from "./export_form.js";
import { plural, seconds } from "./format.js";
import { eventually } from "./live.js";
import { html, render, useEffect, useLayoutEffect, useState } from "./preact-htm.js";
import { StaleAlert } from "./staleness.js";
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
  useEffect(() => void document.getElementById(location.hash.slice(1))?.scrollIntoView(), [found]);
  const title = found ? headline({ ...found, ...found.request }, modelName(found.request.spec.model)) : id;
  useEffect(() => {
    document.title = `${title} · Recommendation · Batchwright`;
  }, [title]);
  return html`
    <div class="page-head">
      <nav class="crumbs small" aria-label="Breadcrumb"><a href="/recommendations">Recommendations</a></nav>
      <h1>Recommendation ${found && html`<span id="model">${title}</span>`}</h1>
      ${found && html`<div class="page-actions"><a class="button" href="/recommendations?fingerprint=${found.fingerprint}">All with this request</a></div>`}
      <p class="page-lead"><code>${id}</code>${found && ` for ${found.device.name}`}</p>
    </div>
    ${!may("tunings:read") && scopeAlert("tunings:read")}
    ${problem && problemAlert(problem, { retry: start })}
    ${found && sections(found, formats)}`;
}

function sections(found, formats) {
  const command = commandOf(found.request);
  return html`
    <${StaleAlert} id=${id} />
    <${Answer} found=${found}>${found.evidence.tuning_id && html`<span>Found by tuning ${linkTo("tunings", found.evidence.tuning_id)}: ${probesInWords(found)}.</span>`}<//>
    ${warnings(found)}
    ${found.evidence.proof.fits > 0 && html`<${Card} name="proof" title="Proof"><div id="proof" class="stack"><${Proof} found=${found} />
      ${found.feasible && variables(found.environment, "Environment variables of the job")}
    </div><//>`}
    ${found.feasible && html`<div id="exports"><${Card} name="exports" title="Exports"><${Exports} path=${path} formats=${formats} command=${command} /><//></div>`}
    ${found.feasible && html`<${Card} name="gpus" title="On other GPUs" aside=${html`<span class="muted small">estimated, not measured</span>`}>
      ${command ? html`<p id="gpus" class="text">A command cannot be estimated: only a run shows its memory.</p>` : html`<${OtherGpus} request=${found.request} />`}
    <//>`}
    <${Card} name="facts" title="Evidence"><div id="facts" class="stack">
      ${definitions(facts(found))}
      <details><summary>Request</summary>${codeBlock(JSON.stringify(found.request, null, 2), { label: "Request", download: `${id}.json` })}</details>
    </div><//>`;
}

function probesInWords({ timings }) {
  return `${plural(timings.probes, "probe")} in ${seconds(timings.probe_seconds)}, ${timings.out_of_memory_probes} out of memory`;
}

function facts(found) {
  return [
    ...nameFacts(found, "recommendations"),
    ["Device", `${found.device.id}: ${found.device.name}`],
    ["Created", time(found.created_at)],
    ["Probes", probesInWords(found)],
    ["Data read", readingInWords(found.evidence.data)],
    ["Fingerprint", html`<code>${found.fingerprint}</code>`],
    ["Versions", Object.entries(found.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ];
}

render(html`<${RecommendationPage} />`, byId("page"));
