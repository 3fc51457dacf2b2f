/**
 * Cancels or deletes several tunings or jobs: asks first, sends them in parts, and tells the result of each. Loaded when it is needed.
 *
 *   const { change, report } = await changeAll({ kind: "tuning", action: "delete", rows, others })
 */

import { post } from "./api.js";
import { alertBox, confirmDialog, problemAlert } from "./components.js";
import { count, plural, shortId, words } from "./format.js";
import { html } from "./preact-htm.js";

const MOST_IDS = 100; // of one request
const MOST_NAMED = 8;
const DONE = { cancel: "cancelled", delete: "deleted" };
const CONSEQUENCES = {
  cancel: {
    tuning: "Running ones are stopped. Finished probes stay recorded.",
    job: "Running ones are stopped. Written checkpoints stay.",
  },
  delete: {
    tuning: "Their probes and events are deleted too. Their recommendations stay. This cannot be undone.",
    job: "Their events, logs, checkpoints and weights are deleted too. This cannot be undone.",
  },
};

/**
 * @param {{kind: "tuning"|"job", action: "cancel"|"delete", rows: Object[], others: Object[]}} act  `others` were chosen too, and are not sent.
 * @returns {Promise<?{change: (row: Object) => ?Object, report: Object}>}  How the rows of a list change, and a node with the results; null
 *   when nothing was sent.
 */
export async function changeAll({ kind, action, rows, others }) {
  const button = `${words(action)} ${plural(rows.length, kind)}`;
  if (!(await confirmDialog({ title: `${button}?`, text: question(kind, action, rows, others), action: button, keep: "Keep them" }))) {
    return null;
  }
  const results = new Map();
  let problem = null;
  try {
    for (let start = 0; start < rows.length; start += MOST_IDS) {
      const ids = rows.slice(start, start + MOST_IDS).map((row) => row.id);
      const { items } = await post(`/v1/${kind}s/bulk`, { action, ids });
      items.forEach((result) => results.set(result.id, result));
    }
  } catch (caught) {
    problem = caught;
  }
  const outcome = [results.size > 0 && report(kind, action, rows, results), problem && problemAlert(problem)];
  return { change: (row) => changed(row, results.get(row.id)), report: outcome };
}

/** The row after the act: dropped when it is gone. */
function changed(row, result) {
  if (result === undefined || result.status === 403 || result.status === 409) {
    return row;
  }
  return result.state === null ? null : { ...row, state: result.state };
}

function question(kind, action, rows, others) {
  const more = rows.length - MOST_NAMED;
  const left = others.length > 0 && `${count(others.length)} more selected ${others.length === 1 ? kind : `${kind}s`} cannot be ${DONE[action]}, and will not change.`;
  return html`<div class="stack">
    <ul>
      ${rows.slice(0, MOST_NAMED).map((row) => html`<li>${nameOf(row)}<span class="muted"> ${row.model}, ${words(row.state).toLowerCase()}</span></li>`)}
      ${more > 0 && html`<li>and ${count(more)} more</li>`}
    </ul>
    <p>${CONSEQUENCES[action][kind]}</p>
    ${left && html`<p>${left}</p>`}
  </div>`;
}

function report(kind, action, rows, results) {
  const sent = rows.map((row) => [row, results.get(row.id)]).filter(([, result]) => result !== undefined);
  const refused = sent.filter(([, { problem }]) => problem !== null);
  const done = sent.filter(([, { problem }]) => problem === null);
  const list = (found, text) => html`<ul>${found.map(([row, result]) => html`<li>${nameOf(row)}: ${text(result)}</li>`)}</ul>`;
  const after = ({ state }) => (state === null ? DONE[action] : words(state).toLowerCase());
  return alertBox(
    refused.length > 0 ? "warn" : "ok",
    `${plural(done.length, kind)} ${DONE[action]}${refused.length > 0 ? `, ${count(refused.length)} refused` : ""}`,
    refused.length > 0 && list(refused, ({ problem }) => problem.detail),
    done.length > 0 && html`<details><summary>Show them</summary>${list(done, after)}</details>`,
  );
}

function nameOf({ id, name }) {
  return html`<span class=${name === null ? "mono" : null} title=${id}>${name ?? shortId(id)}</span>`;
}
