"""The OpenAPI document, and the page that shows it. Nothing on that page comes from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response

from service.api.docs_page import DOCS_FILES, PAGE, DocsFile
from service.api.etags import conditional, tagged
from service.api.middleware.compression import compressed, takes_gzip
from service.domain.work import Event

DESCRIPTION = """\
Finds the largest micro-batch that really fits a device, proves it, and plans the gradient accumulation that gives
exactly the effective batch that was asked for.

Every error is a problem document (RFC 9457) with a stable `code`. Requests that create something take an
`Idempotency-Key`: sent again, they are given the first answer. Tunings, jobs and recommendations carry an `ETag`;
`?wait=` answers when a tuning or job has ended, and `/events` tells what happens meanwhile.
"""

TAGS: list[dict[str, Any]] = [
    {"name": "tunings", "description": "The search for the largest micro-batch, from the question to the evidence."},
    {"name": "recommendations", "description": "The durable answers of tunings: decision, plan and proof."},
    {"name": "jobs", "description": "Training runs made from recommendations."},
    {"name": "exports", "description": "Recommendations in the words of frameworks and launchers."},
    {"name": "estimates", "description": "What would fit on GPUs that need not be here; nothing is measured."},
    {"name": "keys", "description": "Who may call, and what for."},
    {"name": "operations", "description": "Devices, the queue, and how well the service is."},
]

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def install_document(app: FastAPI) -> None:
    """Serve the document at /openapi.json and the page at /docs; neither is part of the document."""
    generated: Callable[[], dict[str, Any]] = app.openapi
    written: list[tuple[bytes, bytes]] = []

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = finished(generated())
        return app.openapi_schema

    async def document(request: Request) -> Response:
        if not written:
            text = json.dumps(openapi(), ensure_ascii=False, separators=(",", ":")).encode()
            written.append((text, compressed(text)))
        plain, zipped = written[0]
        if not takes_gzip(request.headers):
            return _cached(request, plain, "application/json", {"Vary": "Accept-Encoding"})
        told = {"Vary": "Accept-Encoding", "Content-Encoding": "gzip"}
        return _cached(request, zipped, "application/json", told)

    app.openapi = openapi  # type: ignore[method-assign] # the way FastAPI names for changing it
    app.add_route("/openapi.json", document, methods=["GET"], include_in_schema=False)
    app.add_route("/docs", _page(PAGE), methods=["GET"], include_in_schema=False)
    for name, file in DOCS_FILES.items():
        app.add_route(f"/docs/{name}", _page(file), methods=["GET"], include_in_schema=False)


def finished(document: dict[str, Any]) -> dict[str, Any]:
    """The document as the framework makes it, with what it cannot be told."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.setdefault("security", [])
    event = Event.model_json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
    schemas = document["components"]["schemas"]
    schemas.update({**event.pop("$defs"), **schemas, "Event": event})
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    _give_items(document)
    return document | {"servers": [{"url": "/", "description": "This service."}]}


def _give_items(part: object) -> None:
    """Describe the items of every array: tools do not know `prefixItems` alone, which is how pydantic writes tuples."""
    if isinstance(part, dict):
        if "prefixItems" in part and "items" not in part:
            kinds = part.pop("prefixItems")
            part["items"] = kinds[0] if all(kind == kinds[0] for kind in kinds) else {"anyOf": kinds}
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            _give_items(inner)


def _page(file: DocsFile) -> Callable[[Request], Any]:
    async def page(request: Request) -> Response:
        return _cached(request, file.content, file.media_type)

    return page


def _cached(request: Request, body: bytes, media_type: str, headers: Mapping[str, str] = _NO_HEADERS) -> Response:
    """A file that a browser keeps, asking each time whether it is still the same."""
    known = request.headers.get("if-none-match")
    return conditional(tagged(body, media_type=media_type), known, {**_PAGE_HEADERS, **headers})
