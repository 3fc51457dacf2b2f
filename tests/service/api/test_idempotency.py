"""`Idempotency-Key`: a repeated request acts once, and gets the work of the first response as it is now."""

import threading
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.work import JobSubmission
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.domain.key_texts import make_key
from batchwright_service.store.models import StoredRequest
from tests.support.factories import python_spec, recommendation
from tests.support.service.asking import PATIENCE_SECONDS, body, ended, problem_in
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, until_stopped

KEY = {"Idempotency-Key": "a-key"}


def count_tunings(service: Running) -> int:
    """Return the number of stored tunings."""
    return len(service.http.get("/v1/tunings").json()["items"])


def job_body(**changes: Any) -> dict[str, Any]:
    """The JSON of a short job."""
    submission = JobSubmission(recommendation=recommendation(), training=TrainingRequest(updates=2))
    return submission.model_dump(mode="json") | changes


def assert_replayed(first: httpx.Response, again: httpx.Response) -> None:
    """Check that the second response is the first one's work, and marked as replayed."""
    assert (again.status_code, again.json()["id"]) == (first.status_code, first.json()["id"])
    assert again.headers["location"] == first.headers["location"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"


def test_a_repeated_request_gets_the_work_of_the_first(service: Running) -> None:
    """Status and Location are those of the first, also after the tuning has ended; nothing is created."""
    first = service.http.post("/v1/tunings", json=body(fresh=True), headers=KEY)
    assert (first.status_code, first.headers["retry-after"]) == (HTTPStatus.ACCEPTED, "1")
    ended(service.http, first.headers["location"])
    again = service.http.post("/v1/tunings", json=body(fresh=True), headers=KEY)
    assert_replayed(first, again)
    assert again.json() == service.http.get(first.headers["location"]).json()
    assert count_tunings(service) == 1


def test_a_cancelled_tuning_is_not_said_to_wait(start_service: StartService) -> None:
    """A retry gets the state of now. Deleted work is named, and not submitted again."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    first = service.http.post("/v1/tunings", json=body(), headers=KEY)
    location = first.headers["location"]
    assert started.wait(PATIENCE_SECONDS)
    service.http.post(f"{location}/cancel")
    ended(service.http, location)
    again = service.http.post("/v1/tunings", json=body(), headers=KEY)
    assert_replayed(first, again)
    assert again.json()["state"] == "CANCELLED"
    assert service.http.delete(location).status_code == HTTPStatus.NO_CONTENT
    problem = problem_in(service.http.post("/v1/tunings", json=body(), headers=KEY), 404, "not-found")
    assert first.json()["id"] in problem.detail
    assert count_tunings(service) == 0


def test_a_stored_recommendation_is_replayed(service: Running) -> None:
    """A 200 is stored too: `fresh` work that ends in between does not change it."""
    ended(service.http, service.http.post("/v1/tunings", json=body()).headers["location"])
    first = service.http.post("/v1/tunings", json=body(), headers=KEY)
    assert first.status_code == HTTPStatus.OK
    ended(service.http, service.http.post("/v1/tunings", json=body(fresh=True)).headers["location"])
    assert_replayed(first, service.http.post("/v1/tunings", json=body(), headers=KEY))


def test_a_derived_recommendation_is_replayed(service: Running) -> None:
    """A recommendation that was stored for other data is replayed with its own request."""
    spec = body()["spec"]
    ended(service.http, service.http.post("/v1/tunings", json=body()).headers["location"])
    other = body(spec=spec | {"data": {"kind": "synthetic", "samples": 70}})
    first = service.http.post("/v1/tunings", json=other, headers=KEY)
    assert first.status_code == HTTPStatus.OK
    assert_replayed(first, service.http.post("/v1/tunings", json=other, headers=KEY))
    assert count_tunings(service) == 2


def test_another_request_under_the_key_is_refused(service: Running) -> None:
    """Another body or another route is 422, whatever became of the first request."""
    service.http.post("/v1/tunings", json=body(), headers=KEY)
    other = service.http.post("/v1/tunings", json=body(effective_batch_size=7), headers=KEY)
    assert "a-key" in problem_in(other, 422, "idempotency-key-reused").detail
    problem_in(service.http.post("/v1/jobs", json=job_body(), headers=KEY), 422, "idempotency-key-reused")
    assert count_tunings(service) == 1


def test_a_request_in_flight_is_not_made_twice(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the first request the second is 409 with `Retry-After`; afterwards it gets the first response."""
    entered, go_on = threading.Event(), threading.Event()
    devices = service.system.store.devices.list

    def slowly() -> Any:
        entered.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return devices()

    answers: list[httpx.Response] = []
    monkeypatch.setattr(service.system.store.devices, "list", slowly)
    first = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{service.url}/v1/tunings", json=body(), headers=KEY))
    )
    first.start()
    assert entered.wait(PATIENCE_SECONDS)
    second = service.http.post("/v1/tunings", json=body(), headers=KEY)
    go_on.set()
    first.join()
    assert "a-key" in problem_in(second, 409, "idempotency-key-in-flight").detail
    assert second.headers["retry-after"] == "1"
    assert_replayed(answers[0], service.http.post("/v1/tunings", json=body(), headers=KEY))


