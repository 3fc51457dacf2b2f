/**
 * Live updates of a page. They pause while the page is hidden, reconnect automatically after the service was
 * unavailable, and report the connection to the header ("Live", "Reconnecting…").
 *
 *   const following = follow(`/v1/tunings/${id}/events`, (event) => ..., {after: tuning.events, onEnd: reload})
 *   const polling = poll(async (signal) => show(await get("/v1/queue", {signal})), 3)
 *   following.stop(); polling.now(); polling.stop();
 *
 *   const tuning = await eventually(() => get(`/v1/tunings/${id}`))      waits until the service responds
 *
 * `follow` reads server-sent events with fetch, not `EventSource`: so it can begin after an event that the page already
 * knows (Last-Event-ID), see the status of an error, and release the connection while the page is hidden.
 */

import { ApiProblem, request } from "./api.js";

const FIRST_PAUSE_SECONDS = 1;
const LONGEST_PAUSE_SECONDS = 6;
const SILENCE_SECONDS = 45; // the service sends a comment every 15 s

/** The states in which work has ended. */
export const ENDED = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

/**
 * Follows a stream of events to its end.
 *
 * @param {string} path  For example `/v1/jobs/job_.../events`.
 * @param {(event: Object) => void} onEvent  Called with each event of the API, in order, each once.
 * @param {{after?: number, onState?: (state: "live"|"reconnecting"|"ended"|"failed") => void, onEnd?: () => void,
 *   onProblem?: (problem: ApiProblem) => void}} options  `after` is the id of the newest event the page knows. `onEnd`:
 *   there will be no more events. `onProblem`: the stream cannot be read (the work was deleted, or the scope is missing).
 * @returns {{stop: () => void}}
 */
export function follow(path, onEvent, { after = 0, onState, onEnd, onProblem } = {}) {
  const stopping = new AbortController();
  const reporter = makeReporter(onState);
  const stream = { path, lastId: after, atEnd: false, ended: false, deliver: (event) => guarded(() => onEvent(event)) };
  followAll(stream, reporter, stopping.signal).then(
    () => {
      reporter.leave(stream.ended ? "ended" : undefined);
      if (stream.ended) {
        onEnd?.();
      }
    },
    (error) => {
      reporter.leave("failed");
      refuse(error, onProblem);
    },
  );
  return { stop: () => stopping.abort() };
}

/**
 * Calls `fn(signal)` now, and again so many seconds after each call has ended, sooner when the page is shown again. While
 * the service is unavailable, the pauses grow; another error is passed to `onProblem`, and the calls continue.
 *
 * @returns {{stop: () => void, now: () => void}}  `now` makes the next call at once.
 */
export function poll(fn, seconds, { onProblem, onState } = {}) {
  const stopping = new AbortController();
  const reporter = makeReporter(onState);
  const wakeup = makeWakeup();
  pollAll(fn, seconds, { reporter, wakeup, onProblem }, stopping.signal).finally(() => reporter.leave());
  return { stop: () => stopping.abort(), now: wakeup.fire };
}

/**
 * Returns the result of `fn(signal)`, calling it again after a pause while the service is unavailable or busy.
 *
 * @throws what `fn` throws otherwise.
 */
export function eventually(fn) {
  return new Promise((resolve, reject) => {
    const trying = poll(async (signal) => {
      try {
        resolve(await fn(signal));
      } catch (error) {
        if (error instanceof ApiProblem && error.isTransient) {
          throw error;
        }
        reject(error);
      }
      trying.stop();
    }, FIRST_PAUSE_SECONDS);
  });
}

/**
 * Calls `listener(state)` now and whenever the page's connection changes: "idle" (nothing is live here), "live", or
 * "reconnecting".
 */
export function onConnection(listener) {
  listeners.add(listener);
  listener(connection());
}

// --- the state in the header ----------------------------------------------------------------------------------------

const listeners = new Set();
const members = new Map();
let shown = "idle";

function connection() {
  const states = [...members.values()];
  if (states.includes("reconnecting")) {
    return "reconnecting";
  }
  return states.length > 0 ? "live" : "idle";
}

function notify() {
  if (connection() !== shown) {
    shown = connection();
    listeners.forEach((listener) => listener(shown));
  }
}

function makeReporter(onState) {
  const member = {};
  let last = null;
  return {
    is(state) {
      members.set(member, state);
      notify();
      if (state !== last) {
        last = state;
        onState?.(state);
      }
    },
    leave(state) {
      members.delete(member);
      notify();
      if (state !== undefined) {
        onState?.(state);
      }
    },
  };
}

// --- streams --------------------------------------------------------------------------------------------------------

/** Connects again and again until the stream has ended or is stopped. Throws errors that a new connection would not resolve. */
async function followAll(stream, reporter, stop) {
  let pause = FIRST_PAUSE_SECONDS;
  while (!stop.aborted && !stream.ended) {
    const before = stream.lastId;
    await visible(stop);
    if (!(await followOnce(stream, reporter, stop))) {
      await sleep(jittered(pause), stop);
      pause = stream.lastId > before ? FIRST_PAUSE_SECONDS : Math.min(2 * pause, LONGEST_PAUSE_SECONDS);
    }
  }
}

