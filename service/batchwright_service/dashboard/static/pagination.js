/**
 * The pages of a list of the API that have been read. Used by list.js.
 *
 * Each page keeps its cursor, so that it can be read again by itself: rows that have not ended are kept up to date with
 * at most two calls a time, however many are loaded. Only some of the pages are shown at a time, so that a long list
 * stays quick: `load` moves it towards later rows, `back` towards earlier ones.
 */

/**
 * @param {(cursor: ?string, limit: number, signal?: AbortSignal) => Promise<{items: Object[], next_cursor: ?string}>} read
 * @param {{size: number, isNewestFirst: boolean}} list  The rows of a page, and whether they come in the order of their identifiers.
 * @param {number} most  Pages shown at a time.
 */
export function makePages(read, { size, isNewestFirst }, most = 10) {
  let pages = [];
  let first = 0; // of the shown pages
  let turn = 0;

  const end = () => Math.min(first + most, pages.length);
  const shown = () => pages.slice(first, end());

  async function fetched(cursor, limit, signal) {
    const found = await read(cursor, limit, signal);
    return { cursor, rows: found.items, next: found.next_cursor, total: found.total ?? null };
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
    const left = pushedOff(page.rows, known.rows, pages[1].rows);
    if (left === null) {
      pages = [page];
      first = 0;
    }
    if (left === null || left.length === 0) {
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

  /**
   * The rows of the first page that come after those that were read now: by their identifiers, or after the last row that was known before,
   * there or on the page after it. Null where none was: then nothing tells how many rows are between.
   */
  function pushedOff(now, before, after) {
    if (isNewestFirst) {
      const last = now.at(-1)?.id ?? "";
      return before.filter((row) => row.id < last);
    }
    const known = [...before, ...after].map(({ id }) => id);
    const last = now.findLast(({ id }) => known.includes(id));
    if (last === undefined) {
      return before.length === 0 ? [] : null;
    }
    return before.slice(known.indexOf(last.id) + 1).filter((row) => !now.some(({ id }) => id === row.id));
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
    /** The number of rows of the whole list, as the service counted it with the first page; null if it did not. */
    total: () => pages[0].total,
    hasOlder: () => end() < pages.length || (pages.at(-1)?.next ?? null) !== null,
    hasNewer: () => first > 0,
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
