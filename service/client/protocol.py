"""Requests in, documents, events and errors out. No sockets, no clock but to read a date."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import ServerSentEvent
from pydantic import BaseModel, ValidationError

from service.client.errors import NOT_A_PROBLEM, ApiError, UnexpectedAnswerError, api_error
from service.domain.problems import PROBLEM_TYPE_PREFIX, Problem
from service.domain.work import Event, EventKind

DocumentT = TypeVar("DocumentT", bound=BaseModel)

_SHOWN_LENGTH = 500
_REPEATABLE_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})


@dataclass(frozen=True)
class Call:
    """One request, apart from how it is sent.

    Args:
        method: the HTTP verb.
        path: with its leading slash; see ``path_of``.
        query: what is none is left out.
        body: sent as JSON.
        idempotency_key: with it the service makes nothing twice, so that the call may be repeated.
        repeatable: whether it may be sent again when its answer was lost; follows from verb and key when left out.
        headers: further headers.
    """

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: BaseModel | None = None
    idempotency_key: str | None = None
    repeatable: bool | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def may_repeat(self) -> bool:
        """Whether sending it twice does what sending it once does."""
        if self.repeatable is not None:
            return self.repeatable
        return self.method in _REPEATABLE_METHODS or self.idempotency_key is not None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``httpx.Client.request``."""
        headers = dict(self.headers)
        if self.idempotency_key is not None:
            headers["Idempotency-Key"] = self.idempotency_key
        if self.body is None:
            return {"method": self.method, "url": self.path, "params": self._parameters(), "headers": headers}
        return {
            "method": self.method,
            "url": self.path,
            "params": self._parameters(),
            "headers": {**headers, "Content-Type": "application/json"},
            "content": self.body.model_dump_json(),
        }

    def _parameters(self) -> dict[str, Any]:
        return {name: value for name, value in self.query.items() if value is not None}


def path_of(collection: str, identifier: str, *rest: str) -> str:
    """The path of one thing; an identifier that holds a slash stays one part of it."""
    return "/".join((collection, quote(identifier, safe=""), *rest))


def creating(path: str, body: BaseModel, idempotency_key: str | None) -> Call:
    """A call that makes something once, however often it is sent: under the caller's key, or one of its own."""
    return Call("POST", path, body=body, idempotency_key=idempotency_key or str(uuid.uuid4()))


def parsed(kind: type[DocumentT], response: httpx.Response) -> DocumentT:
    """The document in a response. Fields that a newer service added are left out.

    Raises:
        ApiError: when the service answered with a problem.
        UnexpectedAnswerError: when what came is no such document.
    """
    if (error := problem_in(response)) is not None:
        raise error
    try:
        return kind.model_validate_json(response.content, extra="ignore")
    except ValidationError as error:
        raise _unexpected(f"{response.status_code} with what is no {kind.__name__}", response.text) from error


def problem_in(response: httpx.Response) -> ApiError | None:
    """What a response that is no success says; one is made up for a response without a problem (a proxy's)."""
    if response.is_success or response.status_code == httpx.codes.NOT_MODIFIED:
        return None
    try:
        problem = Problem.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        problem = Problem(
            type=PROBLEM_TYPE_PREFIX + NOT_A_PROBLEM,
            title=response.reason_phrase or "An answer without a problem document",
            detail=response.text[:_SHOWN_LENGTH],
            code=NOT_A_PROBLEM,
        )
    # What the status line says counts: a problem may leave it out.
    problem = problem.model_copy(update={"status": response.status_code})
    headers = response.headers
    return api_error(problem, retry_after(headers.get("Retry-After", "")), headers.get("X-Request-ID"))


def retry_after(text: str, now: datetime | None = None) -> float | None:
    """The seconds that a `Retry-After` asks for, as a number or as a date; none when it is neither."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())


def event_in(received: ServerSentEvent) -> Event | None:
    """Return the event that a server-sent event carries; none for one without data, or of a kind that is not known.

    Raises:
        UnexpectedAnswerError: when its data is no event.
    """
    if not received.data or received.event not in {"message", *EventKind}:
        return None
    try:
        return Event.model_validate_json(received.data, extra="ignore")
    except ValidationError as error:
        raise _unexpected("an event that is none", received.data) from error


def _unexpected(what: str, text: str) -> UnexpectedAnswerError:
    return UnexpectedAnswerError(f"the service answered {what}: {text[:_SHOWN_LENGTH]!r}")
