/**
 * Parts that several pages show. All are nodes; all take text, never markup.
 *
 *   badge("RUNNING")                                    a state (or a probe's outcome), with a mark and text
 *   tag("estimated")                                    a small neutral label
 *   copyButton(() => text, "Copy the key")              copies, and confirms it
 *   codeBlock(text, {label: "Command"})                 code with a copy button (and `download: "name.yaml"`)
 *   emptyState({title, text, action: node})             a text in place of missing content
 *   alertBox("bad"|"warn"|"ok"|"info", title, ...text)  a message
 *   problemAlert(problem, {retry: f})                   an ApiProblem, with a retry button
 *   showProblem(place, problemAlert(problem))           in its place; a repeated problem is announced once
 *   scopeAlert("jobs:read")                             for a key without the scope that a page needs
 *   definitions([["Device", "cuda:0"], ...])            a definition list; entries without a value are left out
 *   bar({value, max, label, mark})                      a share of something (memory, progress), with its text
 *   await confirmDialog({title, text, action: "Revoke", danger: true})   true or false
 *   busy(button, async () => ...)                       disables the button meanwhile; throws the errors of the action
 */

import { announce, copy, h } from "./dom.js";
import { words } from "./format.js";

const MARKS = {
  QUEUED: "◷", RUNNING: "▶", CANCELLING: "◼", SUCCEEDED: "✓", FAILED: "✕", CANCELLED: "⊘",
  FIT: "✓", OOM: "✕", INVALID_SIZE: "⊘", ERROR: "!", TIMED_OUT: "◷", LOST: "?",
};
const KINDS = {
  QUEUED: "neutral", RUNNING: "info", CANCELLING: "warn", SUCCEEDED: "ok", FAILED: "bad", CANCELLED: "neutral",
  FIT: "ok", OOM: "bad", INVALID_SIZE: "warn", ERROR: "bad", TIMED_OUT: "warn", LOST: "warn",
};
const COPIED_MILLISECONDS = 2000;

/** A state of work or the outcome of a probe; `text` instead of the state's own word. */
export function badge(state, text = state === "OOM" || state === "FIT" ? state : words(state)) {
  return mark(KINDS[state] ?? "neutral", MARKS[state] ?? "•", text);
}

/** A badge of any kind ("ok", "bad", "warn", "info", "neutral") with its sign and text. */
export function mark(kind, sign, text) {
  return h("span", { class: `badge badge-${kind}` }, h("span", { class: "badge-sign", "aria-hidden": true }, sign), text);
}

/** A small neutral label. */
export function tag(text) {
  return h("span", { class: "tag" }, text);
}

/** The state of a row in a list; a tuning that found that nothing fits is no success. */
export function stateBadge({ state, feasible }) {
  return state === "SUCCEEDED" && feasible === false ? mark("warn", "⊘", "nothing fits") : badge(state);
}

/** The project and the labels of a row in a list. */
export function labelTags({ project, labels }) {
  const texts = [project, ...Object.entries(labels).map(([key, value]) => `${key}=${value}`)].filter(Boolean);
  return texts.length === 0 ? "–" : h("span", { class: "tags" }, texts.map(tag));
}

/** The project and the labels of named work, or of a recommendation, as facts. */
export function nameFacts({ project, labels }) {
  return [["Project", project], ["Labels", Object.keys(labels).length === 0 ? null : labelTags({ project: null, labels })]];
}

/** A button that copies what `text()` gives. */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "button button-small" }, label);
  button.addEventListener("click", async () => {
    const done = await copy(text());
    button.textContent = done ? "Copied" : "Select and copy by hand";
    announce(button.textContent);
    setTimeout(() => (button.textContent = label), COPIED_MILLISECONDS);
  });
  return button;
}

/** Code or a document with a copy button. */
export function codeBlock(text, { label = "Code", download = null } = {}) {
  const buttons = [copyButton(() => text)];
  if (download !== null) {
    buttons.push(downloadButton(text, download));
  }
  return h(
    "figure",
    { class: "code" },
    h("figcaption", { class: "code-bar" }, h("span", { class: "code-label" }, label), buttons),
    h("pre", { tabindex: 0, role: "group", "aria-label": label }, h("code", {}, text)),
  );
}

