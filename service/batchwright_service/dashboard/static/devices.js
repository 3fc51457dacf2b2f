/**
 * Devices and the queue, as the overview and the page of a device show them.
 *
 *   deviceLink(row.slot, row.device.id)      a link to a device's page
 *   worker(row), memory(row), holder(row)    cells of a device of `GET /v1/devices`
 *   queue(rows, "Nothing waits", refresh)    the waiting work of `GET /v1/queue`, each with buttons that cancel it and move it
 *   html`<${Moves} row=${row} done=${f} onProblem=${g} />`    the buttons that move it
 */

import { may, post } from "./api.js";
import { bar, Button, confirmDialog, emptyState, linkTo, mark, nameLink, tag } from "./components.js";
import { Table } from "./data_table.js";
import { bytes, count, nameOrPurpose, seconds } from "./format.js";
import { html, useState } from "./preact-htm.js";
import { PATHS } from "./running.js";

const NEARLY_FULL = 0.9;
const MOST_PRIORITY = 100;
const PRIORITY_STEP = 10;

/** A link to the page of the device in a slot. */
export function deviceLink(slot, text = slot) {
  return html`<a href="/devices/${slot.split("/").map(encodeURIComponent).join("/")}" title=${slot}>${text}</a>`;
}

/** The name of a slot's host. */
export function hostOf(slot) {
  return slot.slice(0, slot.lastIndexOf("/"));
}

export function workLink(id, name = null) {
  return linkTo(PATHS[id.startsWith("job_") ? "job" : "tuning"], id, name);
}

/** What a device runs, or that it is free. */
export function holder(row) {
  if (row.running_id !== null) {
    return workLink(row.running_id);
  }
  return row.alive && row.unready === null ? mark("neutral", "free", "Free") : "–";
}

/** The memory in use of the whole; the whole where no worker reads it. */
export function memory({ memory: now, device: { total_bytes: total } }) {
  const used = now?.used_bytes ?? null;
  return used === null
    ? html`<span>${bytes(total)}<span class="muted"> total</span></span>`
    : bar({ value: used, max: total, label: "Memory used", text: `${bytes(used)} of ${bytes(total)} used`, kind: used > NEARLY_FULL * total ? "warn" : "info" });
}

/** The state of a device's worker. */
export function worker(row) {
  if (!row.alive) {
    return mark("bad", "cross", `Silent for ${seconds(row.heartbeat_age_seconds)}`);
  }
  return row.unready === null ? mark("ok", "check", "Alive") : html`${mark("warn", "warning", "Takes no work")}<div class="small">${row.unready}</div>`;
}

const QUEUE = [
  { title: "Work", class: "nowrap", cell: (row) => html`${nameLink(PATHS[row.kind], row)} ${tag(row.kind)}` },
  { title: "Position", class: "number", cell: (row) => count(row.position) },
  { title: "Model", class: "model", cell: (row) => row.model },
  { title: "Device", class: "nowrap", cell: (row) => row.device ?? row.hardware },
  { title: "Priority", class: "number", cell: (row) => row.priority },
  { title: "Waiting for", class: "number", cell: (row) => seconds(Math.floor(row.age_seconds)) },
  { title: "Expected wait", class: "number", cell: expectedWait },
];

/** The waiting work, or a title where there is none; `refresh` is called after an act. */
export function queue(rows, none, refresh) {
  const cell = (row) => may(row.kind === "job" ? "jobs:run" : "tunings:write") && html`<${Acts} key=${row.id} row=${row} refresh=${refresh} />`;
  const columns = refresh === undefined ? QUEUE : [...QUEUE, { title: "Actions", class: "nowrap wide", cell }];
  return rows.length > 0 ? html`<div class="list-body"><${Table} caption="Queue" columns=${columns} rows=${rows} /></div>` : emptyState({ title: none });
}

/** Buttons that move waiting work before or behind others; `done(document)` is called after an act. */
export function Moves({ row, done, onProblem, texts = ["↑", "↓"] }) {
  const button = (word, step, text) => {
    const priority = Math.min(Math.max(row.priority + step, -MOST_PRIORITY), MOST_PRIORITY);
    const isBounded = priority === row.priority || (priority > 0 && !may("admin"));
    const act = async () => done(await post(`/v1/${PATHS[row.kind]}/${row.id}/priority`, { priority }));
    return html`<${Button} key=${word} class="button-small" act=${act} disabled=${isBounded} onProblem=${onProblem} aria-label="${word} the priority of ${nameOrPurpose(row)}">${text}<//> `;
  };
  return [button("Raise", PRIORITY_STEP, texts[0]), button("Lower", -PRIORITY_STEP, texts[1])];
}

/** Buttons that move a row, and that cancel it. */
function Acts({ row, refresh }) {
  const [problem, setProblem] = useState(null);
  const name = nameOrPurpose(row);
  const done = () => {
    setProblem(null);
    refresh();
  };
  const cancel = async () => {
    if (await confirmDialog({ title: `Cancel ${name}?`, text: `The ${row.kind} has not started. It leaves the queue.`, action: "Cancel it", keep: "Keep it" })) {
      await post(`/v1/${PATHS[row.kind]}/${row.id}/cancel`);
      refresh();
    }
  };
  return html`<div>
    <${Moves} row=${row} done=${done} onProblem=${setProblem} />
    <${Button} class="button-small" act=${cancel} onProblem=${setProblem} aria-label="Cancel ${name}">Cancel<//>${problem && html`<div class="small field-error" role="alert">${problem.detail}</div>`}</div>`;
}

function expectedWait({ unserved, position, expected_wait_seconds: wait }) {
  const unknown = "Shown after three tunings or jobs have ended on this device, while a worker serves it";
  return unserved !== null || wait === null
    ? html`<span class="muted" title=${unserved === null ? unknown : null}>${unserved ?? "not known yet"}</span>`
    : wait < 1 ? `until the ${position > 1 ? "work before it" : "running work"} ends` : `about ${seconds(Math.round(wait))}`;
}
