/**
 * The pages of a list of the API that have been read, newest first. Used by api_list.js.
 *
 * Each page keeps its cursor, so that it can be read again by itself: rows that have not ended are kept up to date with
 * at most two calls a time, however many are loaded. Only some of the pages are shown at a time, so that a long list
 * stays quick: `load` moves it towards older rows, `back` towards newer ones.
 */

/**
 * @param {(cursor: ?string, limit: number, signal?: AbortSignal) => Promise<{items: Object[], next_cursor: ?string}>} read
 * @param {number} size  Rows of a page.
 * @param {number} most  Pages shown at a time.
 */
export function makePages(read, size, most = 10) {
  let pages = [];
  let first = 0; // of the shown pages
  let turn = 0;
  let reading = new AbortController(); // aborted when the filters change, because its response belongs to another list

  const end = () => Math.min(first + most, pages.length);
  const shown = () => pages.slice(first, end());

  async function fetched(cursor, limit, signal) {
    const current = reading.signal;
    const found = await read(cursor, limit, signal === undefined ? current : AbortSignal.any([current, signal]));
    current.throwIfAborted();
    return { cursor, rows: found.items, next: found.next_cursor };
  }

  async function readFirst(signal) {
    const page = await fetched(null, size, signal);
    const known = pages[0];
    pages[0] = page;
    if (known !== undefined && pages.length > 1) {
      keepBetween(page, known);
    }
  }

  /** New work pushes rows off the first page: they move to the page after it. */
  function keepBetween(page, known) {
    const oldest = page.rows.at(-1)?.id ?? "";
    const left = known.rows.filter((row) => row.id < oldest);
    if (left.length === 0) {
      return;
    }
    const after = pages[1];
    if (left.length + after.rows.length <= size) {
      pages[1] = { ...after, cursor: page.next, rows: [...left, ...after.rows] };
    } else {
      pages.splice(1, 0, { cursor: page.next, rows: left, next: known.next });
      first += first > 0 ? 1 : 0;
    }
  }

  /** Returns a shown page, other than the first, with work that has not ended; in rotation. */
  function nextActive(ended) {
    const active = shown().filter((page) => page !== pages[0] && !page.rows.every(ended));
    turn += 1;
    return active[turn % active.length];
  }

  async function readAgain(page, signal) {
    const fresh = await fetched(page.cursor, page.rows.length, signal);
    const index = pages.indexOf(page);
    if (index > 0) {
      pages[index] = { ...fresh, next: page.next };
    }
  }

  return {
    rows: () => [...new Map(shown().flatMap((page) => page.rows).map((row) => [row.id, row])).values()],
    hasOlder: () => end() < pages.length || (pages.at(-1)?.next ?? null) !== null,
    hasNewer: () => first > 0,
    isEmpty: () => pages.every((page) => page.rows.length === 0),
    /** Drops all pages, for another list. */
    clear() {
      reading.abort();
      reading = new AbortController();
      pages = [];
      first = 0;
    },
    /** The next older page. */
    async load() {
      if (end() === pages.length) {
        pages.push(await fetched(pages.at(-1).next, size));
      }
      first = Math.max(first, Math.min(first + 1, pages.length - most));
    },
    /** Changes rows without reading them again; those for which `change` returns null are dropped. */
    change(change) {
      pages = pages.map((page) => ({ ...page, rows: page.rows.map(change).filter((row) => row !== null) }));
    },
    /** Newer rows, which were shown before. */
    back() {
      first = Math.max(0, first - Math.ceil(most / 2));
    },
    /** Reads the first page again, and one other with work that has not ended. */
    async refresh(ended, signal) {
      const page = nextActive(ended);
      await readFirst(signal);
      if (page !== undefined) {
        await readAgain(page, signal);
      }
    },
  };
}
