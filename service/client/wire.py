"""What the synchronous and a later asynchronous client share: requests in, documents and errors out. No sockets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from service.client.errors import ApiError
from service.domain import PROBLEM_TYPE_PREFIX, Event, Problem

DocumentT = TypeVar("DocumentT", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """One request, apart from how it is sent."""

    method: str
    path: str
    query: Mapping[str, Any] | None = None
    body: BaseModel | None = None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``httpx.Client.request``."""
        given: dict[str, Any] = {"method": self.method, "url": self.path, "params": self._set_parameters()}
        if self.body is not None:
            given |= {"content": self.body.model_dump_json(), "headers": {"Content-Type": "application/json"}}
        return given

    def _set_parameters(self) -> dict[str, Any]:
        return {name: value for name, value in (self.query or {}).items() if value is not None}


def parsed(kind: type[DocumentT], response: httpx.Response) -> DocumentT:
    """The document in a response. Fields that a newer service added are left out.

    Raises:
        ApiError: when the service answered with a problem.
    """
    raise_for_problem(response)
    return kind.model_validate_json(response.content, extra="ignore")


def raise_for_problem(response: httpx.Response) -> None:
    """Raise what a response that is no success says.

    Raises:
        ApiError: with the problem document, or one made up for a response that has none (a proxy's).
    """
    if response.is_success:
        return
    try:
        problem = Problem.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        problem = Problem(
            type=f"{PROBLEM_TYPE_PREFIX}not-a-problem-document",
            title=response.reason_phrase or "An answer without a problem document",
            status=response.status_code,
            detail=response.text[:500],
            code="not-a-problem-document",
        )
    raise ApiError(problem)


def events_of(lines: Iterable[str]) -> Iterator[Event]:
    """The events in the lines of a stream; comments and unknown fields are passed over."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[len("data:") :].removeprefix(" "))
        elif not line and data:
            yield Event.model_validate_json("\n".join(data), extra="ignore")
            data = []
