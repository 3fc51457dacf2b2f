"""The OpenAPI document, and the page that shows it. The page loads nothing from other hosts."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from batchwright.client.documents.work import Event
from batchwright_service.api.docs_page import DOCS_FILES, PAGE
from batchwright_service.api.etags import StaticContent
from batchwright_service.api.examples import add_examples

DESCRIPTION = """\
Finds the largest micro-batch that fits a device, proves it by measurement, and plans the gradient accumulation for
exactly the requested effective batch size.

Every error is a problem document (RFC 9457) with a stable `code`. Requests that create something take an
`Idempotency-Key`: repeated requests get the same work. Tunings, jobs and recommendations have an `ETag`. `?wait=`
delays the response until a tuning or job has ended, and `/events` streams the events until then.
"""

TAGS: list[dict[str, Any]] = [
    {"name": "tunings", "description": "The search for the largest micro-batch, from the request to the evidence."},
    {"name": "recommendations", "description": "The durable results of tunings: decision, plan and proof."},
    {"name": "jobs", "description": "Training runs made from recommendations."},
    {"name": "exports", "description": "Recommendations in the configuration formats of frameworks and launchers."},
    {"name": "estimates", "description": "Memory estimates for any GPU, without measurements."},
    {"name": "keys", "description": "API keys and their scopes."},
    {"name": "webhooks", "description": "Receivers that are notified when tunings and jobs end."},
    {"name": "operations", "description": "Devices, the queue, and the health of the service."},
]

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
    """Serve the document at /openapi.json and the page at /docs. The document describes neither route."""
    generated: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = complete_document(generated())
        return app.openapi_schema

    document = StaticContent(lambda: json.dumps(openapi(), ensure_ascii=False, separators=(",", ":")).encode())

    app.openapi = openapi  # type: ignore[method-assign] # the way to extend the document that FastAPI documents
    files = {"/openapi.json": document, "/docs": PAGE} | {f"/docs/{name}": file for name, file in DOCS_FILES.items()}
    for path, file in files.items():
        app.add_route(path, _endpoint(file), methods=["GET"], include_in_schema=False)


def complete_document(document: dict[str, Any]) -> dict[str, Any]:
    """Add to the generated document what the framework cannot generate."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.setdefault("security", [])
            for schema in (parameter["schema"] for parameter in operation.get("parameters", ())):
                if schema.get("type") == "string" and isinstance(schema.get("default"), bool):
                    schema["default"] = str(schema["default"]).lower()  # a truth value of a query is a word
    event = Event.model_json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
    schemas = document["components"]["schemas"]
    schemas.update({**event.pop("$defs"), **schemas, "Event": event})
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    _add_items(document)
    add_examples(document["paths"])
    return document | {"servers": [{"url": "/", "description": "This service."}]}


def _add_items(part: object) -> None:
    """Replace `prefixItems`, which pydantic writes for tuples, by `items`, which more tools support."""
    if isinstance(part, dict):
        if "prefixItems" in part and "items" not in part:
            kinds = part.pop("prefixItems")
            part["items"] = kinds[0] if all(kind == kinds[0] for kind in kinds) else {"anyOf": kinds}
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            _add_items(inner)


def _endpoint(file: StaticContent) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return file.response(request.headers, _PAGE_HEADERS)

    return respond
