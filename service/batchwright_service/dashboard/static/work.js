/**
 * The shared part of the pages of a tuning and of a job: read and follow the work, show its state, cancel and delete it.
 *
 *   const work = useWork("job", {after: () => 0, onEvent: (event) => ...})
 *   work.current                     the document, or null before it is read
 *   work.change(document)            shows another; work.followAgain() follows its events from the first
 *   html`<${WorkPage} work=${work} deletion="..." action=${["Resume", resume]}>sections<//>`   or a node as the action
 */

import { del, get, keyId, may, post } from "./api.js";
import { alertBox, Button, confirmDialog, problemAlert, scopeAlert, stateBadge, time, took } from "./components.js";
import { shortened, withDetails } from "./device_words.js";
import { deviceLink, Moves } from "./devices.js";
import { announce, byId } from "./dom.js";
import { count, plural, seconds, sentences, words } from "./format.js";
import { ENDED, eventually, follow, poll } from "./live.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./preact-htm.js";

const QUEUE_SECONDS = 3;
const LONGEST_CAUSE = 240;

/**
 * Reads the work of the page, and follows it.
 *
 * @param {"tuning"|"job"} kind
 * @param {{read?: (path: string) => Promise<Object>, after: (work: Object) => ?number, onEvent: (event: Object) => void}} how  `read` gives
 *   the document. Events after that with the id `after(work)` are followed; null follows none. Those of states are followed here.
 */
export function useWork(kind, { read = get, after, onEvent }) {
  const path = `/v1/${kind}s/${encodeURIComponent(byId("page").dataset.id)}`;
  const [current, change] = useState(null);
  const [failed, setFailed] = useState(null);
  const [round, setRound] = useState(0);
  const latest = useRef(null);
  latest.current = { current, onEvent };
  const complain = (problem, retry = () => location.reload()) => setFailed({ problem, retry });
  const refresh = () => read(path).then(change, complain);
  const start = () => {
    setFailed(null);
    eventually(() => read(path)).then(change, (problem) => complain(problem, start));
  };
  useLayoutEffect(() => may(`${kind}s:read`) && start(), []);
  const isThere = current !== null;
  useEffect(() => {
    const first = isThere ? after(current) : null;
    if (first === null) {
      return undefined;
    }
    return follow(`${path}/events`, (event) => {
      if (event.kind !== "state") {
        latest.current.onEvent(event);
      } else if (event.state !== latest.current.current.state) {
        refresh();
      }
    }, { after: first, onEnd: refresh, onProblem: complain }).stop;
  }, [isThere, round]);
  const isPolled = current?.state === "QUEUED" || (kind === "tuning" && current?.state === "RUNNING");
  useEffect(() => isPolled ? poll(async (signal) => {
    const { queue, activity } = await get(path, { signal }); // there are no events for the position in the queue, nor for what it does
    signal.throwIfAborted();
    change((before) => ({ ...before, queue, activity }));
  }, QUEUE_SECONDS).stop : undefined, [isPolled]);
  useAnnouncement(kind, current?.state);
  return { kind, path, writeScope: kind === "job" ? "jobs:run" : "tunings:write", current, failed, change, complain, followAgain: () => setRound((before) => before + 1) };
}

/** Announces the end of work that was not yet at its end. */
function useAnnouncement(kind, state) {
  const before = useRef(undefined);
  useEffect(() => {
    if (before.current !== undefined && before.current !== state && ENDED.has(state)) {
      announce(`The ${kind} is ${words(state).toLowerCase()}.`);
    }
    before.current = state;
  }, [state]);
}

/** The page: its head with the state and the actions, the problem, and the sections of the kind. */
export function WorkPage({ work, deletion, action, children }) {
  const { kind, writeScope, current, failed } = work;
  const id = byId("page").dataset.id;
  const title = current === null ? id : headline(current, current.model);
  useEffect(() => {
    document.title = `${title} · ${words(kind)} · Batchwright`;
  }, [title]);
  return html`
    <div class="page-head">
      <nav class="crumbs small" aria-label="Breadcrumb"><a href="/${kind}s">${words(kind)}s</a></nav>
      <h1>${words(kind)} ${current && html`<span id="model">${title}</span>`}</h1>
      ${current && html`<span id="state">${stateBadge(current)}</span>`}
      ${current && may(writeScope) && html`<${Actions} work=${work} deletion=${deletion} action=${action} />`}
      <p class="page-lead"><code>${id}</code></p>
    </div>
    ${!may(`${kind}s:read`) && scopeAlert(`${kind}s:read`)}
    ${failed && problemAlert(failed.problem, { retry: failed.retry })}
    ${current && children}`;
}

