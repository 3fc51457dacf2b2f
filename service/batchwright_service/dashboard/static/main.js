/**
 * What every page has: the theme's button, the connection's state in the header, copy buttons of the server's own
 * markup (`<button data-copy="id of the element to copy">`), and a message when the page itself fails.
 */

import { alertBox } from "./components.js";
import { announce, byId, copy, currentTheme } from "./dom.js";
import { onConnection } from "./live.js";
import { icon } from "./icons.js";
import { startKeyboard } from "./keyboard.js";
import { html, render } from "./preact-htm.js";

const CONNECTIONS = { idle: "", live: "Live", reconnecting: "Reconnecting…" };
const THEMES = { system: ["monitor", "System"], light: ["sun", "Light"], dark: ["moon", "Dark"] };

function chosenTheme() {
  return document.documentElement.dataset.theme ?? "system";
}

function chooseTheme(theme) {
  if (theme === "system") {
    delete document.documentElement.dataset.theme;
  } else {
    document.documentElement.dataset.theme = theme;
  }
  try {
    localStorage.setItem("batchwright.theme", theme);
  } catch {
    // Without storage the choice lasts as long as the page.
  }
  document.dispatchEvent(new CustomEvent("batchwright:theme", { detail: currentTheme() }));
}

function showTheme(button) {
  const [name, text] = THEMES[chosenTheme()];
  render(html`${icon(name)}${text}`, button);
  button.setAttribute("aria-label", `Theme: ${text}`);
}

function startTheme() {
  const button = byId("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    const choices = Object.keys(THEMES);
    chooseTheme(choices[(choices.indexOf(chosenTheme()) + 1) % choices.length]);
    showTheme(button);
  });
  showTheme(button);
}

function startConnection() {
  const element = byId("connection");
  onConnection((state) => {
    element.dataset.state = state;
    element.textContent = CONNECTIONS[state];
  });
}

function startCopying() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (button !== null && (await copy(byId(button.dataset.copy).textContent))) {
      announce("Copied");
    }
  });
}

/** Shows an error of the page's own code once, so that a broken page does not look like an idle one. */
function startErrorReports() {
  const report = (event) => {
    const reason = event.reason ?? event.error;
    if (document.getElementById("page-failed") === null && reason?.name !== "AbortError") {
      const place = Object.assign(document.createElement("div"), { id: "page-failed" });
      byId("content").prepend(place);
      render(alertBox("bad", "Something in this page failed", `${reason ?? event.message}. Reload the page.`), place);
    }
  };
  addEventListener("error", report);
  addEventListener("unhandledrejection", report);
}

/** Narrow pages have the links in one row, which is scrolled to the current one. */
function showCurrentLink() {
  const link = document.querySelector(".site-nav [aria-current]");
  const row = link?.closest(".site-nav");
  row?.scrollTo({ left: link.offsetLeft - row.offsetLeft - (row.clientWidth - link.clientWidth) / 2 });
}

startErrorReports();
showCurrentLink();
startKeyboard();
startTheme();
startConnection();
startCopying();
