/**
 * Tables of given rows, which keep their nodes: focus and selection survive when rows change.
 *
 *   html`<${Table} caption="Probes" columns=${columns} rows=${rows} keyOf=${(row) => row.ordinal} />`
 *
 * A column is {title, cell(row) -> node or text, class?: "number"|"wide"|..., value?(row) -> what to sort by, sort?: name}. Rows are sorted
 * here by the column with a `value` that was clicked (and one without any value is left out), or by the service: `order` names the field ("peak", "-peak"), and `onOrder` is called
 * with another. Where `covers?.(row)` gives titles of other columns, the cell takes their place in that row. A cell of a column of choices (`isChoice`) receives whether the row is in the map `chosen`. The first column's cell is the row's head, without counting a column of choices (`isChoice`).
 */

import { Component, html, useState } from "./preact-htm.js";

export function Table({ caption, showCaption = false, columns: all, rows, keyOf = (row) => row.id, chosen, order, onOrder }) {
  const [own, setOwn] = useState("");
  const isOwn = onOrder === undefined;
  const columns = isOwn ? all.filter(({ value }) => value === undefined || rows.some((row) => (value(row) ?? null) !== null)) : all;
  const sorted = isOwn ? ordered(rows, columns, own) : rows;
  // the roles stay where narrow pages show each row of a list as a card, which is no table to a browser
  return html`<div class="table-scroll" tabindex="0" role="group" aria-label=${caption}>
    <table class="table" role="table">
      <caption class=${showCaption ? "" : "visually-hidden"}>${caption}</caption>
      <thead role="rowgroup"><tr role="row">${columns.map((column) => headCell(column, isOwn ? own : order, isOwn ? setOwn : onOrder))}</tr></thead>
      <tbody role="rowgroup">${sorted.map((row) => html`<${Row} key=${keyOf(row)} row=${row} columns=${columns} isChosen=${chosen?.has(keyOf(row))} />`)}</tbody>
    </table>
  </div>`;
}

/** A row, drawn again only when something of it is another. */
class Row extends Component {
  shouldComponentUpdate({ row, columns, isChosen }) {
    return row !== this.props.row || columns !== this.props.columns || isChosen !== this.props.isChosen;
  }

  render({ row, columns, isChosen }) {
    const head = columns.find((column) => !column.isChoice);
    const wide = columns.find((column) => column.covers?.(row).length > 0);
    const cells = wide === undefined ? columns : columns.filter(({ title }) => !wide.covers(row).includes(title));
    const span = (column) => column === wide ? 1 + columns.length - cells.length : null;
    return html`<tr role="row">${cells.map((column) => column === head
      ? html`<th scope="row" role="rowheader" class=${column.class} data-title=${column.title}>${column.cell(row)}</th>`
      : html`<td role="cell" colspan=${span(column)} class=${column.class} data-title=${column.title}>${column.cell(row, isChosen)}</td>`)}</tr>`;
  }
}

function headCell(column, order, onOrder) {
  const name = column.value === undefined ? column.sort : column.title;
  const isSorted = name !== undefined && order.replace(/^-/, "") === name;
  const isDescending = order.startsWith("-");
  // a second click turns the order round; the first shows the largest figures first, and texts from A to Z
  const next = isSorted ? (isDescending ? name : `-${name}`) : `${column.sort !== undefined && column.largestFirst ? "-" : ""}${name}`;
  const button = name === undefined ? column.title : html`<button type="button" class="sort" onClick=${() => onOrder(next)}>${column.title}</button>`;
  return html`<th key=${column.title} scope="col" role="columnheader" class=${column.class} aria-sort=${isSorted ? (isDescending ? "descending" : "ascending") : null}>${button}</th>`;
}

function ordered(rows, columns, order) {
  const column = columns.find(({ title, value }) => value !== undefined && title === order.replace(/^-/, ""));
  if (column === undefined) {
    return rows;
  }
  const sorted = rows.toSorted((one, other) => compare(column.value(one), column.value(other)));
  return order.startsWith("-") ? sorted.reverse() : sorted;
}

function compare(one, other) {
  if (one === other) {
    return 0;
  }
  return one === null || one === undefined || one < other ? -1 : 1;
}
