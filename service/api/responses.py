"""What routes answer with beside their documents, and how the document tells of it: headers, links, streams."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import Response

from service.api.events.streaming import RETRY_AFTER
from service.api.problems import RETRY_AFTER_HEADER
from service.application.rules.idempotency import SubmissionResponse
from service.domain.work import EventKind

Responses = dict[int | str, dict[str, Any]]

_EVENT: dict[str, Any] = {
    "type": "object",
    "description": "One event of the stream, by the names of its fields.",
    "properties": {
        "id": {"type": "string", "description": "The event's number within the tuning or job."},
        "event": {"type": "string", "enum": [kind.value for kind in EventKind], "description": "Its kind."},
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
        "description": "Server-sent events. `id` is the event's number, `event` its kind, `data` an `Event` as JSON. "
        "`Last-Event-ID` resumes after any of them; a comment comes every 15 seconds while nothing happens. The stream "
        "ends after the event of the last state.",
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
    204: {"description": "It has ended, and there is nothing after `Last-Event-ID`."},
}

_REPLAYED = {
    "Idempotency-Replayed": {
        "description": "`true` where this answer was given before, under the same `Idempotency-Key`.",
        "schema": {"type": "string", "enum": ["true"]},
    }
}
SUBMITTED_HEADERS: dict[str, Any] = {
    "Location": {"description": "Where to look.", "schema": {"type": "string"}},
    **_REPLAYED,
}
QUEUED_HEADERS: dict[str, Any] = {**SUBMITTED_HEADERS, **RETRY_AFTER_HEADER}


def submitted(answer: SubmissionResponse, location: str) -> Response:
    """The answer to a submission: 202, or 200 where nothing needs to run."""
    headers = {"Location": location}
    if answer.status is HTTPStatus.ACCEPTED:
        headers |= RETRY_AFTER
    if answer.replayed:
        headers["Idempotency-Replayed"] = "true"
    return Response(answer.body, status_code=answer.status, media_type="application/json", headers=headers)


def json_response(body: str | bytes) -> Response:
    """A document that is JSON already."""
    return Response(body, media_type="application/json")


def on_success(**told: dict[str, Any]) -> Responses:
    """What the document tells of status 200, beside the schema."""
    return {200: told}


DELETED: Responses = {204: {"description": "Deleted."}}


def links(parameter: str, pointer: str, *operations: str) -> dict[str, Any]:
    """Links to operations that take an identifier which the answer holds at ``pointer``."""
    given = {parameter: f"$response.body#/{pointer}"}
    return {name: {"operationId": name, "parameters": given} for name in operations}
