// Sets the theme before anything is painted: a classic script in <head>, the only one that blocks.
// The choice ("light" or "dark"; absent: as the system has it) is kept under "batchwright.theme"; main.js changes it.
(function () {
  "use strict";
  let chosen = null;
  try {
    chosen = localStorage.getItem("batchwright.theme");
  } catch {
    // Storage may be forbidden: then the system's theme it is.
  }
  if (chosen === "light" || chosen === "dark") {
    document.documentElement.dataset.theme = chosen;
  }
})();
