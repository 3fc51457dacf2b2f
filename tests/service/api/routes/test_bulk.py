"""Cancel and delete several tunings or jobs with one request: results, permissions, bounds and failures."""

import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.bulk import MOST_IDS
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.submissions import SubmissionStore
from tests.support.service.asking import PATIENCE_SECONDS, UNKNOWN, bearer, body, ended, ended_job, problem_in
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, until_stopped
from tests.support.service.scripted_network import RESET, Driver, Reply, Script, fake_time

Headers = dict[str, str]


def tuning(service: Running, size: int, headers: Headers | None = None) -> str:
    """Submit a tuning, and return its id."""
    made = service.http.post("/v1/tunings", json=body(effective_batch_size=size), headers=headers)
    return str(made.json()["id"])


def change(
    service: Running, action: str, ids: list[str], headers: Headers | None = None, kind: str = "tunings"
) -> list[tuple[Any, ...]]:
    """Change several, and return the status, state and code of the problem of each, in the order of the ids."""
    response = service.http.post(f"/v1/{kind}/bulk", json={"action": action, "ids": ids}, headers=headers)
    assert response.status_code == 200, response.text
    items = response.json()["items"]
    assert [item["id"] for item in items] == list(dict.fromkeys(ids))
    for item in items:
        assert (item["problem"] is None) == (item["status"] < 300)
        assert item["problem"] is None or item["problem"]["status"] == item["status"]
    return [(item["status"], item["state"], (item["problem"] or {}).get("code")) for item in items]


def test_several_are_cancelled_and_then_deleted(start_service: StartService) -> None:
    """Queued, running and ended ones, a repeated one, a missing one and no identifier; then again."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    running = tuning(service, 5)
    assert started.wait(PATIENCE_SECONDS)
    queued, left = tuning(service, 6), tuning(service, 7)
    refused = (404, None, "not-found")
    assert change(service, "delete", [running, queued]) == [(409, None, "not-ended")] * 2
    cancelled = change(service, "cancel", [running, queued, UNKNOWN, queued, "x/../y"])
    assert cancelled == [(200, "CANCELLING", None), (200, "CANCELLED", None), refused, refused]
    assert ended(service.http, f"/v1/tunings/{running}")["state"] == "CANCELLED"
    assert change(service, "cancel", [running, queued]) == [(200, "CANCELLED", None)] * 2
    deleted = change(service, "delete", [running, left, queued])
    assert deleted[::2] == [(204, None, None)] * 2
    assert change(service, "delete", [running, queued]) == [refused] * 2
    assert service.http.get(f"/v1/tunings/{left}").status_code == 200


def test_permissions_are_those_of_each(start_service: StartService) -> None:
    """Another key's work is refused by name; an administrator may change it; other scopes do not suffice."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    mine, other = (bearer(service, Scope.TUNINGS_READ, Scope.TUNINGS_WRITE) for _ in range(2))
    reader, admin = bearer(service, Scope.TUNINGS_READ, Scope.JOBS_RUN), bearer(service, Scope.ADMIN)
    tuning(service, 4, other)  # runs meanwhile
    assert started.wait(PATIENCE_SECONDS)
    own, foreign = tuning(service, 5, mine), tuning(service, 6, other)
    for action, done in (("cancel", (200, "CANCELLED", None)), ("delete", (204, None, None))):
        refused = service.http.post("/v1/tunings/bulk", json={"action": action, "ids": [own]}, headers=reader)
        problem_in(refused, 403, "scope-missing")
        assert change(service, action, [foreign, own], mine) == [(403, None, "not-owner"), done]
        assert change(service, action, [foreign], admin) == [done]


