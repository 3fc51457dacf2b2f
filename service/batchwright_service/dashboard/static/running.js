/**
 * Running work as cards, each with its newest probe or its progress.
 *
 *   const detailed = await withProgress(works, signal)     reads the details of each; those of unchanged work are kept
 *   detailed.map(runningCard)
 */

import { get } from "./api.js";
import { badge, bar, elapsed } from "./components.js";
import { peakWords } from "./device_words.js";
import { count, number, plural, seconds } from "./format.js";
import { html } from "./preact-htm.js";

export const PATHS = { tuning: "tunings", job: "jobs" };

const known = new Map(); // by id: {events, detail}, so that only what changed is read again

/** Returns the work, each with the probes of a tuning or the progress of a job as its `detail`. */
export function withProgress(works, signal) {
  const ids = new Set(works.map((work) => work.id));
  [...known.keys()].filter((id) => !ids.has(id)).forEach((id) => known.delete(id));
  return Promise.all(works.map((work) => withDetail(work, signal)));
}

async function withDetail(work, signal) {
  const before = known.get(work.id);
  if (before?.events === work.events) {
    return { ...work, detail: before.detail };
  }
  const found = await get(work.kind === "tuning" ? `/v1/tunings/${work.id}/probes` : `/v1/jobs/${work.id}`, { signal });
  const detail = work.kind === "tuning" ? found.items : found.progress;
  known.set(work.id, { events: work.events, detail });
  return { ...work, detail };
}

/** A piece of work with its `kind` and `detail`. */
export function runningCard(work) {
  return html`<article key=${work.id} class="card running">
    <div class="card-head"><h3><a href="/${PATHS[work.kind]}/${work.id}">${work.name ?? work.model}</a></h3>${badge(work.state)}</div>
    <p class="muted small">${work.kind === "tuning" ? "Tuning" : "Job"} of ${work.model} on ${work.device ?? work.hardware}, effective batch ${count(work.effective_batch_size)}, for ${elapsed(work.started_at)}</p>
    ${work.kind === "tuning" ? probes(work) : progress(work)}
  </article>`;
}

function probes(work) {
  const last = work.detail?.at(-1)?.result;
  if (last === undefined) {
    return html`<p class="small">${work.probes > 0 ? plural(work.probes, "probe") : "The first probe is running"}</p>`;
  }
  return html`<p class="small">${plural(work.detail.length, "probe")}; last: micro-batch ${count(last.micro_batch_size)}, <span class="nowrap">peak ${peakWords(last)} ${badge(last.outcome)}</span></p>`;
}

function progress({ detail }) {
  if (!detail) {
    return html`<p class="small">The first update is running</p>`;
  }
  const { update, updates, loss = null, seconds: each } = detail; // a command reports no loss, and may not know its updates
  if (updates === null) {
    return html`<p class="small">${plural(update, "update")}</p>`;
  }
  const left = each && update < updates ? `, about ${seconds((updates - update) * each)} left` : "";
  return bar({ value: update, max: updates, label: "Progress", text: `Update ${count(update)} of ${count(updates)}${loss === null ? "" : `, loss ${number(loss, 4)}`}${left}` });
}
