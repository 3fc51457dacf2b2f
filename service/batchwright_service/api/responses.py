"""Headers, links and streams of responses, and their descriptions in the OpenAPI document."""

from http import HTTPStatus
from typing import Any

from fastapi import Response

from batchwright.client.documents.work import EventKind
from batchwright_service.api.events.streaming import RETRY_AFTER
from batchwright_service.api.problems import RETRY_AFTER_HEADER
from batchwright_service.application.rules.idempotency import SubmissionResponse

Responses = dict[int | str, dict[str, Any]]

_EVENT: dict[str, Any] = {
    "type": "object",
    "description": "One event of the stream.",
    "properties": {
        "id": {"type": "string", "description": "The event's number within the tuning or job."},
        "event": {"type": "string", "enum": [kind.value for kind in EventKind], "description": "The event's kind."},
        "data": {
            "type": "string",
            "description": "An `Event`.",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/Event"},
        },
    },
    "required": ["data"],
}

EVENT_STREAM: Responses = {
    200: {
        "description": "Server-sent events. `id` is the event's number, `event` is its kind, and `data` is an `Event` "
        "as JSON. `Last-Event-ID` resumes after any event. A comment is sent after 15 seconds without an event. The "
        "stream ends after the event of the final state.",
        "content": {
            "text/event-stream": {
                "schema": _EVENT,
                "example": {
                    "id": "1",
                    "event": "state",
                    "data": '{"id":1,"at":"2026-01-01T00:00:00Z","kind":"state","state":"QUEUED","probe":null,'
                    '"progress":null}',
                },
            }
        },
    },
    204: {"description": "The work has ended, and there is no event after `Last-Event-ID`."},
}

_REPLAYED = {
    "Idempotency-Replayed": {
        "description": "`true` if the work was submitted before, under the same `Idempotency-Key`.",
        "schema": {"type": "string", "enum": ["true"]},
    }
}
SUBMITTED_HEADERS: dict[str, Any] = {
    "Location": {"description": "Path of the tuning or job.", "schema": {"type": "string"}},
    **_REPLAYED,
}
QUEUED_HEADERS: dict[str, Any] = {**SUBMITTED_HEADERS, **RETRY_AFTER_HEADER}


def submitted(response: SubmissionResponse, location: str) -> Response:
    """Respond to a submission: 202, or 200 where nothing needs to run."""
    headers = {"Location": location}
    if response.status is HTTPStatus.ACCEPTED:
        headers |= RETRY_AFTER
    if response.replayed:
        headers["Idempotency-Replayed"] = "true"
    return Response(response.body, status_code=response.status, media_type="application/json", headers=headers)


def json_response(body: str | bytes) -> Response:
    """Respond with a document that is already JSON."""
    return Response(body, media_type="application/json")


def on_success(**described: dict[str, Any]) -> Responses:
    """Describe status 200 in the OpenAPI document, beside the schema."""
    return {200: described}


DELETED: Responses = {204: {"description": "Deleted."}}


def links(parameter: str, pointer: str, *operations: str) -> dict[str, Any]:
    """Return links to operations that take the identifier at ``pointer`` of the response."""
    parameters = {parameter: f"$response.body#/{pointer}"}
    return {name: {"operationId": name, "parameters": parameters} for name in operations}
