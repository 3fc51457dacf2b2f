"""Build requests; parse documents, events and errors. Opens no socket; reads the clock only for a date header."""

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

from batchwright.client.documents.problems import PROBLEM_TYPE_PREFIX, Problem
from batchwright.client.documents.work import Event, EventKind
from batchwright.client.errors import NOT_A_PROBLEM, ApiError, UnexpectedResponseError, api_error

DocumentT = TypeVar("DocumentT", bound=BaseModel)

_SHOWN_LENGTH = 500
_REPEATABLE_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})


@dataclass(frozen=True)
class Call:
    """One request.

    Args:
        method: the HTTP verb.
        path: with its leading slash; see ``path_of``.
        query: parameters; those that are None are left out.
        body: sent as JSON.
        idempotency_key: lets the service recognise a repeated call, so that nothing is created twice.
        repeatable: whether the call may be sent again after its response was lost; follows from the verb and the key
            when left out.
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
        """Whether the call is idempotent."""
        if self.repeatable is not None:
            return self.repeatable
        return self.method in _REPEATABLE_METHODS or self.idempotency_key is not None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``httpx.Client.request``."""
        parameters = {name: value for name, value in self.query.items() if value is not None}
        headers, content = dict(self.headers), {}
        if self.idempotency_key is not None:
            headers["Idempotency-Key"] = self.idempotency_key
        if self.body is not None:
            headers["Content-Type"] = "application/json"
            content = {"content": self.body.model_dump_json()}
        return {"method": self.method, "url": self.path, "params": parameters, "headers": headers, **content}


def path_of(collection: str, identifier: str, *rest: str) -> str:
    """Return the path of one resource; a slash in an identifier is escaped."""
    return "/".join((collection, quote(identifier, safe=""), *rest))


def creation_call(path: str, body: BaseModel, idempotency_key: str | None) -> Call:
    """Build a call that creates one resource however often it is sent, under the caller's key or a new one."""
    return Call("POST", path, body=body, idempotency_key=idempotency_key or str(uuid.uuid4()))


def parse_document(kind: type[DocumentT], response: httpx.Response) -> DocumentT:
    """Return the document in a response. Fields added by a newer service are ignored.

    Raises:
        ApiError: when the service responded with a problem.
        UnexpectedResponseError: when the response is no such document.
    """
    if (error := error_in(response)) is not None:
        raise error
    try:
        return kind.model_validate_json(response.content, extra="ignore")
    except ValidationError as error:
        raise _unexpected(
            f"{response.status_code} with a body that is not a valid {kind.__name__}", response.text
        ) from error


def error_in(response: httpx.Response) -> ApiError | None:
    """Return the error of an unsuccessful response, or None. A response without a problem gets a generic one."""
    if response.is_success or response.status_code == httpx.codes.NOT_MODIFIED:
        return None
    try:
        problem = Problem.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        problem = Problem(
            type=PROBLEM_TYPE_PREFIX + NOT_A_PROBLEM,
            title=response.reason_phrase or "A response without a problem document",
            detail=response.text[:_SHOWN_LENGTH],
            code=NOT_A_PROBLEM,
        )
    # The status line takes precedence: a problem may omit its status.
    problem = problem.model_copy(update={"status": response.status_code})
    headers = response.headers
    return api_error(problem, retry_after(headers.get("Retry-After", "")), headers.get("X-Request-ID"))


def retry_after(text: str, now: datetime | None = None) -> float | None:
    """Return the seconds of a `Retry-After` header (a number or a date), or None if it is neither."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())


def parse_event(received: ServerSentEvent) -> Event | None:
    """Return the event that a server-sent event carries, or None if it has no data or its kind is unknown.

    Raises:
        UnexpectedResponseError: when the data are no event.
    """
    if not received.data or received.event not in {"message", *EventKind}:
        return None
    try:
        return Event.model_validate_json(received.data, extra="ignore")
    except ValidationError as error:
        raise _unexpected("with an event that cannot be parsed", received.data) from error


def _unexpected(reason: str, text: str) -> UnexpectedResponseError:
    return UnexpectedResponseError(f"the service responded {reason}: {text[:_SHOWN_LENGTH]!r}")
