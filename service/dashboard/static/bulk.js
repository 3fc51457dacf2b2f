/**
 * Cancels or deletes several tunings or jobs: asks first, sends them in parts, and shows the result of each. Loaded when it is needed.
 *
 *   const change = await changeAll({ kind: "tuning", action: "delete", rows, others, place })
 */

import { post } from "./api.js";
import { h, replace } from "./dom.js";
import { count, plural, shortId, words } from "./format.js";
import { alertBox, confirmDialog, problemAlert } from "./parts.js";

const MOST_IDS = 100; // of one request
const MOST_NAMED = 8;
const DONE = { cancel: "cancelled", delete: "deleted" };
const CONSEQUENCES = {
  cancel: {
    tuning: "Those that run are stopped. Probes that have ended stay recorded.",
    job: "Those that run are stopped. Checkpoints that were written stay.",
  },
  delete: {
    tuning: "Their probes and events are deleted too. Their recommendations stay. This cannot be undone.",
    job: "Their events, logs, checkpoints and weights are deleted too. This cannot be undone.",
  },
};

/**
 * @param {{kind: "tuning"|"job", action: "cancel"|"delete", rows: Object[], others: Object[], place: HTMLElement}} act  `others` were
 *   chosen too, and are not sent. The results are shown in `place`.
 * @returns {Promise<?(row: Object) => ?Object>}  How the rows of a list change; null when nothing was sent.
 */
export async function changeAll({ kind, action, rows, others, place }) {
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
  replace(place, results.size > 0 && report(kind, action, rows, results), problem && problemAlert(problem));
  return (row) => changed(row, results.get(row.id));
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
  return h("div", { class: "stack" },
    h("ul", {}, rows.slice(0, MOST_NAMED).map((row) => h("li", {}, nameOf(row), h("span", { class: "muted" }, ` ${row.model}, ${words(row.state).toLowerCase()}`))), more > 0 && h("li", {}, `and ${count(more)} more`)),
    h("p", {}, CONSEQUENCES[action][kind]),
    left && h("p", {}, left));
}

function report(kind, action, rows, results) {
  const sent = rows.filter((row) => results.has(row.id));
  const refused = sent.filter((row) => results.get(row.id).problem !== null);
  const done = sent.filter((row) => results.get(row.id).problem === null);
  const list = (found, text) => h("ul", {}, found.map((row) => h("li", {}, nameOf(row), ": ", text(results.get(row.id)))));
  return alertBox(
    refused.length > 0 ? "warn" : "ok",
    `${plural(done.length, kind)} ${DONE[action]}${refused.length > 0 ? `, ${count(refused.length)} refused` : ""}`,
    refused.length > 0 && list(refused, ({ problem }) => problem.detail),
    done.length > 0 && h("details", {}, h("summary", {}, "Show them"), list(done, ({ state }) => (state === null ? DONE[action] : words(state).toLowerCase()))),
  );
}

function nameOf(row) {
  return row.name === null ? h("span", { class: "mono", title: row.id }, shortId(row.id)) : h("span", { title: row.id }, row.name);
}