/** The name of work or of a recommendation, and what it is for. */
export function headline({ name, effective_batch_size: samples }, model) {
  return `${name === null ? "" : `${name}: `}${model}, ${plural(samples, "sample")}`;
}

/** True if the signed-in key may change the work. */
export function isOwn({ key_id: key }) {
  return keyId() === (key ?? "") || may("admin");
}

function Actions({ work: { kind, path, current, change, complain }, deletion, action }) {
  const { state } = current;
  const own = isOwn(current);
  const ended = ENDED.has(state);
  const cancel = async () => change(await post(`${path}/cancel`));
  const remove = async () => {
    if (await confirmDialog({ title: `Delete this ${kind}?`, text: deletion, action: "Delete" })) {
      await del(path);
      location.assign(`/${kind}s`);
    }
  };
  const button = (text, act, style, disabled = false) => html`<${Button} key=${text} class=${style} act=${act} onProblem=${complain} disabled=${disabled}>${text}<//>`;
  return html`<div class="page-actions" id="actions">
    ${Array.isArray(action) ? button(...action, "button-primary") : action}
    ${!ended && own && button(state === "CANCELLING" ? "Cancelling…" : "Cancel", cancel, "button-danger", state === "CANCELLING")}
    ${ended && own && button("Delete", remove, "button-danger")}
  </div>`;
}

/** A section of the page with its heading. */
export function Card({ name, title, aside, children }) {
  return html`<section class="card" aria-labelledby="${name}-title">
    <div class="card-head"><h2 id="${name}-title">${title}</h2>${aside}</div>
    ${children}
  </section>`;
}

/** When queued work starts, and what may be done until then. */
export function Waiting({ work }) {
  const { queue, priority } = work.current;
  const moved = (found) => work.change((before) => ({ ...before, priority: found.priority }));
  return html`<h2 id="answer-title">${positionInWords(work.current)}</h2>
    <p>${startInWords(queue)} <a href="/#queue-title">The whole queue</a></p>
    <div class="page-actions"><span>Priority ${priority} <span class="muted">(a higher number starts first)</span></span>${may(work.writeScope) && isOwn(work.current) && html`<${Moves} row=${{ ...work.current, kind: work.kind }} done=${moved} onProblem=${work.complain} texts=${["Raise", "Lower"]} />`}</div>`;
}

/** A position in the queue in words: "Next on cpu". */
function positionInWords({ queue, device, hardware }) {
  const place = queue && ({ 1: "Next", 2: "Second" }[queue.position] ?? `Number ${count(queue.position)}`);
  return `${place ?? "Waiting"} ${place ? "on" : "for"} ${device ?? hardware}${queue?.unserved ? `: ${queue.unserved}` : ""}`;
}

/** When the work starts, and what may be done until then. */
function startInWords(queue) {
  const wait = queue?.expected_wait_seconds ?? null;
  if (queue?.unserved) {
    return "It starts once a worker can take it. Otherwise cancel it, and choose another device.";
  }
  return wait === null ? "It starts by itself when its device is free." : wait < 1 ? `It starts when ${queue.position > 1 ? "the work before it" : "the running work"} ends.` : `It starts in about ${seconds(wait)}.`;
}

/** The device of work: of the host that took it, as a link; before that, what it needs. */
export function deviceOf({ slot, device, hardware }) {
  return slot ? deviceLink(slot) : device ?? hardware;
}

/** The times and the owner of the work, for `definitions`. */
export function runFacts(work) {
  return [
    ["Submitted", time(work.created_at)],
    ["Duration", took(work)],
    ["Attempts", work.attempts > 1 ? `${work.attempts}: taken over or restarted` : null],
    ["Owner", work.key_id && html`<span title=${work.key_id}>${work.owner ?? work.key_id}</span>`],
  ];
}

/** The problem of failed work, its cause first, and what to do about it; or null. */
export function failure({ problem }, more = null) {
  if (problem === null) {
    return null;
  }
  const [first, ...rest] = sentences(problem.detail);
  const cause = first.replace(/^[a-z](?=[a-z]* )/, (letter) => letter.toUpperCase()); // of a word, and no field
  const isShort = cause.length <= LONGEST_CAUSE && shortened(cause) === cause;
  const text = isShort ? rest.join(" ") : problem.detail;
  return alertBox("bad", isShort ? cause : problem.title, text && html`<div class="preline">${withDetails(text)}</div>`, more, html`<p class="small">Code: <code>${problem.code}</code></p>`);
}
