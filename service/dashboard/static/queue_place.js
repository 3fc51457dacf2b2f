/**
 * The place in the queue of a tuning or job that waits, kept up to date while it waits.
 *
 *   const places = followPlace(path, (work) => {...})     `work` was read again
 *   places.update(work)                                   follows while `work` waits, and not otherwise
 *   placeInWords(work.queue)                              "Position 2 in the queue of its device, ..."
 */

import { get } from "./api.js";
import { count, seconds } from "./format.js";
import { poll } from "./live.js";

const SECONDS = 3;

/** A place in words, with the expected wait where one is known. */
export function placeInWords(queue) {
  if (queue === null) {
    return "Waits for its device.";
  }
  const wait = queue.expected_wait_seconds;
  const expected = wait === null ? "" : `, expected to start in about ${seconds(wait)}`;
  return `Position ${count(queue.position)} in the queue of its device${expected}.`;
}

/** Reads the work now and then while it waits: no event tells that the queue has moved on. */
export function followPlace(path, show) {
  let polling = null;
  const update = ({ state }) => {
    if (state !== "QUEUED") {
      polling?.stop();
      polling = null;
    } else {
      polling ??= poll(async (signal) => {
        const work = await get(path, { signal });
        if (!signal.aborted) {
          show(work);
        }
      }, SECONDS);
    }
  };
  return { update };
}
