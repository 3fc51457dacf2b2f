"""What the tests of the API share: bodies to send, and problems to find in answers."""

from __future__ import annotations

from typing import Any

import httpx

from factories import tuning_request
from service.domain import Problem

UNKNOWN = "tun_" + "0" * 32
PATIENCE_SECONDS = 120.0


def problem_in(response: httpx.Response, status: int, code: str) -> Problem:
    """The problem in a response, which must be one, with this status and code."""
    assert response.headers["content-type"] == "application/problem+json"
    problem = Problem.model_validate_json(response.content)
    assert (response.status_code, problem.status, problem.code) == (status, status, code)
    assert problem.type == f"urn:batchwright:problem:{code}"
    return problem


def body(**changes: Any) -> dict[str, Any]:
    """The JSON of a small tuning."""
    return tuning_request().model_dump(mode="json") | changes


def ended(http: httpx.Client, location: str) -> dict[str, Any]:
    """A tuning or job once it has ended."""
    found: dict[str, Any] = http.get(location, params={"wait": PATIENCE_SECONDS}).json()
    assert found["state"] in {"SUCCEEDED", "FAILED", "CANCELLED"}
    return found
