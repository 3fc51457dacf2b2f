/**
 * What several pages show, as nodes of Preact. Text becomes text: nothing in the dashboard is ever parsed as HTML.
 *
 *   badge("RUNNING")                                    a state (or a probe's outcome), with a mark and text
 *   tag("estimated")                                    a small neutral label
 *   codeBlock(text, {label: "Command"})                 code with a copy button (and `download: "name.yaml"`)
 *   variables(environment, "Environment")               environment variables, of many the first
 *   emptyState({title, text, action: node})             a text in place of missing content
 *   alertBox("bad"|"warn"|"ok"|"info", title, ...text)  a message
 *   problemAlert(problem, {retry: f})                   an ApiProblem, with a retry button
 *   scopeAlert("jobs:read")                             for a key without the scope that a page needs
 *   definitions([["Device", "cuda:0"], ...])            a definition list; entries without a value are left out
 *   bar({value, max, label, text, kind})                a share of something (memory, progress), with its text
 *   sparkline([2.3, 1.9, 1.2], "Loss")                 a small line without axes; null of less than two numbers
 *   time(iso), elapsed(iso), took(work)                 times, kept up to date
 *   html`<${Button} act=${async () => ...}>Save<//>`    disabled while the act runs
 *   await confirmDialog({title, text, action: "Revoke"})    true or false
 */

import { announce, copy } from "./dom.js";
import { ago, fullTime, nameOrPurpose, number, plural, seconds, shortId, timeText, words } from "./format.js";
import { icon } from "./icons.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./preact-htm.js";
import { quoted } from "./reproduce.js";

const ICONS = {
  QUEUED: "clock", RUNNING: "play", CANCELLING: "stop", SUCCEEDED: "check", FAILED: "cross", CANCELLED: "ban",
  FIT: "check", OOM: "cross", INVALID_SIZE: "ban", ERROR: "warning", TIMED_OUT: "clock", LOST: "unknown",
};
const KINDS = {
  QUEUED: "neutral", RUNNING: "info", CANCELLING: "warn", SUCCEEDED: "ok", FAILED: "bad", CANCELLED: "neutral",
  FIT: "ok", OOM: "bad", INVALID_SIZE: "warn", ERROR: "bad", TIMED_OUT: "warn", LOST: "warn",
};
const COPIED_MILLISECONDS = 2000;
const TICK_MILLISECONDS = 10_000;
const FEW_VARIABLES = 3;

// --- marks ----------------------------------------------------------------------------------------------------------

/** A state of work or the outcome of a probe; `text` instead of the state's own word. */
export function badge(state, text = state === "OOM" || state === "FIT" ? state : words(state)) {
  return mark(KINDS[state] ?? "neutral", ICONS[state] ?? "free", text);
}

/** A badge of any kind ("ok", "bad", "warn", "info", "neutral") with its icon and text. */
export function mark(kind, name, text) {
  return html`<span class="badge badge-${kind}">${icon(name)}${text}</span>`;
}

export function tag(text) {
  return html`<span class="tag">${text}</span>`;
}

/** The state of work; a tuning that found no plan is no success. */
export function stateBadge({ state, outcome, largest_micro_batch_size: fits }) {
  return outcome === "infeasible" ? noPlan(fits) : badge(state);
}

/** A mark that there is no plan: nothing fits, or a size does, but the command makes other updates than requested. */
export function noPlan(fits) {
  return mark("warn", "ban", fits === null ? "Nothing fits" : "No plan");
}

/** The project and the labels of a row in a list of `pages`, each a link to all of that label; null without any. */
export function labelTags({ project, labels }, pages) {
  const texts = Object.entries(labels).map(([key, value]) => `${key}=${value}`);
  const links = texts.map((text) => html`<a class="tag" href="/${pages}?label=${encodeURIComponent(text)}">${text}</a>`);
  const ofProject = project && html`<a class="tag" href="/${pages}?project=${encodeURIComponent(project)}">${project}</a>`;
  return ofProject || links.length > 0 ? html`<span class="tags">${ofProject}${links}</span>` : null;
}

/** The project and the labels of named work, or of a recommendation, as facts. */
export function nameFacts({ project, labels }, pages) {
  return [["Project", project], ["Labels", labelTags({ project: null, labels }, pages)]];
}

/** A link to a tuning, job or recommendation: its name, or the end of its identifier. */
export function linkTo(pages, id, name = null) {
  return html`<a href="/${pages}/${encodeURIComponent(id)}" class=${name === null ? "mono" : null} title=${id}>${name ?? shortId(id)}</a>`;
}

/** A link to a row by its name; without a name, by what it is for and the end of its identifier. */
export function nameLink(pages, row) {
  const end = row.name === null && html` <span class="muted mono">${shortId(row.id).replace(/^[a-z]*_/, "")}</span>`;
  return html`${linkTo(pages, row.id, nameOrPurpose(row))}${end}`;
}

/** A text with a lesser one below it, in one cell. */
export function both(first, second) {
  return html`<div>${first}${second && html`<div class="muted small">${second}</div>`}</div>`;
}

