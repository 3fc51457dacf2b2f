/**
 * A dialog whose form makes something with a secret, which is then shown once.
 *
 *   openSecretForm({ name: "new-key", title: "New API key", action: "Create the key", fields: () => nodes,
 *     send: async (fields) => made, shown: (made) => ({ title, warning, label, secret, note }), onEnd: refresh })
 *
 * `send` takes the form's data and may throw an ApiProblem, or a `Refusal` with words of its own. While it runs and while the secret is
 * shown, only the dialog's button closes it.
 */

import { alertBox, codeBlock, Dialog, openDialog, problemAlert } from "./components.js";
import { announce } from "./dom.js";
import { html, useEffect, useRef, useState } from "./preact-htm.js";

/** Thrown by `send` for a form that is not complete. */
export class Refusal extends Error {}

export function openSecretForm({ onEnd, ...form }) {
  openDialog((close) => html`<${SecretForm} ...${form} onClose=${() => {
    close();
    onEnd();
  }} />`);
}

function SecretForm({ name, title, action, fields, send, shown, onClose }) {
  const [made, setMade] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const [problem, setProblem] = useState(null);
  const heading = useRef(null);
  useEffect(() => made && heading.current.focus(), [made]); // the focused element is gone
  const onSubmit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      setMade(shown(await send(new FormData(event.target))));
      announce("Done. The secret is shown once");
    } catch (error) {
      setProblem(error instanceof Refusal ? alertBox("bad", error.message) : problemAlert(error));
    }
    setBusy(false);
  };
  const done = (event) => event.currentTarget.closest("dialog").close();
  return html`<${Dialog} titleId="${name}-title" isLocked=${isBusy || made !== null} onClose=${onClose}>
    ${made ? html`<div class="stack"><h2 id="${name}-title" tabindex="-1" ref=${heading}>${made.title}</h2>
      ${alertBox("warn", "Copy it now", made.warning)}
      ${codeBlock(made.secret, { label: made.label })}
      <p class="muted">${made.note}</p>
      <div class="dialog-buttons"><button type="button" class="button button-primary" onClick=${done}>Done</button></div></div>`
    : html`<form class="form" onSubmit=${onSubmit}>
      <h2 id="${name}-title">${title}</h2>
      ${problem}
      ${fields()}
      <div class="dialog-buttons">
        <button class="button" type="button" disabled=${isBusy} onClick=${done}>Cancel</button>
        <button class="button button-primary" disabled=${isBusy} aria-busy=${isBusy ? "true" : null}>${action}</button>
      </div>
    </form>`}
  <//>`;
}
