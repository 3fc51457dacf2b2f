/**
 * The icons of the pages: shapes of Lucide 1.62.0 (https://lucide.dev), whose licence is in lucide.LICENSE.txt.
 *
 *   icon("check")      an <svg> of the text's size and colour, hidden from screen readers: the text beside it has the meaning
 */

import { html } from "./preact-htm.js";

const SHAPES = {
  check: () => html`<path d="M20 6 9 17l-5-5" />`,
  cross: () => html`<path d="M18 6 6 18" /><path d="m6 6 12 12" />`,
  clock: () => html`<circle cx="12" cy="12" r="10" /><path d="M12 6v6l4 2" />`,
  play: () => html`<path d="M5 5a2 2 0 0 1 3.008-1.728l11.997 6.998a2 2 0 0 1 .003 3.458l-12 7A2 2 0 0 1 5 19z" />`,
  stop: () => html`<rect width="18" height="18" x="3" y="3" rx="2" />`,
  ban: () => html`<circle cx="12" cy="12" r="10" /><path d="M4.929 4.929 19.07 19.071" />`,
  warning: () => html`<path d="m21.73 18-8-14a2 2 0 0 0-3.48 0l-8 14A2 2 0 0 0 4 21h16a2 2 0 0 0 1.73-3" /><path d="M12 9v4" /><path d="M12 17h.01" />`,
  unknown: () => html`<circle cx="12" cy="12" r="10" /><path d="M9.09 9a3 3 0 0 1 5.83 1c0 2-3 3-3 3" /><path d="M12 17h.01" />`,
  free: () => html`<circle cx="12" cy="12" r="10" />`,
  differs: () => html`<line x1="5" x2="19" y1="9" y2="9" /><line x1="5" x2="19" y1="15" y2="15" /><line x1="19" x2="5" y1="5" y2="19" />`,
  sun: () => html`<circle cx="12" cy="12" r="4" /><path d="M12 2v2" /><path d="M12 20v2" /><path d="m4.93 4.93 1.41 1.41" /><path d="m17.66 17.66 1.41 1.41" /><path d="M2 12h2" /><path d="M20 12h2" /><path d="m6.34 17.66-1.41 1.41" /><path d="m19.07 4.93-1.41 1.41" />`,
  moon: () => html`<path d="M20.985 12.486a9 9 0 1 1-9.473-9.472c.405-.022.617.46.402.803a6 6 0 0 0 8.268 8.268c.344-.215.825-.004.803.401" />`,
  monitor: () => html`<rect width="20" height="14" x="2" y="3" rx="2" /><line x1="8" x2="16" y1="21" y2="21" /><line x1="12" x2="12" y1="17" y2="21" />`,
};

export function icon(name) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">${SHAPES[name]()}</svg>`;
}
