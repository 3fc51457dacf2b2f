/** The audit log, for admins. */

import { makeList } from "./api_list.js";
import { byId, h } from "./dom.js";
import { shortId, time, words } from "./format.js";

const ACTIONS = [
  "submitted", "resumed", "cancelled", "deleted", "pruned", "key-created", "key-revoked", "webhook-created", "webhook-rotated", "webhook-deleted", "signed-in", "signed-out",
];
const PAGES = { tun: "tunings", job: "jobs" };

makeList({
  root: byId("list"),
  path: "/v1/audit",
  caption: "Audit log",
  noun: "entry",
  nouns: "entries",
  ended: () => true,
  refreshSeconds: 15,
  filters: [
    { name: "action", label: "Action", options: [["", "Any"], ...ACTIONS.map((action) => [action, inWords(action)])] },
    { name: "key_id", label: "API key", placeholder: "its id", pattern: "[a-z0-9_]*", maxlength: 16 },
    { name: "object_id", label: "Object", placeholder: "the id of a tuning, job or key", pattern: "[a-z0-9_]*", maxlength: 64 },
  ],
  columns: [
    { title: "Time", class: "nowrap", cell: (row) => time(row.at) },
    { title: "Action", class: "nowrap", cell: (row) => inWords(row.action) },
    { title: "Object", class: "nowrap", cell: object },
    { title: "By", class: "nowrap", cell: caller },
    { title: "From", class: "nowrap", cell: (row) => row.address ?? "–" },
    { title: "Detail", class: "wide", cell: (row) => row.detail ?? "–" },
  ],
  empty: { title: "No entries", text: "Submissions, cancellations, deletions, changes of API keys and sign-ins appear here." },
});

function inWords(action) {
  return words(action.replaceAll("-", "_"));
}

/** The object as a link, also where it has been deleted since: its page says so. */
function object({ object_id: id }) {
  if (id === null) {
    return "–";
  }
  const pages = PAGES[id.split("_")[0]];
  return pages === undefined ? h("code", {}, id) : h("a", { href: `/${pages}/${id}`, class: "mono", title: id }, shortId(id));
}

function caller({ key_id: id, key_name: name, address }) {
  if (id === null) {
    return address === null ? "the command line" : "no key";
  }
  return h("span", { title: id }, name ?? id);
}
