"""The files of the page that shows the OpenAPI document: our own, and those of the Swagger UI package."""

from importlib import resources

from batchwright_service.api.etags import StaticContent

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Batchwright API</title>
<link rel="icon" type="image/png" href="docs/favicon.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="stylesheet" href="docs/page.css">
</head>
<body>
<nav><a href="./">Overview of the service</a></nav>
<main id="swagger-ui"></main>
<noscript>This page needs JavaScript; the document itself is at <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_STYLE = """\
nav { max-width: 1460px; margin: 0 auto; padding: 1rem 20px 0; font: 0.9375rem system-ui, sans-serif; }
nav a, html:not(.dark-mode) .swagger-ui .info a { color: #1549ae; }
.dark-mode nav a { color: #8ab8ff; }
.swagger-ui .opblock.opblock-get .opblock-summary-method { background: #1549ae; }
.swagger-ui .opblock.opblock-post .opblock-summary-method { background: #0c6338; }
.swagger-ui .opblock.opblock-delete .opblock-summary-method { background: #a3161f; }
.swagger-ui .info .title small { background: #525b69; }
.swagger-ui .info .title small.version-stamp { background: #0c6338; }
html:not(.dark-mode) .swagger-ui .btn.authorize { color: #0c6338; border-color: #0c6338; }
html:not(.dark-mode) .swagger-ui .btn.authorize svg { fill: #0c6338; }
@media (max-width: 40rem) {
  .swagger-ui .filter .operation-filter-input { width: 100%; max-width: none; }
}
"""
_START = """\
"use strict";
const system = matchMedia("(prefers-color-scheme: dark)");
function showTheme() {
  let chosen = null;
  try {
    chosen = localStorage.getItem("batchwright.theme");
  } catch {
    // Without storage the page has the system's theme.
  }
  document.documentElement.classList.toggle("dark-mode", chosen === "dark" || (chosen !== "light" && system.matches));
}
showTheme();
system.addEventListener("change", showTheme);
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  displayRequestDuration: true,
  filter: true,
  validatorUrl: null,
});
"""


def _packaged(name: str, media_type: str) -> StaticContent:
    return StaticContent(lambda: resources.files("fastapi_swagger.resources").joinpath(name).read_bytes(), media_type)


DOCS_FILES = {
    "page.css": StaticContent(_STYLE.encode, "text/css"),
    "start.js": StaticContent(_START.encode, "text/javascript"),
    "swagger-ui-bundle.js": _packaged("swagger-ui-bundle.js", "text/javascript"),
    "swagger-ui.css": _packaged("swagger-ui.css", "text/css"),
    "favicon.png": _packaged("favicon-32x32.png", "image/png"),
}
"""The files by their names below `/docs/`."""

PAGE = StaticContent(_PAGE.encode, "text/html")
