/** Whether recommendations are still valid: what has changed on their devices since, and the tuning that confirms one. */

import { get, may, post } from "./api.js";
import { alertBox, both, Button, linkTo, mark, problemAlert } from "./components.js";
import { plural, shortId } from "./format.js";
import { ENDED, eventually } from "./live.js";
import { html, useEffect, useState } from "./preact-htm.js";

/** Whether a recommendation of a list is still valid, with what has changed and a button that confirms it; null where no live device tells. */
export function validMark(row) {
  const { stale, changes, feasible, confirmed_by: confirmed, replaced_by: replaced } = row;
  if (stale === null) {
    return null;
  }
  if (!stale) {
    return both(feasible ? mark("ok", "check", "valid") : mark("neutral", "check", "unchanged"), confirmed !== null && html`as ${linkTo("recommendations", confirmed)}`);
  }
  const state = html`${mark("warn", "warning", "stale")}${CONFIRM.applies(row) && html` <${RowConfirmation} row=${row} />`}`;
  return both(state, replaced === null ? changesText(changes) : html`replaced by ${linkTo("recommendations", replaced)}`);
}

function RowConfirmation({ row }) {
  const [problem, setProblem] = useState(null);
  return html`<${Button} class="button-small" act=${() => openConfirmation(row.id)} onProblem=${setProblem} aria-label="Confirm ${row.name ?? row.id}">Confirm<//>${problem && html` <span class="field-error" role="alert">${problem.detail}</span>`}`;
}

/** What stale rows of a list mean. */
export function staleLead(rows) {
  return rows.some(CONFIRM.applies) && alertBox("warn", null, "Stale: the software or the device changed since; confirm before training.");
}

/** @returns {string} such as "torch 2.12.0 → 2.13.0, driver 570 → none" */
function changesText(changes) {
  return changes.map(({ name, before, now }) => `${name} ${before ?? "none"} → ${now ?? "none"}`).join(", ");
}

/** The act that confirms chosen recommendations of a list, each by a tuning; those with a newer plan have nothing to confirm. */
export const CONFIRM = {
  text: "Confirm",
  applies: (row) => row.stale === true && row.replaced_by === null && may("tunings:write"),
  run: async (rows) => {
    const tunings = [];
    let problem = null;
    try {
      for (const row of rows) {
        tunings.push([row, await confirmed(row.id)]);
      }
    } catch (caught) {
      problem = caught;
    }
    return { change: (row) => row, done: tunings.map(([row]) => row), report: [report(tunings), problem && problemAlert(problem)] };
  },
};

/** The submitted tunings, and apart from them those that had ended before. */
function report(tunings) {
  const ended = tunings.filter(([, { state }]) => ENDED.has(state));
  const submitted = tunings.filter(([, { state }]) => !ENDED.has(state));
  return [listed(submitted, "being confirmed"), listed(ended, "confirmed before")];
}

function listed(tunings, words) {
  const lines = tunings.map(([row, { id }]) => html`<li>${row.name ?? shortId(row.id)}: ${linkTo("tunings", id)}</li>`);
  return tunings.length > 0 && alertBox("ok", `${plural(tunings.length, "recommendation")} ${words}`, html`<ul>${lines}</ul>`);
}

const keys = new Map(); // of idempotency: a recommendation is confirmed by one tuning, however often a page requests it

function confirmed(id) {
  if (!keys.has(id)) {
    keys.set(id, crypto.randomUUID?.()); // undefined unless the page came over https or from this machine
  }
  return post(`/v1/recommendations/${encodeURIComponent(id)}/confirm`, undefined, { idempotencyKey: keys.get(id) });
}

/** Opens the tuning that confirms a recommendation. */
async function openConfirmation(id) {
  location.assign(`/tunings/${encodeURIComponent((await confirmed(id)).id)}`);
  await new Promise((resolve) => window.addEventListener("pageshow", resolve, { once: true })); // the page is left, and may be returned to
}

/** Says that a recommendation is stale, and offers to confirm it; nothing of one that holds. */
export function StaleAlert({ id }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => void eventually((signal) => get(`/v1/recommendations/${encodeURIComponent(id)}/staleness`, { signal })).then(setFound, setProblem), [id]);
  const confirm = () => {
    setProblem(null);
    return openConfirmation(id);
  };
  return html`${found?.stale && warning(found, confirm, setProblem)}${problem !== null && problemAlert(problem)}`;
}

function warning({ changes, replaced_by: replaced }, confirm, onProblem) {
  return alertBox(
    "warn",
    "Made under different conditions",
    `${changesText(changes)}. The same request under today's conditions usually takes one probe.`,
    replaced !== null && html`<p>It gave another plan: ${linkTo("recommendations", replaced)}.</p>`,
    replaced === null && may("tunings:write") && html`<p><${Button} act=${confirm} onProblem=${onProblem}>Confirm it<//></p>`,
  );
}
