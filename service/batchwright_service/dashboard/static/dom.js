/**
 * What pages need of the document, besides components.
 *
 *   byId("page")               an element of the page, or an error that names it
 *   await copy(text)           puts text on the clipboard
 *   announce("Copied.")        announces it to screen readers
 *   colour("--accent")         a token's colour in the current theme, as rgb(...)
 *   onTheme((theme) => draw()) called when the theme changes
 */

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

function copyBySelection(text) {
  const area = Object.assign(document.createElement("textarea"), { className: "visually-hidden", readOnly: true, value: text });
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
