/**
 * What changes while one looks at it. Everything here pauses while the page is hidden, goes on by itself after the
 * service was away, and tells the header ("Live", "Reconnecting…").
 *
 *   const following = follow(`/v1/tunings/${id}/events`, (event) => ..., {after: tuning.events, onEnd: reload})
 *   const polling = poll(async (signal) => show(await get("/v1/queue", {signal})), 3)
 *   following.stop(); polling.now(); polling.stop();
 *
 *   const tuning = await eventually(() => get(`/v1/tunings/${id}`))      a first answer, however long the service is away
 *
 * `follow` reads server-sent events with fetch, not `EventSource`: so it can begin after an event that the page already
 * knows (Last-Event-ID), see the status of a refusal, and give the connection back while nobody looks.
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
 *   there will be no more events. `onProblem`: it cannot be followed (it was deleted, or may not be read).
 * @returns {{stop: () => void}}
 */
export function follow(path, onEvent, { after = 0, onState, onEnd, onProblem } = {}) {
  const stopping = new AbortController();
  const told = telling(onState);
  const stream = { path, lastId: after, atEnd: false, ended: false, deliver: (event) => guarded(() => onEvent(event)) };
  followAll(stream, told, stopping.signal).then(
    () => {
      told.leave(stream.ended ? "ended" : undefined);
      if (stream.ended) {
        onEnd?.();
      }
    },
    (error) => {
      told.leave("failed");
      refuse(error, onProblem);
    },
  );
  return { stop: () => stopping.abort() };
}

/**
 * Calls `fn(signal)` now and then every so many seconds (after the one before has ended), sooner when the page is shown
 * again. A service that is away is tried again with growing pauses; another error is given to `onProblem`, and the next
 * call is made all the same.
 *
 * @returns {{stop: () => void, now: () => void}}  `now` does not wait for the next time.
 */
export function poll(fn, seconds, { onProblem, onState } = {}) {
  const stopping = new AbortController();
  const told = telling(onState);
  const bell = makeBell();
  pollAll(fn, seconds, { told, bell, onProblem }, stopping.signal).finally(() => told.leave());
  return { stop: () => stopping.abort(), now: bell.ring };
}

/**
 * What `fn(signal)` gives once the service answers: while it is away or busy, `fn` is called again after a pause.
 *
 * @throws what `fn` throws otherwise.
 */
export function eventually(fn) {
  return new Promise((resolve, reject) => {
    const trying = poll(async (signal) => {
      try {
        resolve(await fn(signal));
      } catch (error) {
        if (error instanceof ApiProblem && error.passing) {
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

function tell() {
  if (connection() !== shown) {
    shown = connection();
    listeners.forEach((listener) => listener(shown));
  }
}

function telling(onState) {
  const member = {};
  let last = null;
  return {
    is(state) {
      members.set(member, state);
      tell();
      if (state !== last) {
        last = state;
        onState?.(state);
      }
    },
    leave(state) {
      members.delete(member);
      tell();
      if (state !== undefined) {
        onState?.(state);
      }
    },
  };
}

// --- streams --------------------------------------------------------------------------------------------------------

/** Connects again and again until the stream has ended or is stopped. Throws what a new connection would not mend. */
async function followAll(stream, told, stop) {
  let pause = FIRST_PAUSE_SECONDS;
  while (!stop.aborted && !stream.ended) {
    const before = stream.lastId;
    await visible(stop);
    if (!(await followOnce(stream, told, stop))) {
      await sleep(jittered(pause), stop);
      pause = stream.lastId > before ? FIRST_PAUSE_SECONDS : Math.min(2 * pause, LONGEST_PAUSE_SECONDS);
    }
  }
}

/** One connection; true when the next may follow at once. */
async function followOnce(stream, told, stop) {
  const leaving = new AbortController();
  const undo = leaveWhenHidden(leaving, stop);
  stream.atEnd = false;
  try {
    const headers = { Accept: "text/event-stream", "Last-Event-ID": String(stream.lastId) };
    const response = await request("GET", stream.path, undefined, { headers, signal: leaving.signal });
    told.is("live");
    if (response.status === 204) {
      stream.ended = true;
    } else {
      await readEvents(response.body, stream, leaving);
    }
    return stream.ended || stream.atEnd; // then the service says whether that was all: 204
  } catch (error) {
    if (stop.aborted || (document.hidden && leaving.signal.aborted)) {
      return true;
    }
    if (!isLost(error)) {
      throw error;
    }
    told.is("reconnecting");
    return false;
  } finally {
    leaving.abort();
    undo();
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
      watchdog.heard();
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

/** Whether a connection broke or was refused for the moment; anything else is thrown. */
function isLost(error) {
  return error instanceof ApiProblem ? error.passing : error.name === "AbortError" || error instanceof TypeError;
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
    heard() {
      clearTimeout(timer);
      timer = setTimeout(onSilence, 1000 * SILENCE_SECONDS);
    },
    stop: () => clearTimeout(timer),
  };
}

// --- polls ----------------------------------------------------------------------------------------------------------

async function pollAll(fn, seconds, { told, bell, onProblem }, stop) {
  let failures = 0;
  while (!stop.aborted) {
    await visible(stop);
    bell.reset();
    failures = (await pollOnce(fn, { told, onProblem }, stop)) ? 0 : failures + 1;
    const pause = failures === 0 ? seconds : Math.min(seconds * 2 ** (failures - 1), LONGEST_PAUSE_SECONDS);
    await sleep(jittered(Math.max(pause, FIRST_PAUSE_SECONDS)), stop, bell);
  }
}

/** One call; whether it went well. */
async function pollOnce(fn, { told, onProblem }, stop) {
  try {
    await fn(stop);
    told.is("live");
    return true;
  } catch (error) {
    if (!stop.aborted) {
      told.is(error instanceof ApiProblem && error.passing ? "reconnecting" : "live");
      pass(error, onProblem);
    }
    return false;
  }
}

function pass(error, onProblem) {
  if (!(error instanceof ApiProblem)) {
    reportError(error);
  } else if (!error.passing) {
    onProblem?.(error);
  }
}

/** The page's own code must not end a stream. */
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
    const heard = () => {
      target.removeEventListener(event, heard);
      stop.removeEventListener("abort", heard);
      resolve();
    };
    target.addEventListener(event, heard);
    stop.addEventListener("abort", heard);
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

/** A bell that remembers that it was rung while nobody listened. */
function makeBell() {
  const bell = {
    rung: false,
    onRing: null,
    ring() {
      bell.rung = true;
      bell.onRing?.();
    },
    reset() {
      bell.rung = false;
    },
  };
  return bell;
}

/** Resolves after so many seconds, or as soon as `bell` rings, or when `stop` is aborted. */
function sleep(seconds, stop, bell = makeBell()) {
  return new Promise((resolve) => {
    const timer = setTimeout(wake, 1000 * seconds);
    function wake() {
      clearTimeout(timer);
      stop.removeEventListener("abort", wake);
      bell.onRing = null;
      resolve();
    }
    stop.addEventListener("abort", wake);
    bell.onRing = wake;
    if (bell.rung || stop.aborted) {
      wake();
    }
  });
}

/** Up to a fifth more, so that pages do not come back all at once. */
function jittered(seconds) {
  return seconds * (1 + Math.random() / 5);
}
