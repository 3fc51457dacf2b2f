// Sets the theme before anything is painted: a classic script in <head>, the only one that blocks.
// The choice ("light" or "dark"; absent: the theme of the system) is kept under "batchwright.theme"; main.js changes it.
(function () {
  "use strict";
  let chosen = null;
  try {
    chosen = localStorage.getItem("batchwright.theme");
  } catch {
    // Storage may be forbidden. Then the theme of the system is used.
  }
  if (chosen === "light" || chosen === "dark") {
    document.documentElement.dataset.theme = chosen;
  }
})();
