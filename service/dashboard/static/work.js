/**
 * The shared part of the pages of a tuning and of a job: read and follow the work, show its state, cancel and delete it.
 *
 *   const work = makeWorkPage({
 *     kind: "tuning",
 *     writeScope: "tunings:write",
 *     deletion: "Its probes go with it.",          the text of the dialog
 *     read: async (path) => ...,                   returns the document; by default the one at `path`
 *     show: () => ...,                             shows the rest of `work.current`, which has changed
 *     showWaiting: () => ...,                      the queue position has changed: `work.current.queue`
 *     begin: () => ...,                            once, when it was read for the first time
 *     action: ({ended, own}) => ["Repeat", f],     the first button, or false
 *     leave: () => ...,                            before it is deleted
 *   })
 *   work.start(); work.current; work.path; work.change(document); work.complain(problem)
 *   work.follow((event) => ..., {after: 3})        events other than of states, which are followed here
 */

import { del, get, keyId, may, post } from "./api.js";
import { withDetails } from "./device_words.js";
import { announce, byId, h, replace, setText } from "./dom.js";
import { count, seconds, time, took, words } from "./format.js";
import { ENDED, eventually, follow, poll } from "./live.js";
import { alertBox, busy, confirmDialog, problemAlert, scopeAlert, stateBadge } from "./parts.js";

const QUEUE_SECONDS = 3;

export function makeWorkPage({ kind, writeScope, deletion, read = get, show, showWaiting, begin, action, leave }) {
  const pages = `/${kind}s`;
  const path = `/v1${pages}/${encodeURIComponent(byId("work").dataset.id)}`;
  const work = { path, current: null, start, change, complain, follow: followEvents };
  let shownState = null;
  let following = null;
  let waiting = null;

  async function start() {
    if (!may(`${kind}s:read`)) {
      replace(byId("notices"), scopeAlert(`${kind}s:read`));
      return;
    }
    let first;
    try {
      first = await eventually(() => read(path));
    } catch (problem) {
      replace(byId("notices"), problemAlert(problem, { retry: start }));
      return;
    }
    byId("content-body").hidden = false;
    change(first);
    begin();
  }

  async function refresh() {
    try {
      change(await read(path));
    } catch (problem) {
      complain(problem);
    }
  }

  /** Shows the work as it is now. */
  function change(current) {
    work.current = current;
    setText(byId("model"), current.name === null ? `of ${current.model}` : `${current.name}, of ${current.model}`);
    replace(byId("state"), stateBadge(kind === "tuning" ? current : { state: current.state }));
    replace(byId("actions"), actions());
    followPosition();
    show();
    if (shownState !== null && shownState !== current.state && ENDED.has(current.state)) {
      announce(`The ${kind} is ${words(current.state).toLowerCase()}.`);
    }
    shownState = current.state;
  }

  function complain(problem) {
    replace(byId("notices"), problemAlert(problem, { retry: () => location.reload() }));
  }

  function followEvents(onEvent, { after = 0 } = {}) {
    following?.stop();
    following = follow(`${path}/events`, (event) => {
      if (event.kind !== "state") {
        onEvent(event);
      } else if (event.state !== work.current.state) {
        refresh();
      }
    }, { after, onEnd: refresh, onProblem: complain });
  }

  /** Polls the work while it waits: there are no events for the queue position. */
  function followPosition() {
    if (work.current.state !== "QUEUED") {
      waiting?.stop();
      waiting = null;
    } else {
      waiting ??= poll(async (signal) => {
        const { queue } = await get(path, { signal });
        if (!signal.aborted) {
          work.current.queue = queue;
          showWaiting();
        }
      }, QUEUE_SECONDS);
    }
  }

  function actions() {
    if (!may(writeScope)) {
      return [];
    }
    const { key_id: key, state } = work.current;
    const own = keyId() === (key ?? "") || may("admin");
    const ended = ENDED.has(state);
    const first = action({ ended, own });
    return [
      first && button(...first, "button-primary"),
      !ended && own && button(state === "CANCELLING" ? "Cancelling…" : "Cancel", cancel, "button-danger", state === "CANCELLING"),
      ended && own && button("Delete", remove, "button-danger"),
    ];
  }

  function button(text, act, style, disabled = false) {
    const element = h("button", { type: "button", class: `button ${style}`, disabled }, text);
    element.addEventListener("click", () => busy(element, act).catch(complain));
    return element;
  }

  async function cancel() {
    change(await post(`${path}/cancel`));
  }

  async function remove() {
    if (await confirmDialog({ title: `Delete this ${kind}?`, text: deletion, action: "Delete" })) {
      leave?.();
      await del(path);
      location.assign(pages);
    }
  }

  return work;
}

/** A position in the queue in words, with the expected wait where one is known. */
export function positionInWords(queue) {
  if (queue === null) {
    return "Waiting for its device.";
  }
  const wait = queue.expected_wait_seconds;
  const expected = queue.unserved !== null ? `: ${queue.unserved}` : wait === null ? "" : `, expected to start in about ${seconds(wait)}`;
  return `Position ${count(queue.position)} in its queue${expected}.`;
}

/** The times and the slot of the work, for `definitions`. */
export function runFacts(work) {
  return [
    ["Submitted", time(work.created_at)],
    ["Duration", took(work)],
    ["Slot", work.slot],
    ["Attempts", work.attempts > 1 ? `${work.attempts}: taken over or restarted` : null],
  ];
}

/** The key that submitted it, for `definitions`. */
export function keyFact(work) {
  return ["Owner", work.key_id && h("span", { title: work.key_id }, work.owner ?? work.key_id)];
}

/** The problem of failed work, or null. */
export function failure({ problem }) {
  return problem && alertBox("bad", problem.title, h("div", { class: "preline" }, withDetails(problem.detail)), h("p", { class: "small" }, "Code: ", h("code", {}, problem.code)));
}