// --- times ----------------------------------------------------------------------------------------------------------

/** A <time>: relative by default, absolute with `{relative: false}`; the full date and zone are its tooltip. */
export function time(iso, { relative = true } = {}) {
  return iso ? html`<${Time} iso=${iso} text=${relative ? ago : timeText} />` : html`<span class="muted">–</span>`;
}

/** The duration since `iso`. */
export function elapsed(iso) {
  return html`<${Time} iso=${iso} text=${sinceText} />`;
}

/** The duration of work until its end or until now; null while the work waits. */
export function took({ state, started_at: started, ended_at: ended }) {
  if (started === null || state === "QUEUED") {
    return null;
  }
  return ended === null ? elapsed(started) : seconds((Date.parse(ended) - Date.parse(started)) / 1000);
}

function sinceText(iso) {
  return seconds(Math.max(0, Math.floor((Date.now() - Date.parse(iso)) / 1000)));
}

const shownTimes = new Set();
let timer = null; // one draws all of a page's times again

function Time({ iso, text }) {
  const [, draw] = useState(0);
  useEffect(() => {
    timer ??= setInterval(() => document.hidden || shownTimes.forEach((each) => each(Date.now())), TICK_MILLISECONDS);
    shownTimes.add(draw);
    return () => shownTimes.delete(draw);
  }, []);
  return html`<time datetime=${iso} title=${fullTime(iso)}>${text(iso)}</time>`;
}

// --- actions --------------------------------------------------------------------------------------------------------

/**
 * A button whose `act(event)` is disabled while it runs, so that nothing is sent twice; it then has the focus again. Errors of the act go
 * to `onProblem`.
 */
export function Button({ act, class: style = "", onProblem, disabled, children, ...attributes }) {
  const [isBusy, setBusy] = useState(false);
  const focused = useRef(null);
  const own = useRef(null);
  useLayoutEffect(() => {
    if (!isBusy && focused.current && document.activeElement === document.body) {
      focused.current.focus();
    }
    focused.current = isBusy ? focused.current : null;
  }, [isBusy]);
  const run = async (event) => {
    focused.current = document.activeElement === own.current ? own.current : null;
    setBusy(true);
    try {
      await act(event);
    } catch (problem) {
      onProblem?.(problem);
    } finally {
      setBusy(false);
    }
  };
  return html`<button type="button" ref=${own} class="button ${style}" disabled=${disabled || isBusy} aria-busy=${isBusy ? "true" : null} onClick=${run} ...${attributes}>${children}</button>`;
}

/** A button that copies a text, and confirms it. */
export function CopyButton({ text, label = "Copy", style = "button-small" }) {
  const [shown, setShown] = useState(label);
  const act = async () => {
    const result = (await copy(text)) ? "Copied" : "Select and copy by hand";
    setShown(result);
    announce(result);
    setTimeout(() => setShown(label), COPIED_MILLISECONDS);
  };
  return html`<button type="button" class="button ${style}" onClick=${act}>${shown}</button>`;
}

function save(text, name) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/octet-stream" }));
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), COPIED_MILLISECONDS);
}

/** Code or a document with a copy button. */
export function codeBlock(text, { label = "Code", download = null } = {}) {
  return html`<figure class="code">
    <figcaption class="code-bar"><span class="code-label">${label}</span><${CopyButton} text=${text} />
      ${download && html`<button type="button" class="button button-small" onClick=${() => save(text, download)}>Download</button>`}
    </figcaption>
    <pre tabindex="0" role="group" aria-label=${label}><code>${text}</code></pre>
  </figure>`;
}

/** Environment variables; of many, the first, until they are opened. */
export function variables(environment, label) {
  const all = Object.entries(environment).map(([name, value]) => `${name}=${quoted(value)}`);
  const block = all.length > 0 && codeBlock(all.join("\n"), { label });
  return all.length > FEW_VARIABLES ? html`<details><summary>${plural(all.length, "environment variable")}, which exports and jobs set: ${all[0]} …</summary>${block}</details>` : block;
}

/** A modal dialog, which Escape closes unless `isLocked`; `onClose` is called after it has closed, however that came about. */
export function Dialog({ titleId, isLocked, onClose, children }) {
  const own = useRef(null);
  useLayoutEffect(() => own.current.showModal(), []);
  return html`<dialog ref=${own} class="dialog" aria-labelledby=${titleId} closedby=${isLocked ? "none" : "closerequest"} onClose=${() => onClose(own.current.returnValue)}>${children}</dialog>`;
}

/** Shows a dialog above the page: `make(close)` gives its node. */
export function openDialog(make) {
  const place = document.body.appendChild(document.createElement("div"));
  const close = () => {
    render(null, place);
    place.remove();
  };
  render(make(close), place);
}

