/**
 * Hooks of Preact that pages share.
 *
 *   const { data, problem, now } = usePolled((signal) => get("/v1/keys", {signal}), 15)     read now and every 15 seconds
 *   const jobs = useRead("/v1/jobs?limit=5")                                                  what is there, read once
 */

import { get } from "./api.js";
import { poll } from "./live.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./preact-htm.js";

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

/** What the API has at `path`; null before it is read, without a path, and where it cannot be read: only for what a page can do without. */
export function useRead(path) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    if (path !== null) {
      get(path).then(setFound, () => setFound(null));
    }
  }, [path]);
  return found;
}
