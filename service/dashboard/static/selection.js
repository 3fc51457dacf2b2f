/**
 * A column of checkboxes in a list of the API, and a bar above the list: how many rows are chosen, and what can be done with them.
 *
 *   const selection = makeSelection({ noun: "tuning", acts: [{ text: "Delete", applies: (row) => ..., run: async (rows, others) => change }] })
 *   makeList({ ..., selection })
 *
 * An act is shown when it applies to `least` (1) to `most` (any number) of the chosen rows. It has either `href(rows)`, for a link, or
 * `run(rows, others, place)`, for a button: `others` are the chosen rows to which it does not apply, `place` is where it shows its
 * results. `run` returns null, or a function that changes a row of the list, or drops it by null. With `keep`, rows stay chosen that
 * are no longer shown.
 */

import { h, replace, setText } from "./dom.js";
import { count, plural } from "./format.js";
import { busy, problemAlert } from "./parts.js";

/** @returns {{column: Object, element: HTMLElement, update: (rows: Object[]) => void, listen: (place: HTMLElement, onChange: Function) => void}} */
export function makeSelection({ noun, acts, keep = false }) {
  const chosen = new Map(); // rows by id
  const all = h("input", { type: "checkbox", on: { change: () => choose(shown, all.checked) } });
  const allText = h("span");
  const status = h("span", { role: "status" });
  const results = h("div", { tabindex: -1 });
  const buttons = acts.map(buttonOf);
  const bar = h("div", { class: "selection", role: "group", "aria-label": "Selection" }, h("label", { class: "choice" }, all, allText), status, buttons);
  let shown = [];
  let body = null;
  let changeRows = null;

  function buttonOf(act) {
    if (act.href !== undefined) {
      return h("a", { class: "button button-small", hidden: true }, act.text);
    }
    const button = h("button", { type: "button", class: `button button-small ${act.danger ? "button-danger" : ""}`, hidden: true });
    button.addEventListener("click", () => busy(button, () => run(act)));
    return button;
  }

  async function run(act) {
    const rows = [...chosen.values()];
    replace(results);
    try {
      const change = await act.run(rows.filter(act.applies), rows.filter((row) => !act.applies(row)), results);
      if (change !== null) {
        changeRows(change);
        results.focus();
      }
    } catch (problem) {
      replace(results, problemAlert(problem));
    }
  }

  function choose(rows, on) {
    rows.forEach((row) => (on ? chosen.set(row.id, row) : chosen.delete(row.id)));
    show();
  }

  function show() {
    body.querySelectorAll("input[value]").forEach((box) => {
      box.checked = chosen.has(box.value);
      box.toggleAttribute("checked", box.checked); // so that a row that is drawn anew has an equal cell
    });
    const here = shown.filter((row) => chosen.has(row.id)).length;
    all.checked = here > 0 && here === shown.length;
    all.indeterminate = here > 0 && here < shown.length;
    setText(allText, `Select all ${count(shown.length)} shown`);
    setText(status, chosen.size === 0 ? "" : `${plural(chosen.size, noun)} selected`);
    acts.forEach((act, index) => {
      const rows = [...chosen.values()].filter(act.applies);
      const button = buttons[index];
      button.hidden = rows.length < (act.least ?? 1) || rows.length > (act.most ?? Infinity);
      setText(button, `${act.text} ${plural(rows.length, act.noun ?? noun)}`);
      if (act.href !== undefined && !button.hidden) {
        button.href = act.href(rows);
      }
    });
  }

  return {
    element: h("div", { class: "list" }, bar, results),
    column: { title: "Select", class: "choose", isChoice: true, cell: (row) => h("label", { class: "tap" }, boxOf(row, chosen.has(row.id))) },
    /** Shows the bar for the rows of the list; those that are gone are no longer chosen. */
    update(rows) {
      const known = new Map(rows.map((row) => [row.id, row]));
      [...chosen.keys()].forEach((id) => (known.has(id) ? chosen.set(id, known.get(id)) : keep || chosen.delete(id)));
      shown = rows;
      bar.hidden = rows.length === 0 && chosen.size === 0;
      show();
    },
    listen(place, onChange) {
      body = place;
      changeRows = onChange;
      place.addEventListener("change", ({ target }) => choose(shown.filter((row) => row.id === target.value), target.checked));
    },
  };
}

function boxOf(row, checked) {
  return h("input", { type: "checkbox", value: row.id, checked, "aria-label": `Select ${row.name ?? row.id}` });
}
