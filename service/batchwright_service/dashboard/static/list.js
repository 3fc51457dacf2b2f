/**
 * Lists of the API: filters, sorted columns, chosen rows with their acts, and pages.
 *
 *   render(html`<${ApiList} path="/v1/tunings" caption="Tunings" noun="tuning" columns=${columns} filters=${filters} empty=${empty} />`, place)
 *
 * Columns are those of a table (data_table.js), filters those of filters.js. The filters' values, the order and the hidden columns are kept
 * in the page's address, so that a list is a link.
 *
 * An act on chosen rows is {text, applies(row), least: 1, most: Infinity, noun?, danger?} with either `href(rows)`, for a link, or
 * `run(rows, others)`, for a button: `others` are the chosen rows to which it does not apply. `run` returns null, or {change, report, done?}:
 * a function that changes a row of the list or drops it by null, a node that tells the results, and the rows that are no longer chosen.
 */

import { addressOf, get } from "./api.js";
import { alertBox, Button, emptyState, problemAlert } from "./components.js";
import { Table } from "./data_table.js";
import { Filters, isFiltered, noValues, valuesIn } from "./filters.js";
import { count, plural } from "./format.js";
import { ENDED, poll } from "./live.js";
import { makePages } from "./pagination.js";
import { html, useLayoutEffect, useMemo, useRef, useState } from "./preact-htm.js";
import { Views } from "./views.js";

const PAGE_ROWS = 50;
const REFRESH_SECONDS = 3;
const NEWEST_FIRST = "-created";
const MOST_COUNTED = 10_000; // by the service
const FILES = { csv: "CSV", jsonl: "JSON Lines" };

/**
 * @param {{path: string, caption: string, noun: string, nouns?: string, columns: Object[], filters?: Object[], empty: Object, acts?: Object[],
 *   query?: (values: Object) => Object, keep?: boolean, ended?: (row: Object) => boolean, refreshSeconds?: number, counted?: boolean, files?: boolean}} list  `empty` is what `emptyState` takes,
 *   shown when there is nothing at all. Rows that have not `ended` are read again every `refreshSeconds` (pagination.js). `keep`: rows stay
 *   chosen that are no longer shown. `lead(rows)` gives a node above the rows. `query` gives further parameters of requests. `counted`: shows how many match. `files`: offers
 *   all of these as files.
 */