/** A button that saves text as a file. */
export function downloadButton(text, name, label = "Download") {
  const save = () => {
    const address = URL.createObjectURL(new Blob([text], { type: "application/octet-stream" }));
    h("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), COPIED_MILLISECONDS);
  };
  return h("button", { type: "button", class: "button button-small", on: { click: save } }, label);
}

/** A text, with an action, in place of missing content. */
export function emptyState({ title, text = null, action = null }) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), text && h("p", {}, text), action);
}

/** A message. Screen readers announce "bad" at once. */
export function alertBox(kind, title, ...text) {
  return h(
    "div",
    { class: `alert alert-${kind}`, role: kind === "bad" ? "alert" : "status" },
    title && h("p", { class: "alert-title" }, title),
    text.flat().map((part) => (part instanceof Node ? part : part && h("p", {}, part))),
  );
}

/** An alert for a problem, with its invalid fields and a retry button. */
export function problemAlert(problem, { retry = null } = {}) {
  const faults = (problem.errors ?? []).map((fault) => h("li", {}, h("code", {}, fault.field), ` ${fault.message}`));
  return alertBox(
    "bad",
    problem.title || "The request failed",
    faults.length > 0 ? h("ul", {}, faults) : problem.detail,
    retry && h("p", {}, h("button", { type: "button", class: "button", on: { click: retry } }, "Try again")),
  );
}

/** Shows a problem in its place, unless it is already shown, so that it is announced once. */
export function showProblem(place, alert) {
  if (!place.firstChild?.isEqualNode(alert)) {
    place.replaceChildren(alert);
  }
}

/** An alert for a key without the scope that the page needs. */
export function scopeAlert(scope) {
  const how = "Ask the operator of this service for it, or sign in with another key.";
  return alertBox("warn", "Your key may not see this", h("p", {}, "It needs the scope ", h("code", {}, scope), `. ${how}`));
}

/** A definition list of pairs; those whose value is null, undefined or "" are left out. */
export function definitions(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, shown.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
}

/**
 * A share of something, as a bar with its text above it.
 *
 * @param {{value: number, max: number, label: string, text: string, kind?: "info"|"ok"|"warn"|"bad"}} share
 */
export function bar({ value, max, label, text, kind = "info" }) {
  const share = max > 0 ? Math.min(Math.max(value / max, 0), 1) : 0;
  const fill = h("div", { class: "bar-fill" });
  fill.style.setProperty("inline-size", `${(100 * share).toFixed(2)}%`);
  const range = { role: "meter", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": max, "aria-valuenow": value };
  return h(
    "div",
    { class: `bar bar-${kind}` },
    h("div", { class: "bar-text" }, text),
    h("div", { class: "bar-track", ...range, "aria-valuetext": text }, fill),
  );
}

/** Asks for confirmation of an action that cannot be undone; Escape and "Keep" mean no. */
export function confirmDialog({ title, text, action, keep = "Keep", danger = true }) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      { class: "dialog", "aria-labelledby": "dialog-title" },
      h("form", { method: "dialog" },
        h("h2", { id: "dialog-title" }, title),
        h("div", { class: "dialog-text" }, text),
        h("div", { class: "dialog-buttons" },
          h("button", { class: "button", value: "", autofocus: true }, keep),
          h("button", { class: danger ? "button button-danger" : "button button-primary", value: "yes" }, action))),
    );
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes");
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Runs `act` with the button disabled, so that nothing is sent twice. The button then gets the focus back. */
export async function busy(button, act) {
  const focused = document.activeElement === button;
  button.disabled = true;
  button.setAttribute("aria-busy", "true");
  try {
    return await act();
  } finally {
    button.disabled = false;
    button.removeAttribute("aria-busy");
    if (focused && document.activeElement === document.body) {
      button.focus();
    }
  }
}