def test_the_database_decides_between_processes(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stores second gets the work of the request that was stored first."""
    first = service.http.post("/v1/tunings", json=body(), headers=KEY)
    monkeypatch.setattr(service.system.store.submissions, "find_request", lambda *_: None)
    assert_replayed(first, service.http.post("/v1/tunings", json=body(), headers=KEY))
    other = service.http.post("/v1/tunings", json=body(effective_batch_size=7), headers=KEY)
    problem_in(other, 422, "idempotency-key-reused")
    assert count_tunings(service) == 1


def test_a_refusal_is_not_stored(service: Running) -> None:
    """After a refusal the key can be used again."""
    code = body(spec=python_spec("os:system").model_dump(mode="json"))
    for _ in range(2):
        problem_in(service.http.post("/v1/tunings", json=code, headers=KEY), 403, "python-target-not-allowed")
    assert service.http.post("/v1/tunings", json=body(), headers=KEY).status_code == HTTPStatus.ACCEPTED


def test_a_job_is_run_once(service: Running) -> None:
    """Job submissions take keys as those of tunings do."""
    first = service.http.post("/v1/jobs", json=job_body(), headers=KEY)
    assert_replayed(first, service.http.post("/v1/jobs", json=job_body(), headers=KEY))
    assert len(service.http.get("/v1/jobs").json()["items"]) == 1


def test_a_dry_run_ignores_the_key(service: Running) -> None:
    """A dry run creates nothing, so that the key is still free for the run."""
    dry = service.http.post("/v1/jobs", json=job_body(dry_run=True), headers=KEY)
    assert dry.status_code == HTTPStatus.OK
    run = service.http.post("/v1/jobs", json=job_body(), headers=KEY)
    assert run.status_code == HTTPStatus.ACCEPTED


def test_keys_of_different_callers_are_independent(start_service: StartService) -> None:
    """The same text from two API keys names two requests."""
    service = start_service()
    answers = []
    for name in ("one", "other"):
        new, text = make_key(name, (Scope.TUNINGS_WRITE, Scope.TUNINGS_READ))
        service.system.store.keys.add(new)
        headers = KEY | {"Authorization": f"Bearer {text}"}
        answers.append(service.http.post("/v1/tunings", json=body(fresh=True), headers=headers))
    assert {answer.status_code for answer in answers} == {HTTPStatus.ACCEPTED}
    assert answers[0].json()["id"] != answers[1].json()["id"]


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "\u00e9".encode("latin-1")])
def test_invalid_keys_are_refused(shared_service: Running, key: str | bytes) -> None:
    """A key is 1 to 255 visible ASCII characters."""
    headers: Any = {"Idempotency-Key": key}
    problem = problem_in(shared_service.http.post("/v1/tunings", json=body(), headers=headers), 422, "invalid-request")
    assert [fault.field for fault in problem.errors] == ["Idempotency-Key"]


def test_a_request_outlives_the_service(service: Running) -> None:
    """It is stored with the work, where another process finds it."""
    first = service.http.post("/v1/tunings", json=body(), headers=KEY)
    kept = service.system.store.submissions.find_request("", "a-key")
    assert isinstance(kept, StoredRequest)
    assert (kept.status, kept.work_id) == (202, first.json()["id"])
