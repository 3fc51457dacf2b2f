"""Query parameters: every route refuses unknown ones."""

import re

import pytest

from batchwright.client.documents.states import State
from tests.support.service.asking import body, ended, problem_in
from tests.support.service.running import Running, StartService


def operations(service: Running) -> list[tuple[str, str]]:
    """Return every method and path of the document, with an example of each identifier."""
    paths = service.http.get("/openapi.json").json()["paths"]
    return [(method.upper(), re.sub(r"{\w+}", "x", path)) for path, found in paths.items() for method in found]


def test_every_route_refuses_unknown_parameters(shared_service: Running) -> None:
    """Reads, submissions and health checks refuse alike, before they act."""
    routes = operations(shared_service)
    assert len(routes) > 25
    for method, path in routes:
        problem = problem_in(shared_service.http.request(method, path, params={"zzz": "1"}), 422, "invalid-request")
        assert problem.errors[0].field == "zzz", (method, path)
        assert "is not a query parameter of this route" in problem.detail


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("stat=FAILED", "stat: is not a query parameter of this route; did you mean `state`?"),
        ("State=FAILED", "State: is not a query parameter of this route; did you mean `state`?"),
        ("search=gpt", "search: is not a query parameter of this route; did you mean `q`?"),
        ("limit=10&ofset=3&cursr=t", "cursr: is not a query parameter of this route; did you mean `cursor`?"),
        (
            "zzz",
            (
                "zzz: is not a query parameter of this route (known: format, limit, cursor, total, state, device, "
                "model, fingerprint, q, label, project, owner, outcome, problem_code, created_after, slot, sort)"
            ),
        ),
        ("limit=1&limit=2", "limit: can be given once, and was given 2 times"),
        ("state=DONE", "must be one of 'QUEUED', 'RUNNING', "),
        ("limit=many", "limit: must be a whole number"),
        ("limit=0", "limit: must be at least 1"),
    ],
)
def test_a_wrong_query_names_the_nearest_parameter(shared_service: Running, query: str, words: str) -> None:
    """A misspelt filter is never ignored."""
    problem = problem_in(shared_service.http.get(f"/v1/tunings?{query}"), 422, "invalid-request")
    assert words in problem.detail


def test_a_state_may_be_repeated_and_of_either_case(start_service: StartService) -> None:
    """Work in any of the states is listed, in the usual order, over HTTP and in the SDK."""
    service = start_service()
    done = ended(service.http, service.http.post("/v1/tunings", json=body()).headers["location"])["id"]

    def found(query: str) -> list[str]:
        response = service.http.get(f"/v1/tunings?{query}")
        assert response.status_code == 200, response.text
        return [item["id"] for item in response.json()["items"]]

    assert found("state=succeeded") == [done]
    assert found("state=Failed&state=SUCCEEDED") == [done]
    assert found("state=FAILED&state=cancelled&state=queued") == []
    with service.client as client:
        assert [tuning.id for tuning in client.tunings.list(state=[State.FAILED, State.SUCCEEDED])] == [done]
        assert [tuning.id for tuning in client.tunings.list(state=State.FAILED)] == []
