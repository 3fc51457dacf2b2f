"""The files of the page that shows the OpenAPI document: our own, and those of the Swagger UI package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

_SWAGGER = "fastapi_swagger.resources"
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Batchwright API</title>
<link rel="icon" type="image/png" href="docs/favicon.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<main id="swagger-ui"></main>
<noscript>This page needs JavaScript; the document itself is at <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START = """\
"use strict";
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  displayRequestDuration: true,
  filter: true,
  validatorUrl: null,
});
"""


@dataclass(frozen=True)
class DocsFile:
    """A file of the page: its media type, and its name in the Swagger UI package or its own text."""

    media_type: str
    packaged: str | None = None
    text: str = ""

    @property
    def content(self) -> bytes:
        """The bytes of the file."""
        return self.text.encode() if self.packaged is None else _packaged(self.packaged)


DOCS_FILES = {
    "start.js": DocsFile("text/javascript", text=_START),
    "swagger-ui-bundle.js": DocsFile("text/javascript", "swagger-ui-bundle.js"),
    "swagger-ui.css": DocsFile("text/css", "swagger-ui.css"),
    "favicon.png": DocsFile("image/png", "favicon-32x32.png"),
}
"""The files by their names below `/docs/`."""

PAGE = DocsFile("text/html", text=_PAGE)


@cache
def _packaged(name: str) -> bytes:
    return resources.files(_SWAGGER).joinpath(name).read_bytes()
