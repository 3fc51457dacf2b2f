"""The log and the checkpoints of a job, and the protection of all other files."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from batchwright.training.launching.run_directory import RunPaths
from batchwright_service.application.job_files import JobFiles
from batchwright_service.application.rules.device_checks import SLOT_FILE
from tests.support.service.asking import ended_job, problem_in
from tests.support.service.running import Running

UNKNOWN = "job_" + "0" * 32


@pytest.fixture
def job(service: Running) -> dict[str, Any]:
    """A job that has ended without leaving a folder."""
    return ended_job(service)


@pytest.fixture
def paths(job: dict[str, Any]) -> RunPaths:
    """The files of the job, in an existing folder."""
    Path(job["directory"]).mkdir(parents=True, exist_ok=True)
    return RunPaths(Path(job["directory"]))


def test_the_end_of_the_log_is_read(service: Running, job: dict[str, Any], paths: RunPaths) -> None:
    """A short log is complete; a longer one is cut to the requested bytes; invalid UTF-8 is replaced."""
    paths.log.write_bytes(b"one\ntwo\n\xff\n")
    whole = service.http.get(f"/v1/jobs/{job['id']}/logs")
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.text == "one\ntwo\n\N{REPLACEMENT CHARACTER}\n"
    assert service.http.get(f"/v1/jobs/{job['id']}/logs", params={"tail": 6}).text == "two\n\N{REPLACEMENT CHARACTER}\n"


def test_a_long_log_is_cut(service: Running, job: dict[str, Any], paths: RunPaths) -> None:
    """By default the last 64 KiB are sent."""
    paths.log.write_bytes(b"x" * 100_000)
    assert len(service.http.get(f"/v1/jobs/{job['id']}/logs").content) == 65_536


def test_checkpoints_are_listed(service: Running, job: dict[str, Any], paths: RunPaths) -> None:
    """Checkpoints are listed by update, with size and time; incomplete ones and other files are omitted."""
    for update in (20, 10):
        folder = paths.checkpoints / f"update-{update:08d}"
        folder.mkdir(parents=True)
        (folder / "state.pt").write_bytes(b"x" * update)
        (folder / "model.safetensors").write_bytes(b"x" * 5)
        os.utime(folder / "state.pt", (1000, 1000))
        os.utime(folder / "model.safetensors", (2000, 2000))
    (paths.checkpoints / ".update-00000030.part").mkdir()
    (paths.checkpoints / "update-00000040").touch()
    items = service.http.get(f"/v1/jobs/{job['id']}/checkpoints").json()["items"]
    assert [(item["update"], item["size_bytes"]) for item in items] == [(10, 15), (20, 25)]
    assert {item["modified_at"] for item in items} == {"1970-01-01T00:33:20Z"}


def test_files_of_another_host_are_refused(service: Running, job: dict[str, Any]) -> None:
    """409 names the slot of a run that started on another host."""
    shutil.rmtree(job["directory"], ignore_errors=True)
    for path in ("logs", "checkpoints"):
        problem = problem_in(service.http.get(f"/v1/jobs/{job['id']}/{path}"), 409, "not-on-this-host")
        assert "host/cpu" in problem.detail


def test_files_of_an_earlier_attempt_are_refused(service: Running, job: dict[str, Any], paths: RunPaths) -> None:
    """409 if another slot's attempt has continued the run elsewhere; the job names no folder here."""
    paths.log.write_text("yesterday")
    (paths.directory / SLOT_FILE).write_text("another/cpu")
    for path in ("logs", "checkpoints"):
        problem_in(service.http.get(f"/v1/jobs/{job['id']}/{path}"), 409, "not-on-this-host")
    assert service.http.get(f"/v1/jobs/{job['id']}").json()["directory"] is None
    (paths.directory / SLOT_FILE).write_text(job["slot"])
    assert service.http.get(f"/v1/jobs/{job['id']}/logs").text == "yesterday"
    assert service.http.get(f"/v1/jobs/{job['id']}").json()["directory"] == str(paths.directory)


@pytest.mark.parametrize("name", ["..", ".", "", "job_1/..", "../runs"])
def test_only_folders_of_jobs_are_removed(tmp_path: Path, name: str) -> None:
    """A name that leads elsewhere removes nothing."""
    (tmp_path / "runs" / "job_1").mkdir(parents=True)
    assert JobFiles(tmp_path / "runs").remove(name)
    assert (tmp_path / "runs" / "job_1").is_dir()


def test_links_are_not_followed(service: Running, job: dict[str, Any], paths: RunPaths, tmp_path: Path) -> None:
    """A job that replaces its files by links discloses nothing of their targets."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "update-00000010").mkdir()
    (secret / "file").write_text("secret")
    paths.log.symlink_to(secret / "file")
    paths.checkpoints.symlink_to(secret)
    assert service.http.get(f"/v1/jobs/{job['id']}/logs").text == ""
    assert service.http.get(f"/v1/jobs/{job['id']}/checkpoints").json() == {"items": []}


def test_what_is_no_file_does_not_hold_the_request(tmp_path: Path) -> None:
    """A pipe or a folder in the place of the log is no log."""
    runs = JobFiles(tmp_path)
    (tmp_path / "job_1").mkdir()
    os.mkfifo(tmp_path / "job_1" / "log.txt")
    assert runs.log_tail("job_1", 10) == b""
    (tmp_path / "job_2" / "log.txt").mkdir(parents=True)
    assert runs.log_tail("job_2", 10) == b""


@pytest.mark.parametrize("job_id", [UNKNOWN, "..", "job_..", "tun_" + "0" * 32, "%2e%2e%2f"])
@pytest.mark.parametrize("path", ["logs", "checkpoints"])
def test_only_jobs_have_files(shared_service: Running, job_id: str, path: str) -> None:
    """An id that is not a job's is 404, before any file is opened."""
    problem_in(shared_service.http.get(f"/v1/jobs/{job_id}/{path}"), 404, "not-found")


@pytest.mark.parametrize("tail", ["0", "-1", "5000000", "x"])
def test_tails_are_bounded(shared_service: Running, tail: str) -> None:
    """A tail has 1 byte to 4 MiB."""
    response = shared_service.http.get(f"/v1/jobs/{UNKNOWN}/logs", params={"tail": tail})
    problem_in(response, 422, "invalid-request")
