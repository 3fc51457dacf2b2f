/**
 * A table of an estimate, with a row for each GPU, marked as estimated, and the versions that were traced.
 *
 *   estimateTable(estimate)                      a node
 *   verdictWords(estimate.gpus[0])               the verdict of one GPU as a sentence
 *   html`<${OtherGpus} request=${request} />`    an estimate of a request for every GPU, once it is asked for
 */

import { get, may, post } from "./api.js";
import { Button, mark, problemAlert, tag } from "./components.js";
import { Table } from "./data_table.js";
import { bytes, bytesExactly, count } from "./format.js";
import { planInWords } from "./plan.js";
import { html, useState } from "./preact-htm.js";

const VERDICTS = {
  fits: ["ok", "check", "fits"],
  uncertain: ["warn", "unknown", "uncertain"],
  "does-not-fit": ["bad", "cross", "does not fit"],
};

const COLUMNS = [
  { title: "GPU", class: "nowrap", cell: (row) => row.gpu },
  { title: "Verdict", cell: (row) => html`<span class="tags">${mark(...VERDICTS[row.feasible])}${tag("estimated")}</span>`, value: (row) => row.feasible },
  { title: "Expected to fit", class: "number", cell: (row) => count(row.largest_micro_batch_size), value: (row) => row.largest_micro_batch_size },
  { title: "At least / at most", class: "number", cell: (row) => `${count(row.surely_fits)} / ${count(row.may_fit)}` },
  { title: "Peak memory", class: "number", cell: ({ peak }) => peak && `${bytes(peak.device_bytes.low)} to ${bytes(peak.device_bytes.high)}` },
  { title: "Reserved / outside the allocator", class: "number", cell: ({ peak }) => peak && `${bytes(peak.reserved_bytes)} / ${bytes(peak.outside_allocator_bytes.expected)}` },
  { title: "Usable", class: "number", cell: (row) => html`<span title=${bytesExactly(row.usable_bytes)}>${bytes(row.usable_bytes)}</span>`, value: (row) => row.usable_bytes },
  { title: "Plan", class: "nowrap", cell: ({ plan: found }) => found && planInWords(found.micro_batch_sizes) },
  { title: "Notes", cell: (row) => row.notes.join(" ") },
];

export function estimateTable({ gpus, versions }) {
  const traced = ["torch", "transformers"].filter((name) => name in versions).map((name) => `${name} ${versions[name]}`);
  return html`<div class="stack">
    <${Table} caption="Estimated, not measured" columns=${COLUMNS} rows=${gpus} keyOf=${(row) => row.gpu} />
    <p class="muted small">Traced with ${traced.join(", ")}.</p>
  </div>`;
}

export function verdictWords({ gpu, feasible, largest_micro_batch_size: size, surely_fits: least, may_fit: most, plan: found, notes }) {
  const bounds = `largest micro-batch size ${count(size)}, at least ${count(least)}, at most ${count(most)}.`;
  const text = size > 0 || most > 0 ? bounds : feasible === "does-not-fit" ? "no sample is expected to fit." : notes.join(" ");
  return html`<p key=${gpu}>${mark(...VERDICTS[feasible])} <b>${gpu}</b>: ${found && `${planInWords(found.micro_batch_sizes)}; `}${text}</p>`;
}

export function OtherGpus({ request: { spec, effective_batch_size, memory_margin } }) {
  const [shown, setShown] = useState(null);
  const estimate = async () => {
    setShown(html`<p class="muted" role="status">Estimating…</p>`);
    const { items } = await get("/v1/gpus");
    const body = { spec, effective_batch_size, memory_margin, gpus: items.map((gpu) => gpu.name) };
    setShown(estimateTable(await post("/v1/estimates", body)));
  };
  return html`<div id="gpus" class="stack">
    <p><${Button} act=${estimate} onProblem=${(problem) => setShown(problemAlert(problem))} disabled=${!may("tunings:write")}>Estimate on GPUs<//>
      <span class="muted small"> within a minute, without a probe</span></p>
    ${shown}
  </div>`;
}
