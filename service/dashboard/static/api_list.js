/**
 * Lists of the API with filters and pages, in a table (table.js).
 *
 *   makeList({root: byId("list"), path: "/v1/tunings", caption: "Tunings", columns, filters, empty})
 *
 * Columns are those of a table; lists come newest first and cannot be sorted otherwise.
 * A filter is {name, label, options: [[value, text], ...]} or {name, label, suggest?(row) -> value, placeholder?, pattern?,
 * maxlength?}; the filters' values are kept in the page's address, so that a filtered list is a link.
 */

import { addressOf, get } from "./api.js";
import { h, replace, setText } from "./dom.js";
import { plural } from "./format.js";
import { ENDED, poll } from "./live.js";
import { makePages } from "./pagination.js";
import { busy, emptyState, problemAlert, showProblem } from "./parts.js";
import { makeTable } from "./table.js";

const REFRESH_SECONDS = 3;
const MOST_SUGGESTIONS = 200;
const TYPING_MILLISECONDS = 250;
const FILES = { csv: "CSV", jsonl: "JSON Lines" };

/** The filter that finds parts of names, models, labels, devices and fingerprints while they are typed. */
export const SEARCH = { name: "q", label: "Search", placeholder: "name, model, label, device", live: true, maxlength: 200 };

/**
 * A list of the API: filters, rows, "Load more". Rows that have not ended are read again every few seconds (pagination.js).
 *
 * @param {{root: HTMLElement, path: string, caption: string, noun: string, nouns?: string, columns: Object[], filters?: Object[], empty: Object,
 *   pageSize?: number, ended?: (row: Object) => boolean, refreshSeconds?: number, files?: boolean, selection?: Object}} list  `empty` is what `emptyState`
 *   takes, shown when there is nothing at all. `refreshSeconds`: how often it is read again. `files`: offers all rows that match as files.
 *   `selection`: see selection.js.
 * @returns {{refresh: () => void}}
 */
export function makeList(list) {
  const { root, path, caption, noun, nouns, selection, filters = [], empty, pageSize = 50, refreshSeconds = REFRESH_SECONDS } = list;
  const ended = list.ended ?? ((row) => ENDED.has(row.state));
  const columns = selection === undefined ? list.columns : [selection.column, ...list.columns];
  const table = makeTable({ caption, columns });
  const form = filterForm(filters, restart);
  const pages = makePages((cursor, limit, signal) => get(path, { query: { ...form.values(), limit, cursor }, signal }), pageSize);
  const status = h("span", { class: "muted", role: "status" }, "Loading…");
  const newer = h("button", { type: "button", class: "button", hidden: true, on: { click: back } }, "Show newer");
  const more = h("button", { type: "button", class: "button", hidden: true, on: { click: load } }, "Load more");
  const place = h("div", { class: "list-body" });
  const problems = h("div");
  const files = list.files ? Object.entries(FILES).map(([format, text]) => [format, h("a", { download: "" }, text)]) : [];
  const links = files.length > 0 && h("span", { class: "small" }, "All that match: ", files.flatMap(([, link]) => [link, " "]));
  const foot = h("div", { class: "list-foot" }, status, more, links);
  replace(root, filters.length > 0 && form.element, problems, selection?.element, h("div", {}, newer), place, foot);
  selection?.listen(place, change);

  function show() {
    const rows = pages.rows();
    form.learn(rows);
    table.update(rows);
    selection?.update(rows);
    showOnly(place, rows.length > 0 ? table.element : nothing(form, empty));
    newer.hidden = !pages.hasNewer();
    more.hidden = !pages.hasOlder();
    files.forEach(([format, link]) => (link.href = addressOf(path, { ...form.values(), format })));
    setText(status, rows.length === 0 ? "" : `${plural(rows.length, noun, nouns)}${more.hidden && newer.hidden ? "" : " shown"}`);
  }

  /** Changes rows after an act on them, before they are read again. */
  function change(changed) {
    pages.change(changed);
    show();
    polling.now();
  }

  function restart() {
    history.replaceState(null, "", addressOf(location.pathname, form.values()));
    pages.clear();
    setText(status, "Loading…");
    polling.now();
  }

  function back() {
    pages.back();
    show();
    newer.scrollIntoView({ block: "start" });
  }

  async function load() {
    try {
      await busy(more, pages.load);
      replace(problems);
      show();
    } catch (problem) {
      showUnlessAborted(problem);
    }
  }

  async function refresh(signal) {
    try {
      await pages.refresh(ended, signal);
      replace(problems);
      show();
    } catch (problem) {
      if (problem.name !== "AbortError") {
        throw problem;
      }
    }
  }

  /** Shows a problem, unless the request was aborted for another list. */
  function showUnlessAborted(problem) {
    if (problem.name !== "AbortError") {
      showProblem(problems, problemAlert(problem));
    }
  }

  const polling = poll(refresh, refreshSeconds, { onProblem: showUnlessAborted });
  return { refresh: polling.now };
}

