/**
 * The saved views of a list: addresses under names, kept in this browser.
 *
 *   html`<${Views} path="/tunings" search="?state=FAILED" />`      `search` is what the list shows now
 */

import { Dialog, openDialog } from "./components.js";
import { icon } from "./icons.js";
import { html, useState } from "./preact-htm.js";

const LONGEST_NAME = 40;

export function Views({ path, search }) {
  const place = `batchwright.views:${path}`;
  const [views, setViews] = useState(() => stored(() => JSON.parse(localStorage.getItem(place))) ?? {});
  const keep = (changed) => {
    setViews(changed);
    stored(() => localStorage.setItem(place, JSON.stringify(changed)));
  };
  const isKept = Object.values(views).includes(search);
  if (Object.keys(views).length === 0 && search === "") {
    return null;
  }
  return html`<div class="pills" role="group" aria-label="Saved views">
    ${Object.entries(views).map(([name, kept]) => html`<span class="view" key=${name}><a class="pill" href=${path + kept} aria-current=${kept === search ? "true" : null}>${name}</a><button type="button" class="pill" aria-label="Remove the view ${name}" onClick=${() => keep(Object.fromEntries(Object.entries(views).filter(([other]) => other !== name)))}>${icon("cross")}</button></span>`)}
    ${search !== "" && !isKept && html`<button type="button" class="button button-small button-quiet" onClick=${() => openDialog((close) => question((name) => keep({ ...views, [name]: search }), close))}>Save this view</button>`}
  </div>`;
}

function question(save, close) {
  const onSubmit = (event) => save(event.target.elements.name.value.trim());
  return html`<${Dialog} titleId="view-title" onClose=${close}><form method="dialog" onSubmit=${onSubmit}>
    <h2 id="view-title">Save this view</h2>
    <div class="field"><label for="view-name">Name</label><input id="view-name" name="name" class="input" required pattern=".*\\S.*" maxlength=${LONGEST_NAME} autocomplete="off" autofocus /></div>
    <p class="field-hint">The filters, the order and the columns are kept in this browser.</p>
    <div class="dialog-buttons"><button type="button" class="button" onClick=${close}>Cancel</button><button class="button button-primary">Save</button></div>
  </form><//>`;
}

/** What an act on the storage of this browser gives; null where storage is forbidden. */
function stored(act) {
  try {
    return act();
  } catch {
    return null;
  }
}
