/**
 * Charts in the colours of the theme, by plotly.js (the global `Plotly` of the page's classic script).
 *
 *   html`<${Chart} id="loss" figure=${() => ({data, layout})} />`   drawn with its page, and again when the theme or the width changes
 *
 *   line(name, x, y, token)      a trace of lines       points(name, x, y, {token, symbol, hover})   of marks
 *   level(y, text, token)        {shape, annotation}: a horizontal line with words at its end, above or below it
 *
 * Every chart has its figures in a table or text beside it too: the drawing is hidden from screen readers.
 */

import { colour, onTheme } from "./dom.js";
import { html, useEffect, useRef } from "./preact-htm.js";

const OPTIONS = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" };
const NARROW = 480;

export function Chart({ id, class: style = "", figure }) {
  const place = useRef(null);
  const draw = useRef(null);
  draw.current = () => {
    const { data, layout } = figure();
    globalThis.Plotly.react(place.current, data, { ...ground(place.current), ...layout }, OPTIONS);
  };
  useEffect(() => draw.current());
  useEffect(() => onTheme(() => draw.current()), []);
  return html`<div id=${id} ref=${place} class="chart ${style}" aria-hidden="true" />`;
}

/** A line, with marks where there are few points. */
export function line(name, x, y, token, { dash = "solid", hover = "skip", marks = false } = {}) {
  const style = { color: colour(token), width: 1.5, dash };
  return { type: "scatter", mode: marks ? "lines+markers" : "lines", name, x, y, line: style, hoverinfo: hover };
}

/** Marks, each with the text that `hover` gives for it. */
export function points(name, x, y, { token, symbol = "circle", hover }) {
  const text = hover.map(plain);
  const marker = { color: colour(token), symbol, size: 10, line: { width: 2, color: colour(token) } };
  return { type: "scatter", mode: "markers", name, x, y, marker, text, hovertemplate: "%{text}<extra></extra>" };
}

/** A level across the whole width: what `layout.shapes` and `layout.annotations` take. */
export function level(y, text, token, { above = true } = {}) {
  const tint = colour(token);
  return {
    shape: { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: tint, width: 1.5, dash: "dash" } },
    annotation: {
      xref: "paper", x: 0, y, text: plain(text), showarrow: false, xanchor: "left", yanchor: above ? "bottom" : "top",
      font: { color: tint, size: 12 },
    },
  };
}

/** Escapes lines of text for a hover, because plotly.js interprets some markup. */
export function plain(text) {
  return String(text)
    .replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;")
    .split("\n").join("<br>");
}

function ground(element) {
  const axis = {
    gridcolor: colour("--grid"), linecolor: colour("--edge"), zerolinecolor: colour("--grid"), automargin: true,
    fixedrange: element.clientWidth < NARROW,
  };
  return {
    autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--text") },
    margin: { l: 56, r: 16, t: 16, b: 48 },
    hovermode: "closest",
    hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--edge"), font: { color: colour("--text") }, align: "left" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    xaxis: { ...axis },
    yaxis: { ...axis },
  };
}
