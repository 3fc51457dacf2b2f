"""Fast paths of frequent routes: their responses are those of the framework."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from batchwright.client.documents.api_keys import Scope
from batchwright_service.api.routes import recommendations, work
from batchwright_service.domain.key_texts import make_key
from tests.support.service.asking import body, ended, problem_in
from tests.support.service.running import Running


@pytest.fixture(scope="module")
def recommendation_id(shared_service: Running) -> str:
    """The id of a recommendation, in a service with two tunings."""
    for size in (5, 6):
        response = shared_service.http.post("/v1/tunings", json=body(effective_batch_size=size))
        tuning = ended(shared_service.http, response.headers["location"])
    return str(tuning["recommendation_id"])


def comparable(response: httpx.Response) -> tuple[Any, ...]:
    """Return the parts of a response that must be equal."""
    names = ("content-type", "etag", "cache-control", "content-length")
    return response.status_code, response.content, [response.headers.get(name) for name in names]


QUERIES = ["", "?limit=1", "?limit=200", "?limit=1&cursor=t" + "f" * 32, "?cursor=t" + "f" * 32]
"""Queries that the fast path of a list takes."""
ODD = ["?limit=0", "?limit=201", "?limit=01", "?limit=x", "?limit=1&limit=2", "?cursor=t0", "?state=FAILED", "?other=1"]
"""Queries that the fast path leaves to the framework."""


@pytest.mark.parametrize("path", ["/v1/tunings", "/v1/jobs"])
@pytest.mark.parametrize("query", [*QUERIES, *ODD, "?cursor=j" + "0" * 32])
def test_the_fast_path_of_lists_responds_as_the_framework(
    shared_service: Running, recommendation_id: str, monkeypatch: pytest.MonkeyPatch, path: str, query: str
) -> None:
    """Rows, refusals and headers are equal for all queries."""
    assert recommendation_id
    short = shared_service.http.get(f"{path}{query}")
    _disable_fast_paths(monkeypatch)
    assert comparable(short) == comparable(shared_service.http.get(f"{path}{query}"))


@pytest.mark.parametrize("known", [None, "*", '"other"', "x" * 2001])
def test_the_fast_path_of_recommendations_responds_as_the_framework(
    shared_service: Running, recommendation_id: str, monkeypatch: pytest.MonkeyPatch, known: str | None
) -> None:
    """An existing and a missing recommendation, with any `If-None-Match`."""
    headers = {} if known is None else {"If-None-Match": known}
    paths = [f"/v1/recommendations/{recommendation_id}", "/v1/recommendations/rec_" + "0" * 32, "/v1/recommendations/x"]
    short = [comparable(shared_service.http.get(path, headers=headers)) for path in paths]
    _disable_fast_paths(monkeypatch)
    assert short == [comparable(shared_service.http.get(path, headers=headers)) for path in paths]


def test_a_fast_path_requires_the_scope(service: Running) -> None:
    """A key without the documented scope is refused."""
    new, text = make_key("test", (Scope.JOBS_READ,))
    service.system.store.keys.add(new)
    for path in ("/v1/tunings", "/v1/recommendations/x"):
        response = service.http.get(path, headers={"Authorization": f"Bearer {text}"})
        assert "tunings:read" in problem_in(response, 403, "scope-missing").detail


def _disable_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fast paths leave every request to the framework."""
    monkeypatch.setattr(work, "plain_page", lambda _: None)
    monkeypatch.setattr(recommendations, "fits_fast_path", lambda _: False)
