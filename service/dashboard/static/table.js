/**
 * Tables of given rows.
 *
 *   const table = makeTable({caption: "Probes", columns, keyOf: (row) => row.ordinal})
 *   parent.append(table.element); table.update(rows)      rows keep their nodes: focus and selection survive
 *
 * A column is {title, cell(row) -> node or text, class?: "number"|"wide"|..., value?(row) -> what to sort by}. A column with
 * `value` gets a button in its head. The first column's cell is the row's head, without counting a column of choices (`isChoice`).
 */

import { h } from "./dom.js";

const ROW_HEAD = { scope: "row", role: "rowheader" };

/**
 * A table whose rows are updated in place.
 *
 * @returns {{element: HTMLElement, update: (rows: Object[]) => void}}
 */
export function makeTable({ caption, columns, keyOf = (row) => row.id, showCaption = false }) {
  const body = h("tbody", { role: "rowgroup" });
  const kept = new Map();
  const order = { column: null, descending: false };
  let current = [];
  const head = h("tr", { role: "row" }, columns.map((column) => headCell(column, order, () => update(current))));
  const hint = { class: showCaption ? "" : "visually-hidden" };
  // the roles stay where narrow pages show each row of a list as a card, which is no table to a browser
  const table = h("table", { class: "table", role: "table" }, h("caption", hint, caption), h("thead", { role: "rowgroup" }, head), body);
  const element = h("div", { class: "table-scroll", tabindex: 0, role: "group", "aria-label": caption }, table);

  function update(rows) {
    current = rows;
    const wanted = ordered(rows, order);
    const keys = new Set(wanted.map(keyOf));
    for (const [key, entry] of kept) {
      if (!keys.has(key)) {
        entry.node.remove();
        kept.delete(key);
      }
    }
    place(body, wanted.map((row) => nodeOf(kept, keyOf(row), row, columns)));
    markOrder(head, columns, order);
  }
  return { element, update };
}

// --- rows -----------------------------------------------------------------------------------------------------------

function nodeOf(kept, key, row, columns) {
  const entry = kept.get(key);
  if (entry === undefined) {
    const node = h("tr", { role: "row" }, cellsOf(row, columns));
    kept.set(key, { node, row });
    return node;
  }
  if (entry.row !== row && JSON.stringify(entry.row) !== JSON.stringify(row)) {
    renew(entry.node, cellsOf(row, columns));
  }
  entry.row = row;
  return entry.node;
}

/** Replaces only the cells that differ, so that a focused link stays focused. */
function renew(node, cells) {
  cells.forEach((cell, index) => {
    if (!cell.isEqualNode(node.children[index])) {
      node.children[index].replaceWith(cell);
    }
  });
}

function cellsOf(row, columns) {
  const head = columns.find((column) => !column.isChoice);
  return columns.map((column) => {
    const attributes = { class: column.class, dataset: { title: column.title }, ...(column === head ? ROW_HEAD : { role: "cell" }) };
    return h(column === head ? "th" : "td", attributes, column.cell(row));
  });
}

/** Puts the nodes into the body in this order, and moves only those out of place. */
function place(body, wanted) {
  let next = body.firstChild;
  for (const node of wanted) {
    if (node === next) {
      next = next.nextSibling;
    } else {
      body.insertBefore(node, next);
    }
  }
}

// --- order ----------------------------------------------------------------------------------------------------------

function headCell(column, order, onOrder) {
  if (column.value === undefined) {
    return h("th", { scope: "col", role: "columnheader", class: column.class }, column.title);
  }
  const reorder = () => {
    order.descending = order.column === column && !order.descending;
    order.column = column;
    onOrder();
  };
  const button = h("button", { type: "button", class: "sort", on: { click: reorder } }, column.title);
  return h("th", { scope: "col", role: "columnheader", class: column.class }, button);
}

function markOrder(head, columns, order) {
  columns.forEach((column, index) => {
    if (column === order.column) {
      head.children[index].setAttribute("aria-sort", order.descending ? "descending" : "ascending");
    } else {
      head.children[index].removeAttribute("aria-sort");
    }
  });
}

function ordered(rows, { column, descending }) {
  if (column === null) {
    return rows;
  }
  const sorted = rows.toSorted((one, other) => compare(column.value(one), column.value(other)));
  return descending ? sorted.reverse() : sorted;
}

function compare(one, other) {
  if (one === other) {
    return 0;
  }
  return one === null || one === undefined || one < other ? -1 : 1;
}