export function ApiList(list) {
  const { path, noun, nouns = `${noun}s`, filters = [] } = list;
  const view = useView(list);
  const pages = usePages(list, view.query);
  const choice = useChoice(list, pages);
  const columns = useMemo(() => [...(list.acts ? [choice.column] : []), ...list.columns.filter(({ title }) => !view.hidden.includes(title))], [view.hidden]);
  const rows = pages.rows ?? [];
  const isWhole = !pages.hasNewer && !pages.hasOlder;
  const nothing = isFiltered(view.values)
    ? emptyState({ title: "No matches for these filters", action: html`<button type="button" class="button" onClick=${view.clear}>Clear the filters</button>` })
    : emptyState(list.empty);
  return html`
    ${filters.length > 0 && (rows.length > 0 || pages.rows === null || isFiltered(view.values)) && html`<${Filters} filters=${filters} columns=${list.columns} view=${view} rows=${rows}><${Views} path=${location.pathname} search=${view.search} /><//>`}
    ${pages.problem && problemAlert(pages.problem)}
    ${list.lead?.(rows)}
    <${Selection} list=${list} rows=${rows} choice=${choice} total=${pages.total ?? (isWhole ? rows.length : null)} />
    ${pages.hasNewer && html`<div><button type="button" class="button" onClick=${pages.back}>Show earlier rows</button></div>`}
    <div class="list-body">
      ${pages.rows === null && !pages.problem && html`<div class="skeleton" aria-hidden="true" />`}
      ${rows.length > 0 ? html`<${Table} caption=${list.caption} columns=${columns} rows=${rows} chosen=${choice.chosen} order=${view.order} onOrder=${view.setOrder} />` : pages.rows !== null && nothing}
    </div>
    <div class="list-foot">
      <span class="muted" role="status">${pages.rows === null ? (pages.problem ? "" : "Loading…") : !isWhole && `${plural(rows.length, noun, nouns)} shown`}</span>
      ${pages.hasOlder && html`<${Button} act=${pages.load} onProblem=${pages.complain}>Load more<//>`}
      ${list.files && rows.length > 0 && html`<span class="small">All that match: ${Object.entries(FILES).map(([format, text]) => html`<a download="" href=${addressOf(path, { ...view.query, format })}>${text}</a> `)}</span>`}
      ${rows.length > 0 && html`<${Chooser} columns=${list.columns} view=${view} />`}
    </div>`;
}

// --- what is listed -------------------------------------------------------------------------------------------------

/** The filters' values, the order and the hidden columns, as the page's address has them. */
function useView({ filters = [], columns, query: further = () => ({}) }) {
  const [view, setView] = useState(() => {
    const address = new URLSearchParams(location.search);
    const order = address.get("sort") ?? "";
    const isKnown = columns.some(({ sort }) => sort !== undefined && sort === order.replace(/^-/, ""));
    return {
      values: valuesIn(filters, address),
      order: isKnown ? order : NEWEST_FIRST,
      hidden: columns.map(({ title }) => title).filter((title) => (address.get("hide") ?? "").split(",").includes(title)),
    };
  });
  const { values, order, hidden } = view;
  const shown = { ...values, sort: order === NEWEST_FIRST ? "" : order };
  const search = addressOf("", { ...shown, hide: hidden.join(",") });
  useLayoutEffect(() => history.replaceState(null, "", location.pathname + search), [view]);
  return {
    ...view,
    search,
    query: { ...shown, ...further(values) },
    apply: (changed) => JSON.stringify(changed) !== JSON.stringify(values) && setView({ ...view, values: changed }),
    clear: () => setView({ ...view, values: noValues(filters) }),
    setOrder: (changed) => setView({ ...view, order: changed }),
    toggle: (title) => setView({ ...view, hidden: hidden.includes(title) ? hidden.filter((other) => other !== title) : [...hidden, title] }),
  };
}

/** The rows of the list that are loaded, kept up to date. Those of the list before are shown until the first page is there. */
function usePages({ path, counted, ended = ({ state }) => ENDED.has(state), refreshSeconds = REFRESH_SECONDS }, query) {
  const [shown, setShown] = useState({ rows: null, hasNewer: false, hasOlder: false, problem: null });
  const current = useRef(null);
  useLayoutEffect(() => {
    const list = { size: PAGE_ROWS, isNewestFirst: query.sort === "" };
    const pages = makePages((cursor, limit, signal) => get(path, { query: { ...query, limit, cursor, total: (counted && cursor === null) || null }, signal }), list);
    const show = () => current.current.pages === pages && setShown({ rows: pages.rows(), total: pages.total(), hasNewer: pages.hasNewer(), hasOlder: pages.hasOlder(), problem: null });
    const complain = (problem) => current.current.pages === pages && setShown((before) => ({ ...before, problem }));
    const refresh = async (signal) => {
      await pages.refresh(ended, signal);
      if (current.current.pages === pages) {
        current.current.isRead = true;
      }
      show();
    };
    current.current = { pages, show, complain, isRead: false };
    current.current.polling = poll(refresh, refreshSeconds, { onProblem: complain });
    return current.current.polling.stop;
  }, [JSON.stringify(query)]);
  return {
    ...shown,
    complain: (problem) => current.current.complain(problem),
    // until the first page of a changed list is there, its predecessor is shown, which nothing moves or changes any more
    async load() {
      const { pages, show, isRead } = current.current;
      if (isRead) {
        await pages.load();
        show();
      }
    },
    back() {
      if (!current.current.isRead) {
        return;
      }
      current.current.pages.back();
      current.current.show();
      document.querySelector(".list-body").scrollIntoView({ block: "start" });
    },
    /** Changes rows after an act on them, before they are read again. */
    change(changed) {
      if (current.current.isRead) {
        current.current.pages.change(changed);
        current.current.show();
      }
      current.current.polling.now();
    },
  };
}

// --- columns --------------------------------------------------------------------------------------------------------

/** The columns that are shown; the first always is. */
function Chooser({ columns, view }) {
  return html`<details class="chooser small"><summary>Columns</summary><div class="tags">
    ${columns.slice(1).map(({ title }) => html`<label class="choice"><input type="checkbox" checked=${!view.hidden.includes(title)} onChange=${() => view.toggle(title)} />${title}</label>`)}
  </div></details>`;
}

// --- chosen rows ----------------------------------------------------------------------------------------------------

/** The chosen rows by their ids, as they were read last; those that are gone are no longer chosen. */
function useChoice({ keep = false }, pages) {
  const [chosen, setChosen] = useState(new Map());
  const choose = (rows, isOn) => setChosen((before) => {
    const after = new Map(before);
    rows.forEach((row) => (isOn ? after.set(row.id, row) : after.delete(row.id)));
    return after;
  });
  useLayoutEffect(() => setChosen((before) => {
    if (before.size === 0) {
      return before;
    }
    const known = new Map((pages.rows ?? []).map((row) => [row.id, row]));
    return new Map([...before].filter(([id]) => keep || known.has(id)).map(([id, row]) => [id, known.get(id) ?? row]));
  }), [pages.rows]);
  const box = (row, isChosen) => html`<label class="tap"><input type="checkbox" value=${row.id} checked=${isChosen} aria-label="Select ${row.name ?? row.id}" onChange=${(event) => choose([row], event.target.checked)} /></label>`;
  return { chosen, choose, change: pages.change, column: { title: "Select", class: "choose", isChoice: true, cell: box } };
}

/** A bar above the list that stays in sight: how many rows there are and are chosen, and what can be done with these. */
function Selection({ list: { noun, nouns, acts = [] }, rows, choice, total }) {
  const { chosen } = choice;
  const [report, setReport] = useState(null);
  const results = useRef(null);
  useLayoutEffect(() => report && results.current.focus(), [report]);
  if ((rows.length === 0 && chosen.size === 0) || (acts.length === 0 && total === null)) {
    return html`<div ref=${results} tabindex="-1">${report}</div>`;
  }
  const here = rows.filter(({ id }) => chosen.has(id)).length;
  const run = async (act) => {
    const all = [...chosen.values()];
    setReport(null);
    const result = await act.run(all.filter(act.applies), all.filter((row) => !act.applies(row)));
    if (result !== null) {
      setReport(result.report);
      choice.choose(result.done ?? [], false);
      choice.change(result.change);
    }
  };
  return html`<div class="selection" role="group" aria-label="Selection">
      ${acts.length > 0 && rows.length > 1 && html`<label class="choice"><input type="checkbox" checked=${here > 0 && here === rows.length} indeterminate=${here > 0 && here < rows.length} onChange=${(event) => choice.choose(rows, event.target.checked)} />Select all ${count(rows.length)} shown</label>`}
      ${total !== null && html`<strong class="total">${total < MOST_COUNTED ? plural(total, noun, nouns) : `${count(MOST_COUNTED)} ${nouns ?? `${noun}s`} or more`}</strong>`}
      <span role="status">${chosen.size > 0 && `${plural(chosen.size, noun)} selected`}</span>
      ${acts.map((act) => html`<${Act} key=${act.text} act=${act} noun=${act.noun ?? noun} rows=${[...chosen.values()].filter(act.applies)} run=${() => run(act)} onProblem=${(problem) => setReport(problemAlert(problem))} />`)}
    </div>
    <div ref=${results} tabindex="-1">${report}</div>`;
}

function Act({ act, noun, rows, run, onProblem }) {
  if (rows.length < (act.least ?? 1) || rows.length > (act.most ?? Infinity)) {
    return null;
  }
  const text = `${act.text} ${plural(rows.length, noun)}`;
  return act.href !== undefined
    ? html`<a class="button button-small" href=${act.href(rows)}>${text}</a>`
    : html`<${Button} class="button-small ${act.danger && "button-danger"}" act=${run} onProblem=${onProblem}>${text}<//>`;
}
