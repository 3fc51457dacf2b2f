/**
 * The filters of a list: a search that applies while it is typed, fields and buttons that apply in one step, a field that adds others, and a chip
 * for each of these that are set.
 *
 *   html`<${Filters} filters=${filters} columns=${columns} view=${view} rows=${rows} />`
 *
 * A filter is {name, label, options: [[value, text], ...]} or {name, label, suggest?(row) -> value, type?: "datetime-local", placeholder?,
 * pattern?, maxlength?}; with `live` it is the search. One that is `quick` has a field of its own, and `pills: [[value, text], ...]` are values
 * with a button of their own. Filters that are `multiple` hold several values, each with a chip of its own; another
 * value of any other filter replaces the one before. Their values are lists of texts, "" of a search that is empty.
 */

import { announce } from "./dom.js";
import { timeText } from "./format.js";
import { icon } from "./icons.js";
import { html, useLayoutEffect, useRef, useState } from "./preact-htm.js";

const MOST_SUGGESTIONS = 200;
const TYPING_MILLISECONDS = 250;
const REMOVING_KEYS = new Set(["Delete", "Backspace"]);

/** The filter that finds parts of names, models, labels, devices and fingerprints while they are typed. */
export const SEARCH = { name: "q", label: "Search", placeholder: "name, model, label, device", live: true, maxlength: 200 };

/** The filters without any value. */
export function noValues(filters) {
  return Object.fromEntries(filters.map(({ name, live }) => [name, live ? "" : []]));
}

/** The filters' values in an address, without those that are none of a filter's options. */
export function valuesIn(filters, address) {
  const found = ({ name, options, multiple }) => {
    const known = new Set(options?.map(([value]) => value));
    const given = [...new Set(address.getAll(name))].filter((value) => value !== "" && (options === undefined || known.has(value)));
    return multiple ? given : given.slice(0, 1);
  };
  return Object.fromEntries(filters.map((filter) => [filter.name, filter.live ? address.get(filter.name) ?? "" : found(filter)]));
}

/** True if any filter has a value. */
export function isFiltered(values) {
  return Object.values(values).some((value) => value.length > 0);
}

/** @param {{values: Object, order: string, apply: Function, clear: Function, setOrder: Function}} view  See `useView` of list.js. */
export function Filters({ filters, columns, view, rows, children }) {
  const search = filters.find(({ live }) => live);
  const added = filters.filter(({ live, quick, options, pills }) => !live && !quick && !(options && pills));
  const sorts = orders(columns);
  const set = (name, value) => view.apply({ ...view.values, [name]: value });
  const [isOpen, setOpen] = useState(false);
  const isFolded = search !== undefined || added.length > 0; // on narrow pages
  return html`<form class="filters" role="search" onSubmit=${(event) => event.preventDefault()}>
      ${search && html`<${Search} filter=${search} value=${view.values[search.name]} apply=${(value) => set(search.name, value)} />`}
      ${isFolded && html`<button type="button" class="button narrow-only" aria-expanded=${String(isOpen)} onClick=${() => setOpen(!isOpen)}>Filters</button>`}
      <div class="fields ${isFolded && !isOpen ? "wide-only" : ""}">
      ${filters.filter(({ quick }) => quick).map((filter) => html`<${Quick} key=${filter.name} filter=${filter} chosen=${view.values[filter.name]} rows=${rows} set=${set} />`)}
      ${added.length > 0 && html`<${Adder} filters=${added} values=${view.values} rows=${rows} set=${set} />`}
      ${sorts.length > 0 && html`<div class="field narrow-only"><label for="order">Order</label><select id="order" class="input" value=${view.order} onInput=${(event) => view.setOrder(event.target.value)}>${sorts}</select></div>`}
      </div>
    </form>
    <div class="pills">
      ${filters.some(({ pills }) => pills) && html`<div class="pills" role="group" aria-label="Quick filters">${filters.map((filter) => pills(filter, view.values[filter.name], set))}</div>`}
      ${children}
    </div>
    <${Chips} filters=${filters.filter(({ live, quick }) => !live && !quick)} view=${view} set=${set} />`;
}

