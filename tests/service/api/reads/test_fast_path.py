"""Fast paths of routes that are called often: they answer as the framework would."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.api.routes import recommendations, work
from service.domain.api_keys import Scope, make_key
from tests.support.service.asking import body, ended, problem_in
from tests.support.service.running import Running


@pytest.fixture
def asked(service: Running) -> str:
    """The id of a recommendation, in a service with two tunings."""
    for size in (5, 6):
        response = service.http.post("/v1/tunings", json=body(effective_batch_size=size))
        tuning = ended(service.http, response.headers["location"])
    return str(tuning["recommendation_id"])


def told(response: httpx.Response) -> tuple[Any, ...]:
    """What must be the same."""
    names = ("content-type", "etag", "cache-control", "content-length")
    return response.status_code, response.content, [response.headers.get(name) for name in names]


QUERIES = ["", "?limit=1", "?limit=200", "?limit=1&cursor=t" + "f" * 32, "?cursor=t" + "f" * 32]
"""Queries that the fast path of a list takes."""
ODD = ["?limit=0", "?limit=201", "?limit=01", "?limit=x", "?limit=1&limit=2", "?cursor=t0", "?state=FAILED", "?other=1"]
"""Queries that the fast path leaves to the framework."""


@pytest.mark.parametrize("path", ["/v1/tunings", "/v1/jobs"])
@pytest.mark.parametrize("query", [*QUERIES, *ODD, "?cursor=j" + "0" * 32])
def test_a_list_is_the_same_either_way(
    service: Running, asked: str, monkeypatch: pytest.MonkeyPatch, path: str, query: str
) -> None:
    """Rows, refusals and headers, for all that may be asked."""
    assert asked
    short = service.http.get(f"{path}{query}")
    _leave_to_the_framework(monkeypatch)
    assert told(short) == told(service.http.get(f"{path}{query}"))


@pytest.mark.parametrize("known", [None, "*", '"other"', "x" * 2001])
def test_a_recommendation_is_the_same_either_way(
    service: Running, asked: str, monkeypatch: pytest.MonkeyPatch, known: str | None
) -> None:
    """The one there is, and one there is not, whatever is known of it."""
    headers = {} if known is None else {"If-None-Match": known}
    paths = [f"/v1/recommendations/{asked}", "/v1/recommendations/rec_" + "0" * 32, "/v1/recommendations/x"]
    short = [told(service.http.get(path, headers=headers)) for path in paths]
    _leave_to_the_framework(monkeypatch)
    assert short == [told(service.http.get(path, headers=headers)) for path in paths]


def test_a_fast_path_asks_for_the_scope(service: Running) -> None:
    """As the document says."""
    new, text = make_key("test", (Scope.JOBS_READ,))
    service.system.store.keys.add(new)
    for path in ("/v1/tunings", "/v1/recommendations/x"):
        response = service.http.get(path, headers={"Authorization": f"Bearer {text}"})
        assert "tunings:read" in problem_in(response, 403, "scope-missing").detail


def _leave_to_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the fast paths take nothing from now on."""
    monkeypatch.setattr(work, "plain_page", lambda _: None)
    monkeypatch.setattr(recommendations, "fits_fast_path", lambda _: False)
