/** Whether recommendations still hold: what has changed on their devices since, and the tuning that confirms one. */

import { get, may, post } from "./api.js";
import { alertBox, both, Button, linkTo, mark, problemAlert } from "./components.js";
import { plural, shortId } from "./format.js";
import { html, useEffect, useState } from "./preact-htm.js";

/** Whether a recommendation of a list holds, with what has changed; null where no live device tells. */
export function holdsMark({ stale, changes, confirmed_by: confirmed, replaced_by: replaced }) {
  if (stale === null) {
    return null;
  }
  if (!stale) {
    return both(mark("ok", "✓", "holds"), confirmed !== null && html`as ${linkTo("recommendations", confirmed)}`);
  }
  return both(mark("warn", "!", "stale"), replaced === null ? changesText(changes) : html`replaced by ${linkTo("recommendations", replaced)}`);
}

/** @returns {string} such as "torch 2.12.0 → 2.13.0, driver 570 → none" */
function changesText(changes) {
  return changes.map(({ name, before, now }) => `${name} ${before ?? "none"} → ${now ?? "none"}`).join(", ");
}

/** The act that confirms chosen recommendations of a list, each by a tuning. */
export const CONFIRM = {
  text: "Confirm",
  applies: (row) => row.stale === true && may("tunings:write"),
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
    return { change: (row) => row, report: [report(tunings), problem && problemAlert(problem)] };
  },
};

function report(tunings) {
  const lines = tunings.map(([row, { id }]) => html`<li>${row.name ?? shortId(row.id)}: ${linkTo("tunings", id)}</li>`);
  return tunings.length > 0 && alertBox("ok", `${plural(tunings.length, "recommendation")} being confirmed`, html`<ul>${lines}</ul>`);
}

function confirmed(id) {
  return post(`/v1/recommendations/${encodeURIComponent(id)}/confirm`);
}

/** Says that a recommendation is stale, and offers to confirm it; nothing of one that holds. */
export function StaleAlert({ id }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => void get(`/v1/recommendations/${encodeURIComponent(id)}/staleness`).then(setFound, setProblem), [id]);
  if (problem !== null) {
    return problemAlert(problem);
  }
  if (!found?.stale) {
    return null;
  }
  const confirm = async () => location.assign(`/tunings/${encodeURIComponent((await confirmed(id)).id)}`);
  return alertBox(
    "warn",
    "Made under other conditions than today's",
    `${changesText(found.changes)}. The same request under today's conditions usually takes one probe.`,
    found.replaced_by !== null && html`<p>It gave another plan: ${linkTo("recommendations", found.replaced_by)}.</p>`,
    found.replaced_by === null && may("tunings:write") && html`<p><${Button} act=${confirm} onProblem=${setProblem}>Confirm it<//></p>`,
  );
}
