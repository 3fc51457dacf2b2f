/**
 * Hooks of Preact that pages share.
 *
 *   const { data, problem, now } = usePolled((signal) => get("/v1/keys", {signal}), 15)     read now and every 15 seconds
 */

import { poll } from "./live.js";
import { useLayoutEffect, useRef, useState } from "./preact-htm.js";

/**
 * What `read(signal)` gives, again and again; the last of it stays while the service is away.
 *
 * @param {(signal: AbortSignal) => Promise<*>} read
 * @param {number} seconds  Pause between two reads; see `poll`.
 * @param {string} key  Another key reads at once.
 * @returns {{data: *, problem: ?ApiProblem, now: () => void}}  `data` is null before the first response. `now` reads at once.
 */
export function usePolled(read, seconds, key = "") {
  const [state, setState] = useState({ data: null, problem: null });
  const polling = useRef(null);
  useLayoutEffect(() => {
    const refresh = async (signal) => {
      const data = await read(signal);
      signal.throwIfAborted();
      setState({ data, problem: null });
    };
    polling.current = poll(refresh, seconds, { onProblem: (problem) => setState((before) => ({ ...before, problem })) });
    return polling.current.stop;
  }, [key]);
  return { ...state, now: () => polling.current.now() };
}