function showOnly(place, node) {
  if (place.firstChild !== node && !place.firstChild?.isEqualNode(node)) {
    replace(place, node);
  }
}

// --- filters --------------------------------------------------------------------------------------------------------

function nothing(form, empty) {
  const cleared = h("button", { type: "button", class: "button", on: { click: form.clear } }, "Clear the filters");
  return form.isSet() ? emptyState({ title: "No matches for these filters", action: cleared }) : emptyState(empty);
}

/** Filters match whole values: a select applies at once, a text when it is a suggested value or when it is committed. */
function filterForm(filters, onChange) {
  const address = new URLSearchParams(location.search);
  const fields = filters.map((filter) => makeField(filter, address.get(filter.name) ?? ""));
  const form = h("form", { class: "filters", role: "search" }, fields.map((field) => field.element));
  const values = () => Object.fromEntries(fields.map(({ name, input }) => [name, input.value.trim()]));
  let applied = JSON.stringify(values());
  const apply = () => {
    if (form.checkValidity() && applied !== JSON.stringify(values())) {
      applied = JSON.stringify(values());
      onChange();
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    apply();
  });
  form.addEventListener("change", apply);
  let typing = null;
  form.addEventListener("input", (event) => {
    clearTimeout(typing);
    if (fields.find(({ input }) => input === event.target).live) {
      typing = setTimeout(apply, TYPING_MILLISECONDS);
    } else if (event.target.value === "" || fields.find(({ input }) => input === event.target).knows(event.target.value)) {
      apply();
    }
  });
  return {
    element: form,
    values,
    isSet: () => Object.values(values()).some((value) => value !== ""),
    learn: (rows) => fields.forEach((field) => field.learn(rows)),
    clear() {
      fields.forEach(({ input }) => (input.value = ""));
      apply();
    },
  };
}

function makeField(filter, value) {
  const id = `filter-${filter.name}`;
  const input = filter.options === undefined ? textInput(filter, id, value) : choiceInput(filter, id, value);
  const known = h("datalist", { id: `${id}-known` });
  const values = new Set();
  return {
    name: filter.name,
    live: filter.live ?? false,
    input,
    element: h("div", { class: "field" }, h("label", { for: id }, filter.label), input, filter.suggest && known),
    knows: (text) => values.has(text),
    /** Adds the values of the rows to the suggestions. */
    learn(rows) {
      const found = filter.suggest === undefined ? [] : rows.map(filter.suggest);
      const added = [...new Set(found)].filter((text) => !values.has(text) && values.size < MOST_SUGGESTIONS);
      added.forEach((text) => values.add(text) && known.append(h("option", { value: text })));
    },
  };
}

function textInput({ name, suggest, placeholder = "", pattern, maxlength = 300 }, id, value) {
  const list = suggest === undefined ? null : `${id}-known`;
  const quiet = { autocomplete: "off", autocapitalize: "off", spellcheck: "false", enterkeyhint: "search" };
  return h("input", { id, name, value, type: "search", class: "input", list, placeholder, pattern, maxlength, ...quiet });
}

function choiceInput({ name, options }, id, value) {
  const choices = options.map(([key, text]) => h("option", { value: key, selected: key === value }, text));
  return h("select", { id, name, class: "input" }, choices);
}
