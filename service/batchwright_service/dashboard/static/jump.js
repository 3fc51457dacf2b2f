/** A box that jumps to a page, or to a tuning, recommendation or job whose name, model, label or id has the typed text. */

import { get, may } from "./api.js";
import { Dialog, openDialog, stateBadge, tag } from "./components.js";
import { nameOrPurpose } from "./format.js";
import { html, useEffect, useState } from "./preact-htm.js";

const KINDS = { tuning: "tunings", recommendation: "recommendations", job: "jobs" };
const MOST_OF_KIND = 5;
const TYPING_MILLISECONDS = 200;
const STEPS = { ArrowDown: 1, ArrowUp: -1 };

export function jump() {
  openDialog((close) => html`<${Jump} close=${close} />`);
}

function Jump({ close }) {
  const [text, setText] = useState("");
  const [found, setFound] = useState([]);
  useEffect(() => {
    const stopping = new AbortController();
    const timer = setTimeout(() => search(text, stopping.signal).then(setFound, () => stopping.signal.aborted || setFound([])), TYPING_MILLISECONDS);
    return () => {
      clearTimeout(timer);
      stopping.abort();
    };
  }, [text]);
  const pages = [...document.querySelectorAll(".site-nav a"), ...document.querySelectorAll(".page-head a.button-primary")].filter((link) => link.textContent.toLowerCase().includes(text.toLowerCase()));
  const onKeyDown = (event) => {
    const links = [...event.currentTarget.querySelectorAll("a")];
    const step = STEPS[event.key];
    if (step !== undefined) {
      event.preventDefault();
      (links[links.indexOf(document.activeElement) + step] ?? event.currentTarget.querySelector("input")).focus();
    } else if (event.key === "Enter" && event.target.localName === "input") {
      event.preventDefault();
      links[0]?.click();
    }
  };
  return html`<${Dialog} titleId="jump-title" onClose=${close}><div class="jump" onKeyDown=${onKeyDown}>
    <h2 id="jump-title">Jump to</h2>
    <input class="input" type="text" aria-labelledby="jump-title" placeholder="a page, name, model, label or id" autocomplete="off" spellcheck=${false} autofocus onInput=${(event) => setText(event.target.value.trim())} />
    <ul>
      ${pages.map((link) => html`<li key=${link.href}><a href=${link.getAttribute("href")}>${link.textContent}</a></li>`)}
      ${found.map((row) => html`<li key=${row.id}><a href="/${KINDS[row.kind]}/${row.id}"><span>${nameOrPurpose(row)}</span>${tag(row.kind)}${row.state && stateBadge(row)}</a></li>`)}
    </ul>
    <p class="field-hint">Enter opens the first, the arrow keys choose. In lists, / searches, and j and k move between rows.</p>
  </div><//>`;
}

async function search(q, signal) {
  const kinds = Object.entries(KINDS).filter(([, pages]) => q !== "" && may(pages === "jobs" ? "jobs:read" : "tunings:read"));
  const distinct = (pages) => (pages === "recommendations" ? true : null);
  const lists = await Promise.all(kinds.map(async ([kind, pages]) => (await get(`/v1/${pages}`, { query: { q, limit: MOST_OF_KIND, distinct: distinct(pages) }, signal })).items.map((row) => ({ ...row, kind }))));
  return lists.flat();
}