/** Reads one connection; returns true when the next may follow at once. */
async function followOnce(stream, reporter, stop) {
  const leaving = new AbortController();
  const stopListening = leaveWhenHidden(leaving, stop);
  stream.atEnd = false;
  try {
    const headers = { Accept: "text/event-stream", "Last-Event-ID": String(stream.lastId) };
    const response = await request("GET", stream.path, undefined, { headers, signal: leaving.signal });
    reporter.is("live");
    if (response.status === 204) {
      stream.ended = true;
    } else {
      await readEvents(response.body, stream, leaving);
    }
    return stream.ended || stream.atEnd; // the next response says whether that was the last event: 204
  } catch (error) {
    if (stop.aborted || (document.hidden && leaving.signal.aborted)) {
      return true;
    }
    if (!isLost(error)) {
      throw error;
    }
    reporter.is("reconnecting");
    return false;
  } finally {
    leaving.abort();
    stopListening();
  }
}

async function readEvents(body, stream, leaving) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const watchdog = silence(() => leaving.abort());
  try {
    let rest = "";
    while (true) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      watchdog.reset();
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      blocks.map(dataOf).filter(Boolean).forEach((data) => take(stream, JSON.parse(data)));
    }
  } finally {
    watchdog.stop();
  }
}

function take(stream, event) {
  stream.lastId = event.id;
  if (event.kind === "state") {
    stream.atEnd = ENDED.has(event.state); // a job may have been resumed since: more may follow
  }
  stream.deliver(event);
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

/** Returns whether the error is a broken connection or a transient refusal. */
function isLost(error) {
  return error instanceof ApiProblem ? error.isTransient : error.name === "AbortError" || error instanceof TypeError;
}

function refuse(error, onProblem) {
  if (error instanceof ApiProblem && onProblem !== undefined) {
    onProblem(error);
  } else {
    reportError(error);
  }
}

function silence(onSilence) {
  let timer = setTimeout(onSilence, 1000 * SILENCE_SECONDS);
  return {
    reset() {
      clearTimeout(timer);
      timer = setTimeout(onSilence, 1000 * SILENCE_SECONDS);
    },
    stop: () => clearTimeout(timer),
  };
}

// --- polls ----------------------------------------------------------------------------------------------------------

async function pollAll(fn, seconds, { reporter, wakeup, onProblem }, stop) {
  let failures = 0;
  while (!stop.aborted) {
    await visible(stop);
    wakeup.reset();
    failures = (await pollOnce(fn, { reporter, onProblem }, stop)) ? 0 : failures + 1;
    const pause = failures === 0 ? seconds : Math.min(seconds * 2 ** (failures - 1), LONGEST_PAUSE_SECONDS);
    await sleep(jittered(Math.max(pause, FIRST_PAUSE_SECONDS)), stop, wakeup);
  }
}

/** Makes one call; returns whether it succeeded. */
async function pollOnce(fn, { reporter, onProblem }, stop) {
  try {
    await fn(stop);
    reporter.is("live");
    return true;
  } catch (error) {
    if (!stop.aborted) {
      reporter.is(error instanceof ApiProblem && error.isTransient ? "reconnecting" : "live");
      pass(error, onProblem);
    }
    return false;
  }
}

function pass(error, onProblem) {
  if (!(error instanceof ApiProblem)) {
    reportError(error);
  } else if (!error.isTransient) {
    onProblem?.(error);
  }
}

/** Reports an error of the page's own code, which must not end a stream. */
function guarded(act) {
  try {
    act();
  } catch (error) {
    reportError(error);
  }
}

// --- time -----------------------------------------------------------------------------------------------------------

/** Resolves once the page can be seen, or `stop` is aborted. */
function visible(stop) {
  return document.hidden && !stop.aborted ? changeOf(document, "visibilitychange", stop) : Promise.resolve();
}

function changeOf(target, event, stop) {
  return new Promise((resolve) => {
    const settle = () => {
      target.removeEventListener(event, settle);
      stop.removeEventListener("abort", settle);
      resolve();
    };
    target.addEventListener(event, settle);
    stop.addEventListener("abort", settle);
  });
}

function leaveWhenHidden(leaving, stop) {
  const leave = () => {
    if (document.hidden || stop.aborted) {
      leaving.abort();
    }
  };
  document.addEventListener("visibilitychange", leave);
  stop.addEventListener("abort", leave);
  return () => {
    document.removeEventListener("visibilitychange", leave);
    stop.removeEventListener("abort", leave);
  };
}

/** Makes a wake-up for `sleep`. One that fires before the sleep begins still ends it. */
function makeWakeup() {
  const wakeup = {
    fired: false,
    onFire: null,
    fire() {
      wakeup.fired = true;
      wakeup.onFire?.();
    },
    reset() {
      wakeup.fired = false;
    },
  };
  return wakeup;
}

/** Resolves after so many seconds, or as soon as `wakeup` fires, or when `stop` is aborted. */
function sleep(seconds, stop, wakeup = makeWakeup()) {
  return new Promise((resolve) => {
    const timer = setTimeout(wake, 1000 * seconds);
    function wake() {
      clearTimeout(timer);
      stop.removeEventListener("abort", wake);
      wakeup.onFire = null;
      resolve();
    }
    stop.addEventListener("abort", wake);
    wakeup.onFire = wake;
    if (wakeup.fired || stop.aborted) {
      wake();
    }
  });
}

/** Adds up to a fifth, so that pages do not reconnect all at once. */
function jittered(seconds) {
  return seconds * (1 + Math.random() / 5);
}
