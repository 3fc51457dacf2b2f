"""Support for the tests of the API: request bodies, and checks of problem documents, ended jobs, and keys."""

import time
from typing import Any

import httpx

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import TERMINAL_STATES
from batchwright.client.documents.work import JobSubmission
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.domain.key_texts import make_key
from tests.support.factories import recommendation, tuning_request
from tests.support.service.running import Running

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


def ended_job(service: Running) -> dict[str, Any]:
    """A job that has ended."""
    submission = JobSubmission(recommendation=recommendation(), training=TrainingRequest(updates=1))
    response = service.http.post("/v1/jobs", json=submission.model_dump(mode="json"))
    return ended(service.http, response.headers["location"])


def bearer(service: Running, *scopes: Scope) -> dict[str, str]:
    """The header with a new API key."""
    new, text = make_key("test", scopes)
    service.system.store.keys.add(new)
    return {"Authorization": f"Bearer {text}"}