/** A button for each value of a filter that applies in one step; pressed ones are set. */
function pills({ name, multiple, pills: offered = [] }, chosen, set) {
  const toggled = (value) => chosen.includes(value) ? chosen.filter((other) => other !== value) : [...(multiple ? chosen : []), value];
  return offered.map(([value, text]) => html`<button type="button" class="pill" key=${name + value} aria-pressed=${String(chosen.includes(value))} onClick=${() => set(name, toggled(value))}>${text}</button>`);
}

/** A field of one filter: its options, or the values that the rows have had so far. */
function Quick({ filter: { name, label, options, suggest, texts = (value) => value }, chosen, rows, set }) {
  const known = useKnown(suggest, rows);
  const offered = options ?? [...new Set([...chosen, ...known])].sort().map((value) => [value, texts(value, rows)]);
  return html`<div class="field"><label for="filter-${name}">${label}</label>
    <select id="filter-${name}" class="input" value=${chosen[0] ?? ""} onInput=${({ target }) => set(name, target.value === "" ? [] : [target.value])}><option value="">All</option>
      ${offered.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></div>`;
}

/** The values that a filter found in rows, also in those that are no longer shown. */
function useKnown(suggest, rows) {
  const known = useRef(new Set()).current;
  if (suggest !== undefined) {
    rows.map(suggest).filter((value) => value && known.size < MOST_SUGGESTIONS).forEach((value) => known.add(value));
  }
  return known;
}

function orders(columns) {
  return columns.filter(({ sort }) => sort !== undefined).flatMap(({ title, sort }) => [
    html`<option value="-${sort}">${sort === "created" ? "Newest first" : `${title}, descending`}</option>`,
    html`<option value=${sort}>${sort === "created" ? "Oldest first" : `${title}, ascending`}</option>`,
  ]);
}

// --- the search -----------------------------------------------------------------------------------------------------

function Search({ filter: { name, label, placeholder, maxlength }, value, apply }) {
  const [text, setText] = useState(value);
  const typing = useRef(null);
  const latest = useRef(null);
  latest.current = { text, apply };
  // a space between two words is no part of a value yet: the text stays as it is being typed
  useLayoutEffect(() => setText((typed) => (typed.trim() === value ? typed : value)), [value]);
  const commit = () => {
    clearTimeout(typing.current);
    latest.current.apply(latest.current.text.trim());
  };
  const onInput = ({ target }) => {
    clearTimeout(typing.current);
    latest.current.text = target.value;
    setText(target.value);
    if (target.value === "") {
      commit();
    } else {
      typing.current = setTimeout(commit, TYPING_MILLISECONDS);
    }
  };
  return html`<div class="field search"><label for="filter-${name}">${label}</label>
    <input id="filter-${name}" name=${name} value=${text} type="search" class="input" placeholder=${placeholder} maxlength=${maxlength} autocomplete="off" autocapitalize="off" spellcheck=${false} enterkeyhint="search" onInput=${onInput} onChange=${commit} />
  </div>`;
}

// --- adding ---------------------------------------------------------------------------------------------------------

/** Chooses a filter, then its value: an option applies at once, a text when it is a suggested value or when it is committed. */
function Adder({ filters, values, rows, set }) {
  const [name, setName] = useState(filters[0].name);
  const filter = filters.find((each) => each.name === name);
  const add = (value) => set(name, filter.multiple ? [...new Set([...values[name], value])] : [value]);
  return html`
    ${filters.length > 1 && html`<div class="field"><label for="filter-kind">Filter by</label>
      <select id="filter-kind" class="input" value=${name} onInput=${(event) => setName(event.target.value)}>${filters.map((each) => html`<option value=${each.name}>${each.label}</option>`)}</select></div>`}
    ${filter.options === undefined
      ? html`<${TextValue} key=${name} filter=${filter} rows=${rows} add=${add} />`
      : html`<${OptionValue} key=${name} filter=${filter} chosen=${values[name]} add=${add} />`}`;
}

