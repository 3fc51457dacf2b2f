"""Support for the tests of the API: request bodies, and checks of problem documents."""

import time
from typing import Any

import httpx

from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import TERMINAL_STATES
from tests.support.factories import tuning_request

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
    over = time.monotonic() + PATIENCE_SECONDS
    while (found := http.get(location, params={"wait": 30}).json())["state"] not in TERMINAL_STATES:
        assert time.monotonic() < over, found
    return dict(found)
