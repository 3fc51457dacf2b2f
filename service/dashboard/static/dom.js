/**
 * Nodes, made of text alone: nothing in the dashboard is ever parsed as HTML, so no name or message can be markup.
 *
 *   h("a", {href: `/jobs/${job.id}`, class: "button"}, "Open")      an element
 *   replace(parent, ...children)                                     new content; see `h` for what children may be
 *   byId("probes")                                                   an element of the page, or an error that names it
 *   await copy(text)                                                 puts text on the clipboard
 *   await busy(button, async () => ...)                              disables the button meanwhile; throws the errors of the action
 *   announce("Copied.")                                              announces it to screen readers
 *   colour("--accent")                                               a token's colour in the current theme, as rgb(...)
 *   onTheme((theme) => draw())                                       called when the theme changes
 */

import { render } from "./preact-htm.js";

const ADDRESSES = new Set(["href", "src", "action", "formaction"]);

/**
 * An element.
 *
 * @param {string} tag
 * @param {Object} attributes  `on: {click: f}` listens, `dataset: {id: "1"}` sets data-*; true sets an empty attribute,
 *   false, null and undefined set none; the others are set as text. `style` is refused: the page's policy forbids it.
 * @param {...*} children  Nodes, text, numbers, arrays of them; null, undefined, false and "" are left out.
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Gives `parent` these children, and only these; returns it. A focused element passes the focus on to its replacement. */
export function replace(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? document.activeElement : parent;
  parent.replaceChildren(...nodes(children));
  if (focused !== parent && !focused.isConnected) {
    successor(parent, focused)?.focus({ preventScroll: true });
  }
  return parent;
}

/** Returns the enabled element with the same text, or none: a key pressed again must not trigger another action. */
function successor(parent, gone) {
  return [...parent.querySelectorAll(gone.localName)].find((element) => !element.disabled && element.textContent === gone.textContent);
}

/**
 * The element of the page with this id.
 *
 * @throws {Error} when the page has none.
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) {
    throw new Error(`the page has no element with the id ${id}`);
  }
  return found;
}

/** Sets the text of an element only when it is another one: live parts of a page do not flicker. */
export function setText(element, text) {
  if (element.textContent !== String(text)) {
    element.textContent = text;
  }
}

/** Announces a visible change to screen readers. */
export function announce(text) {
  const region = document.getElementById("announcements");
  if (region !== null) {
    region.textContent = "";
    requestAnimationFrame(() => (region.textContent = text));
  }
}

/** Puts text on the clipboard; false when the browser does not let us. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // no clipboard API over plain http
  }
}

/** The colour of a token of base.css in the current theme, as `rgb(...)`: for drawings that cannot use CSS. */
export function colour(token) {
  const probe = Object.assign(document.createElement("span"), { hidden: true });
  probe.style.color = `var(${token})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Calls `listener("light" | "dark")` whenever the theme changes; returns a function that stops it. */
export function onTheme(listener) {
  const onChange = () => listener(currentTheme());
  const system = matchMedia("(prefers-color-scheme: dark)");
  document.addEventListener("batchwright:theme", onChange);
  system.addEventListener("change", onChange);
  return () => {
    document.removeEventListener("batchwright:theme", onChange);
    system.removeEventListener("change", onChange);
  };
}

/** The theme that is shown: "light" or "dark". */
export function currentTheme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    setAttribute(element, name, value);
  }
  element.append(...nodes(children));
  return element;
}

function setAttribute(element, name, value) {
  if (name === "on") {
    Object.entries(value).forEach(([event, listener]) => element.addEventListener(event, listener));
  } else if (name === "dataset") {
    Object.assign(element.dataset, value);
  } else if (name === "style" || /^on/i.test(name)) {
    throw new Error(`${name} is no attribute for h(): use a class, or \`on\``);
  } else if (value !== false && value !== null && value !== undefined) {
    element.setAttribute(name, ADDRESSES.has(name) ? safeAddress(value) : value === true ? "" : value);
  }
}

/** An address that does not run anything: only pages, files and downloads. */
function safeAddress(value) {
  const { protocol } = new URL(value, location.href);
  return ["http:", "https:", "blob:"].includes(protocol) ? value : "#";
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "")
    .flatMap((child) => (child instanceof Node ? child : typeof child === "object" ? rendered(child) : String(child)));
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

function copyBySelection(text) {
  const area = Object.assign(document.createElement("textarea"), { className: "visually-hidden", readOnly: true, value: text });
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** The nodes of a component of Preact, in a page that is made of nodes. */
function rendered(component) {
  const place = document.createElement("div");
  render(component, place);
  return [...place.childNodes];
}
