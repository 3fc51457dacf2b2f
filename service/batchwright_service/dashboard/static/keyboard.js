/** Keys of every page: "/" goes to the search of a list, j and k to the next and the previous row, and Ctrl-K (or Command-K) jumps. */

const MOVES = { j: 1, k: -1 };

export function startKeyboard() {
  const jump = async () => document.querySelector("dialog[open]") ?? (await import("./jump.js")).jump();
  const button = document.getElementById("jump");
  if (button === null) {
    return; // nobody is signed in
  }
  button.hidden = false;
  button.addEventListener("click", jump);
  document.addEventListener("keydown", (event) => {
    const isCommand = event.ctrlKey || event.metaKey;
    if (isCommand && event.key === "k") {
      event.preventDefault();
      jump();
    } else if (!isCommand && !event.altKey && event.target.closest("input:not([type=checkbox]), textarea, select, dialog") === null) {
      move(event);
    }
  });
}

function move(event) {
  const step = MOVES[event.key];
  if (event.key === "/") {
    const search = document.querySelector(".filters input");
    search?.focus();
    search && event.preventDefault();
  } else if (step !== undefined) {
    const rows = [...document.querySelectorAll(".list-body tbody tr")];
    const at = rows.findIndex((row) => row.contains(document.activeElement));
    rows[at === -1 ? 0 : at + step]?.querySelector("a")?.focus();
  }
}
