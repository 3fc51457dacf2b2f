/** Whether recommendations still hold: what has changed on their devices since, and the tuning that confirms one. */

import { get, may, post } from "./api.js";
import { alertBox, both, Button, linkTo, mark, problemAlert } from "./components.js";
import { plural, shortId } from "./format.js";
import { ENDED, eventually } from "./live.js";
import { html, useEffect, useState } from "./preact-htm.js";

/** Whether a recommendation of a list holds, with what has changed; null where no live device tells. */
export function holdsMark({ stale, changes, confirmed_by: confirmed, replaced_by: replaced }) {
  if (stale === null) {
    return null;
  }
  if (!stale) {
    return both(mark("ok", "check", "holds"), confirmed !== null && html`as ${linkTo("recommendations", confirmed)}`);
  }
  return both(mark("warn", "warning", "stale"), replaced === null ? changesText(changes) : html`replaced by ${linkTo("recommendations", replaced)}`);
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

/** Says that a recommendation is stale, and offers to confirm it; nothing of one that holds. */
export function StaleAlert({ id }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => void eventually((signal) => get(`/v1/recommendations/${encodeURIComponent(id)}/staleness`, { signal })).then(setFound, setProblem), [id]);
  const confirm = async () => {
    setProblem(null);
    location.assign(`/tunings/${encodeURIComponent((await confirmed(id)).id)}`);
    await new Promise((resolve) => window.addEventListener("pageshow", resolve, { once: true })); // the page is left, and may be returned to
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
