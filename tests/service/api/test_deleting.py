"""Deletion of ended work, and its permissions."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.work import JobSubmission
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.errors import StoreUnavailableError
from tests.support.factories import recommendation
from tests.support.service.asking import PATIENCE_SECONDS, UNKNOWN, bearer, body, ended, problem_in
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, until_stopped


def job_body() -> dict[str, Any]:
    """Return the JSON of a short job."""
    submission = JobSubmission(recommendation=recommendation(), training=TrainingRequest(updates=1))
    return submission.model_dump(mode="json")


def test_a_tuning_that_has_ended_is_deleted_once(service: Running) -> None:
    """204, then 404 for the tuning and its records; its recommendation stays."""
    location = service.http.post("/v1/tunings", json=body()).headers["location"]
    answer = ended(service.http, location)["recommendation_id"]
    response = service.http.delete(location)
    assert (response.status_code, response.content) == (204, b"")
    for path in (location, f"{location}/probes", f"{location}/events"):
        problem_in(service.http.get(path), 404, "not-found")
    problem_in(service.http.delete(location), 404, "not-found")
    assert service.http.get(f"/v1/recommendations/{answer}").status_code == 200
    assert service.http.post("/v1/tunings", json=body()).status_code == 202


def test_running_work_is_not_deleted(start_service: StartService) -> None:
    """409, and the work continues."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    location = service.http.post("/v1/tunings", json=body()).headers["location"]
    assert started.wait(PATIENCE_SECONDS)
    problem_in(service.http.delete(location), 409, "not-ended")
    service.http.post(f"{location}/cancel")
    ended(service.http, location)
    assert service.http.delete(location).status_code == 204


def test_only_its_owner_or_an_admin_deletes_work(start_service: StartService) -> None:
    """Another key with the same scope is refused."""
    service = start_service()
    mine, other = (bearer(service, Scope.TUNINGS_WRITE, Scope.TUNINGS_READ) for _ in range(2))
    admin = bearer(service, Scope.ADMIN)
    made = [service.http.post("/v1/tunings", json=body(fresh=True), headers=mine) for _ in range(2)]
    for response in made:
        assert service.http.get(response.headers["location"], params={"wait": 20}, headers=mine).json()["ended_at"]
    first, second = (response.headers["location"] for response in made)
    assert "delete" in problem_in(service.http.delete(first, headers=other), 403, "not-owner").detail
    assert service.http.delete(first, headers=mine).status_code == 204
    assert service.http.delete(second, headers=admin).status_code == 204


def test_the_folder_of_a_deleted_job_is_removed(service: Running, tmp_path: Path) -> None:
    """The folder is removed, and the targets of links in it are not."""
    location = service.http.post("/v1/jobs", json=job_body()).headers["location"]
    directory = Path(ended(service.http, location)["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (directory / "link").symlink_to(precious)
    assert service.http.delete(location).status_code == 204
    assert not directory.exists()
    assert (precious / "file").exists()
    problem_in(service.http.delete(location), 404, "not-found")


def test_a_job_is_deleted_after_its_folder(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the database fails in between, or the folder cannot be removed, the job can be deleted again."""
    location = service.http.post("/v1/jobs", json=job_body()).headers["location"]
    directory = Path(ended(service.http, location)["directory"])

    def lost(*_: object) -> None:
        raise StoreUnavailableError("the connection broke")

    with monkeypatch.context() as broken:
        broken.setattr(service.system.store.retention, "delete", lost)
        problem_in(service.http.delete(location), 503, "store-unavailable")
    assert not directory.exists()
    assert service.http.get(location).status_code == 200
    directory.mkdir()
    with monkeypatch.context() as stuck:
        stuck.setattr(shutil, "rmtree", lambda *_args, **_options: None)
        assert str(directory) in problem_in(service.http.delete(location), 409, "conflict").detail
    assert service.http.delete(location).status_code == 204
    assert not directory.exists()


def test_a_link_in_place_of_a_folder_is_not_followed(service: Running, tmp_path: Path) -> None:
    """The target of the link was not created by the job."""
    location = service.http.post("/v1/jobs", json=job_body()).headers["location"]
    directory = Path(ended(service.http, location)["directory"])
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    precious = tmp_path / "precious"
    precious.mkdir()
    directory.symlink_to(precious)
    assert service.http.delete(location).status_code == 204
    assert precious.exists()


def test_a_tuning_is_not_deleted_as_a_job(service: Running) -> None:
    """Each kind of work is deleted by its own route."""
    location = service.http.post("/v1/tunings", json=body()).headers["location"]
    ended(service.http, location)
    problem_in(service.http.delete(location.replace("tunings", "jobs")), 404, "not-found")
    problem_in(service.http.delete(f"/v1/jobs/{UNKNOWN}"), 404, "not-found")
