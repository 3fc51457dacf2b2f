/**
 * What every page has: the theme's button, the connection's state in the header, copy buttons of the server's own
 * markup (`<button data-copy="id of the element to copy">`), and a word when the page itself fails.
 */

import { announce, byId, currentTheme, setText } from "./dom.js";
import { onConnection } from "./live.js";
import { alertBox, copy } from "./parts.js";

const CONNECTIONS = { idle: "", live: "Live", reconnecting: "Reconnecting…" };
const THEMES = { system: "◐ System", light: "☀ Light", dark: "☾ Dark" };

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
    // Then it lasts as long as the page.
  }
  document.dispatchEvent(new CustomEvent("batchwright:theme", { detail: currentTheme() }));
}

function showTheme(button) {
  setText(button, THEMES[chosenTheme()]);
  button.setAttribute("aria-label", `Theme: ${THEMES[chosenTheme()]}`);
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
  const place = byId("connection");
  onConnection((state) => {
    place.dataset.state = state;
    setText(place, CONNECTIONS[state]);
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

/** A fault of a page's own code is told once, instead of leaving a page that silently stands still. */
function startTelling() {
  const tell = (event) => {
    const reason = event.reason ?? event.error;
    if (document.getElementById("page-failed") === null && reason?.name !== "AbortError") {
      const box = alertBox("bad", "Something in this page failed", `${reason ?? event.message}. Reload the page to go on.`);
      box.id = "page-failed";
      byId("content").prepend(box);
    }
  };
  addEventListener("error", tell);
  addEventListener("unhandledrejection", tell);
}

startTelling();
startTheme();
startConnection();
startCopying();