function OptionValue({ filter: { name, label, options }, chosen, add }) {
  const onInput = ({ target }) => {
    add(target.value);
    target.value = "";
  };
  return html`<div class="field"><label for="filter-${name}">${label}</label>
    <select id="filter-${name}" class="input" onInput=${onInput}><option value="">Choose…</option>
      ${options.map(([value, text]) => html`<option value=${value} disabled=${chosen.includes(value)}>${text}</option>`)}</select></div>`;
}

function TextValue({ filter, rows, add }) {
  const { name, label, suggest, type = "text", placeholder = "", pattern, maxlength = 300 } = filter;
  const [text, setText] = useState("");
  const own = useRef(null);
  const known = useKnown(suggest, rows);
  const commit = (value) => {
    if (value !== "" && own.current.reportValidity()) {
      add(type === "datetime-local" ? new Date(value).toISOString() : value);
      setText("");
    }
  };
  const onInput = ({ target }) => {
    setText(target.value);
    if (known.has(target.value)) {
      commit(target.value);
    }
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      commit(text.trim());
    }
  };
  const id = `filter-${name}`;
  return html`<div class="field"><label for=${id}>${label}</label><div class="with-button">
    <input id=${id} ref=${own} value=${text} type=${type} class="input" list=${suggest && `${id}-known`} placeholder=${placeholder} pattern=${pattern} maxlength=${maxlength}
      autocomplete="off" autocapitalize="off" spellcheck=${false} enterkeyhint="done" onInput=${onInput} onKeyDown=${onKeyDown} />
    <button type="button" class="button" disabled=${text.trim() === ""} onClick=${() => commit(text.trim())}>Add</button></div>
    ${suggest && html`<datalist id="${id}-known">${[...known].map((value) => html`<option value=${value} />`)}</datalist>`}</div>`;
}

// --- chips ----------------------------------------------------------------------------------------------------------

/** The set filters, each a button that removes it; the focus goes on to the next one, and after the last to the fields. */
function Chips({ filters, view, set }) {
  const list = useRef(null);
  const next = useRef(null);
  const isPill = ({ pills }, value) => pills?.some(([known]) => known === value);
  const chips = filters.flatMap((filter) => view.values[filter.name].filter((value) => !isPill(filter, value)).map((value) => ({ filter, value, text: `${filter.label}: ${textOf(filter, value)}` })));
  useLayoutEffect(() => {
    if (next.current !== null) {
      const buttons = list.current?.querySelectorAll(".chip") ?? [];
      (buttons[Math.min(next.current, buttons.length - 1)] ?? document.getElementById("filter-kind") ?? document.querySelector(".filters :is(input, select)"))?.focus();
      next.current = null;
    }
  }, [view.values]);
  if (chips.length === 0) {
    return null;
  }
  const remove = ({ filter, value, text }, place) => {
    next.current = place;
    set(filter.name, view.values[filter.name].filter((other) => other !== value));
    announce(`The filter ${text} is removed`);
  };
  const onKeyDown = (event, chip, place) => {
    if (REMOVING_KEYS.has(event.key)) {
      event.preventDefault();
      remove(chip, place);
    }
  };
  const clear = () => {
    next.current = 0;
    view.clear();
    announce("All filters are removed");
  };
  return html`<ul class="chips" aria-label="Set filters" ref=${list}>
    ${chips.map((chip, place) => html`<li key=${chip.text}><button type="button" class="chip" aria-label="Remove the filter ${chip.text}" title="Remove this filter" onKeyDown=${(event) => onKeyDown(event, chip, place)} onClick=${() => remove(chip, place)}>
      <span>${chip.text}</span>${icon("cross")}</button></li>`)}
    ${chips.length > 1 && html`<li><button type="button" class="button button-small button-quiet" onClick=${clear}>Clear all</button></li>`}
  </ul>`;
}

/** The value of a filter as people read it. */
function textOf({ options, type }, value) {
  if (type === "datetime-local" && !Number.isNaN(Date.parse(value))) {
    return timeText(value);
  }
  return options?.find(([known]) => known === value)?.[1] ?? value;
}