/** Asks for confirmation of an action that cannot be undone; Escape and "Keep" mean no. */
export function confirmDialog({ title, text, action, keep = "Keep" }) {
  return new Promise((resolve) => {
    openDialog((close) => {
      const onClose = (value) => {
        close();
        resolve(value === "yes");
      };
      return html`<${Dialog} titleId="dialog-title" onClose=${onClose}><form method="dialog">
        <h2 id="dialog-title">${title}</h2>
        <div class="dialog-text">${text}</div>
        <div class="dialog-buttons"><button class="button" value="" autofocus>${keep}</button><button class="button button-danger" value="yes">${action}</button></div>
      </form><//>`;
    });
  });
}

// --- messages -------------------------------------------------------------------------------------------------------

/** A text, with an action, in place of missing content. */
export function emptyState({ title, text = null, action = null }) {
  return html`<div class="empty"><p class="empty-title">${title}</p>${text && html`<p>${text}</p>`}${action}</div>`;
}

/** Text whose parts in backticks are code. */
export function withCode(text) {
  return text.split("`").map((part, at, all) => (at % 2 === 1 && at < all.length - 1 ? html`<code>${part}</code>` : part));
}

/** A message. Screen readers announce "bad" at once. */
export function alertBox(kind, title, ...text) {
  const parts = text.flat().filter(Boolean).map((part) => (typeof part === "string" ? html`<p>${withCode(part)}</p>` : part));
  return html`<div class="alert alert-${kind}" role=${kind === "bad" ? "alert" : "status"}>${title && html`<p class="alert-title">${withCode(title)}</p>`}${parts}</div>`;
}

/** An alert for a problem, with its invalid fields and a retry button. */
export function problemAlert(problem, { retry = null } = {}) {
  const faults = (problem.errors ?? []).map((fault) => html`<li><code>${fault.field}</code> ${fault.message}</li>`);
  const again = retry && html`<p><button type="button" class="button" onClick=${retry}>Try again</button></p>`;
  return alertBox("bad", problem.title || "The request failed", faults.length > 0 ? html`<ul>${faults}</ul>` : problem.detail, again);
}

/** An alert for a key without the scope that the page needs. */
export function scopeAlert(scope) {
  const how = "Ask the operator of this service for it, or sign in with another key.";
  return alertBox("warn", "Your key may not see this", html`<p>It needs the scope <code>${scope}</code>. ${how}</p>`);
}

// --- sections -------------------------------------------------------------------------------------------------------

/** A section with its heading, a note or links beside it; a placeholder until its content is there. */
export function Section({ name, title, note, aside, children }) {
  return html`<section aria-labelledby="${name}-title">
    <div class="section-head"><h2 id="${name}-title">${title}</h2>${note && html`<span class="muted small">${note}</span>`}${aside && html`<span class="aside small">${aside}</span>`}</div>
    <div id=${name}>${children || html`<p class="muted">Loading…</p>`}</div>
  </section>`;
}

/** Buttons of which one is pressed: `options` has their texts by value. */
export function Segments({ label, options, value, onChange }) {
  return html`<div class="segments" role="group" aria-label=${label}>${Object.entries(options).map(([name, text]) => html`<button type="button" class="segment" aria-pressed=${String(name === value)} onClick=${() => onChange(name)}>${text}</button>`)}</div>`;
}

// --- figures --------------------------------------------------------------------------------------------------------

/** A definition list of pairs; those whose value is null, undefined, false or "" are left out. */
export function definitions(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== false && value !== "");
  return html`<dl class="facts">${shown.map(([term, value]) => html`<div key=${term}><dt>${term}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** A large figure with what it counts. */
export function figure(value, label) {
  return html`<div><div class="figure-value">${value}</div><div class="figure-label">${label}</div></div>`;
}

/** A line through numbers, its first and last in words for those who do not see it. Values that are not known are left out. */
export function sparkline(values, label) {
  const known = values.map((value, at) => [at, value]).filter(([, value]) => value !== null);
  if (known.length < 2) {
    return null;
  }
  const heights = known.map(([, value]) => value);
  const [low, high] = [Math.min(...heights), Math.max(...heights)];
  const points = known.map(([at, value]) => `${((100 * at) / (values.length - 1)).toFixed(1)},${(18 - (16 * (value - low)) / (high - low || 1)).toFixed(1)}`);
  const text = `${label} from ${number(heights[0], 3)} to ${number(heights.at(-1), 3)}`;
  return html`<svg class="spark" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label=${text}><title>${text}</title><polyline points=${points.join(" ")} vector-effect="non-scaling-stroke" /></svg>`;
}

/**
 * A share of something, as a bar with its text above it.
 *
 * @param {{value: number, max: number, label: string, text: string, kind?: "info"|"ok"|"warn"|"bad"}} share
 */
export function bar({ value, max, label, text, kind = "info" }) {
  const share = max > 0 ? Math.min(Math.max(value / max, 0), 1) : 0;
  const range = { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": max, "aria-valuenow": value, "aria-valuetext": text };
  return html`<div class="bar bar-${kind}">
    <div class="bar-text">${text}</div>
    <div class="bar-track" ...${range}><div class="bar-fill" style=${{ inlineSize: `${(100 * share).toFixed(2)}%` }} /></div>
  </div>`;
}