def test_each_kind_has_its_own(service: Running) -> None:
    """A job is not found among tunings, and keeps its folder until it is deleted as a job."""
    done = ended_job(service)
    directory = Path(done["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    assert change(service, "delete", [done["id"]]) == [(404, None, "not-found")]
    assert directory.exists()
    assert change(service, "delete", [done["id"]], kind="jobs") == [(204, None, None)]
    assert not directory.exists()


def test_a_folder_that_stays_keeps_its_job(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other jobs are deleted all the same, and that one is when the folder can be removed."""
    stuck, free = ended_job(service), ended_job(service)
    Path(stuck["directory"]).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(free["directory"], ignore_errors=True)
    ids = [stuck["id"], free["id"]]
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", lambda *_args, **_options: None)
        assert change(service, "delete", ids, kind="jobs") == [(409, None, "conflict"), (204, None, None)]
    assert change(service, "delete", ids[:1], kind="jobs") == [(204, None, None)]


def test_other_methods_are_refused_with_those_that_exist(shared_service: Running) -> None:
    """Not with those of a tuning of this id, which does not exist."""
    response = shared_service.http.put("/v1/tunings/bulk")
    problem_in(response, 405, "method-not-allowed")
    assert response.headers["allow"] == "OPTIONS, POST"
    problem_in(shared_service.http.get("/v1/tunings/bulk"), 404, "not-found")


@pytest.mark.parametrize(
    "wrong",
    [
        {"action": "cancel", "ids": []},
        {"action": "cancel", "ids": [UNKNOWN] * (MOST_IDS + 1)},
        {"action": "cancel", "ids": ["x" * 65]},
        {"action": "cancel", "ids": [7]},
        {"action": "resume", "ids": [UNKNOWN]},
        {"ids": [UNKNOWN]},
        {"action": "cancel", "ids": [UNKNOWN], "force": True},
    ],
    ids=str,
)
def test_requests_out_of_bounds_are_refused(shared_service: Running, wrong: dict[str, Any]) -> None:
    """422 before anything is changed; 100 identifiers are allowed."""
    problem_in(shared_service.http.post("/v1/tunings/bulk", json=wrong), 422, "invalid-request")
    assert len(change(shared_service, "cancel", [f"tun_{number:032x}" for number in range(MOST_IDS)])) == MOST_IDS


def test_a_lost_database_changes_none(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are changed in one transaction: 503, and every one is as before."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    tuning(service, 4)
    assert started.wait(PATIENCE_SECONDS)
    ids = [tuning(service, size) for size in (5, 6)]
    seen = []

    def lose(*_: object) -> None:
        seen.append("recorded")
        raise StoreUnavailableError("the connection broke")

    with monkeypatch.context() as broken:
        broken.setattr(f"{SubmissionStore.__module__}.record_each", lose)
        response = service.http.post("/v1/tunings/bulk", json={"action": "cancel", "ids": ids})
    problem_in(response, 503, "store-unavailable")
    assert seen == ["recorded"]
    assert {service.http.get(f"/v1/tunings/{name}").json()["state"] for name in ids} == {"QUEUED"}


def test_the_sdk_sends_parts_of_the_allowed_length(shared_service: Running) -> None:
    """More identifiers than one request takes have a result each, in their order."""
    ids = [f"tun_{number:032x}" for number in range(MOST_IDS + 1)]
    with shared_service.client as client:
        for change_all in (client.tunings.cancel_all, client.tunings.delete_all):
            results = change_all([*ids, ids[0]])
            assert [result.id for result in results] == ids
            assert {result.status for result in results} == {404}
        assert client.jobs.cancel_all([]) == ()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_deletion_whose_response_was_lost_is_done(kind: str) -> None:
    """A retry finds no tuning: it was deleted. Without a retry, one that is not there was never deleted by the call."""
    missing = {"id": UNKNOWN, "status": 404, "state": None}
    found = httpx.Response(200, json={"items": [missing | {"problem": None}]})
    scripts: list[tuple[list[Reply], int]] = [([RESET, found], 204), ([found], 404)]
    for replies, status in scripts:
        with fake_time():
            (result,) = Driver(kind)(Script(replies), lambda calls: calls.tunings.delete_all([UNKNOWN]))
        assert result.status == status
