"""API and workers as processes of their own: split, killed, frozen, refused, hurried. Nothing is lost or run twice."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import recommendation, tuning_request
from tests.support.paths import ROOT, SUPPORT
from tests.support.service.postgres import Databases
from tests.support.service.processes import (
    LISTENS,
    WORKS,
    Api,
    Spoken,
    are_gone,
    children_of,
    spoken,
    wait_until,
)
from tests.support.service.scripted import undisturbed

pytestmark = pytest.mark.usefixtures("starts")

PROBE_SECONDS = 0.25
LEASE_SECONDS = 6.0
"""Eight heartbeats: a busy machine may miss some of them."""

StartWorker = Callable[..., Spoken]


@pytest.fixture
def journals(tmp_path: Path) -> Path:
    """Folder of what each worker notes, by its node's name."""
    folder = tmp_path / "journals"
    folder.mkdir()
    return folder


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The database that all processes of a test share: SQLite, unless the test asks for both kinds."""
    if getattr(request, "param", "sqlite") == "postgresql":
        made: Databases = request.getfixturevalue("postgresql")
        return made.migrated()
    return f"sqlite:///{tmp_path / 'shared.db'}"


@pytest.fixture
def api(tmp_path: Path, shared: str) -> Iterator[Api]:
    """An API without a worker, as the command line serves it."""
    command = ["-m", "batchwright", "serve", "--no-worker", "--port", "0", "--database-url", shared]
    environment = {"BATCHWRIGHT_DATA_DIR": str(tmp_path / "api"), "BATCHWRIGHT_LEASE_SECONDS": str(LEASE_SECONDS)}
    with spoken(command, LISTENS, environment) as served:
        opened = Api(served.url)
        yield opened
        opened.http.close()


@pytest.fixture
def start_worker(tmp_path: Path, shared: str, journals: Path) -> Iterator[StartWorker]:
    """Starts workers over the database of ``api``, each a host of its own by default."""
    with ExitStack() as stack:

        def start(node: str, seconds: float = PROBE_SECONDS, jobs: str = "real", **settings: Any) -> Spoken:
            given = {"data_dir": str(tmp_path / node), "database_url": shared, "node_name": node}
            options = {
                "settings": given | {"lease_seconds": LEASE_SECONDS, "poll_seconds": 0.05} | settings,
                "journal": str(journals / node),
                "seconds": seconds,
                "jobs": jobs,
            }
            (journals / node).touch()
            return stack.enter_context(
                spoken([str(SUPPORT / "service" / "worker_process.py"), json.dumps(options)], WORKS)
            )

        yield start


def tuning() -> dict[str, Any]:
    """A tuning to submit."""
    document: dict[str, Any] = tuning_request().model_dump(mode="json")
    return document


def job(updates: int, every: int) -> dict[str, Any]:
    """A job to submit."""
    training = {"updates": updates, "checkpoint_every": every}
    return {"recommendation": recommendation().model_dump(mode="json"), "training": training}


def noted(journal: Path) -> list[str]:
    """Return the lines that a worker has written."""
    return journal.read_text().splitlines()


def test_api_and_worker_are_processes_of_their_own(api: Api, start_worker: StartWorker) -> None:
    """The API lists a worker's devices, takes work for them, and is ready as long as one sends heartbeats."""
    refused = api.http.post("/v1/tunings", json=tuning())
    assert (refused.status_code, refused.json()["code"]) == (422, "unknown-device")
    unready = api.http.get("/readyz")
    assert (unready.status_code, unready.json()["code"]) == (503, "not-ready")
    worker = start_worker("far", 0.0)
    assert worker.said == "far/cpu"
    wait_until(lambda: api.http.get("/readyz").status_code == 200)  # an answer is shared for a second
    assert [device["slot"] for device in api.get("/v1/devices")["items"]] == ["far/cpu"]
    ended = api.ended(api.submit("/v1/tunings", tuning()))
    assert (ended["state"], ended["slot"]) == ("SUCCEEDED", "far/cpu")
    assert ended["recommendation"]["largest_micro_batch_size"] == 37
    assert worker.end(signal.SIGTERM) == 0
    wait_until(lambda: api.http.get("/readyz").status_code == 503)
    assert api.http.post("/v1/tunings", json=tuning() | {"fresh": True}).status_code == 422


@pytest.mark.parametrize("shared", [pytest.param("sqlite", marks=pytest.mark.thorough), "postgresql"], indirect=True)
def test_a_dead_workers_tuning_is_taken_over(api: Api, start_worker: StartWorker, journals: Path) -> None:
    """Another host goes on with it, from its recorded probes: only the one that was cut off again."""
    expected = [probe.micro_batch_size for probe in undisturbed()]
    workers = {node: start_worker(node) for node in ("one", "two")}
    path = api.submit("/v1/tunings", tuning())
    wait_until(lambda: any(len(noted(journals / node)) == 3 for node in workers))
    first, second = sorted(workers, key=lambda node: not noted(journals / node))
    workers[first].end(signal.SIGKILL)
    wait_until(lambda: bool(noted(journals / second)))
    ended = api.ended(path)
    assert (ended["state"], ended["slot"], ended["attempts"]) == ("SUCCEEDED", f"{second}/cpu", 2)
    assert api.sizes(path) == expected
    assert [int(line) for line in noted(journals / first) + noted(journals / second)] == expected[:3] + expected[2:]


def test_a_worker_that_wakes_late_is_refused(api: Api, start_worker: StartWorker, journals: Path) -> None:
    """Frozen beyond its lease, it ends its own probe when it wakes, records nothing of it, and serves on."""
    first = start_worker("one", seconds=600.0)
    path = api.submit("/v1/tunings", tuning())
    wait_until(lambda: len(noted(journals / "one")) == 1)
    first.send(signal.SIGSTOP)
    start_worker("two", seconds=0.0)
    ended = api.ended(path)
    first.send(signal.SIGCONT)
    wait_until(lambda: noted(journals / "one")[-1] == "stopped")
    assert (ended["state"], ended["slot"]) == ("SUCCEEDED", "two/cpu")
    assert api.sizes(path) == [probe.micro_batch_size for probe in undisturbed()]
    api.when("/v1/devices", lambda found: all(device["alive"] for device in found["items"]))


def test_a_cancellation_reaches_a_probe_of_another_process(api: Api, start_worker: StartWorker, journals: Path) -> None:
    """Though nobody tells the worker: its probe would take ten minutes."""
    start_worker("far", seconds=600.0)
    path = api.submit("/v1/tunings", tuning())
    wait_until(lambda: len(noted(journals / "far")) == 1)
    api.http.post(f"{path}/cancel").raise_for_status()
    assert api.ended(path)["state"] == "CANCELLED"
    assert noted(journals / "far")[-1] == "stopped"


def test_a_device_is_served_by_one_process(start_worker: StartWorker, tmp_path: Path, shared: str) -> None:
    """A second worker on it is refused, with an error that names the owner, the lock file and the remedy."""
    first = start_worker("one", poll_seconds=0.5)
    command = [sys.executable, "-m", "batchwright", "work", "--device", "cpu", "--database-url", shared]
    environment = {"PATH": "", "BATCHWRIGHT_DATA_DIR": str(tmp_path / "one"), "BATCHWRIGHT_NODE_NAME": "other"}
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert second.returncode == 2
    said = " ".join(second.stderr.split())
    assert "cpu is served by one:" in said
    assert f":{first.process.pid}:" in said
    assert "end that process, or serve other devices" in said


def test_a_place_is_served_by_one_process_whatever_its_folders(start_worker: StartWorker, tmp_path: Path) -> None:
    """With data folders apart no lock file tells of the other: its heartbeat does."""
    start_worker("one")
    second = start_worker("one", data_dir=str(tmp_path / "elsewhere"))
    assert second.said == ""
    assert second.end() != 0
    assert "one/cpu is served by one:" in "".join(second.lines)


def test_a_terminated_worker_hands_back_at_once(api: Api, start_worker: StartWorker, journals: Path) -> None:
    """SIGTERM ends its probe and returns the tuning, which another goes on with before the lease would have ended."""
    first = start_worker("one", seconds=600.0, lease_seconds=3600.0)
    path = api.submit("/v1/tunings", tuning())
    wait_until(lambda: len(noted(journals / "one")) == 1)
    assert first.end(signal.SIGTERM) == 0  # within the patience, a fifth of its probe's ten minutes
    assert api.get(path)["state"] == "QUEUED"
    start_worker("two", seconds=0.0)
    assert api.ended(path)["slot"] == "two/cpu"
    assert not [line for line in first.lines if "Traceback" in line]


@pytest.mark.parametrize("second", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_second_signal_ends_a_worker_faster(
    api: Api, start_worker: StartWorker, journals: Path, second: signal.Signals
) -> None:
    """A job gets its grace period at the first signal and no more time at the second; it is handed back anyway."""
    worker = start_worker("far", jobs="stubborn", shutdown_grace_seconds=600.0, lease_seconds=3600.0)
    path = api.submit("/v1/jobs", job(10, 10))
    wait_until(lambda: noted(journals / "far") == ["job"])
    worker.send(signal.SIGTERM)
    wait_until(lambda: noted(journals / "far") == ["job", "asked with 600 s"])
    assert worker.end(second) == 0  # within the patience, a fifth of the ten minutes
    assert api.get(path)["state"] == "QUEUED"


@pytest.mark.thorough
def test_a_killed_workers_job_ends_with_the_same_weights(api: Api, start_worker: StartWorker, tmp_path: Path) -> None:
    """Kill -9 leaves no process of the job; the next worker goes on from its checkpoint to bit-equal weights."""
    runs = str(tmp_path / "runs")
    first = start_worker("one", runs_dir=runs)
    whole = api.ended(api.submit("/v1/jobs", job(60, 10)))
    path = api.submit("/v1/jobs", job(60, 10))
    api.when(path, lambda found: found["progress"] is not None and found["progress"]["update"] >= 15)
    processes = children_of(first.process.pid)
    assert processes
    first.end(signal.SIGKILL)
    wait_until(lambda: are_gone(processes))
    start_worker("two", runs_dir=runs)
    ended = api.ended(path)
    assert (ended["state"], ended["attempts"], ended["slot"]) == ("SUCCEEDED", 2, "two/cpu")
    assert ended["result"]["resumed_from"] >= 10
    assert ended["result"]["weights_sha256"] == whole["result"]["weights_sha256"]


def test_kill_minus_nine_leaves_no_probe(tmp_path: Path, shared: str) -> None:
    """With a real probe in a process: it and the fork server that it came from end with their worker."""
    arguments = ["--database-url", shared]
    environment = {"BATCHWRIGHT_DATA_DIR": str(tmp_path / "all"), "BATCHWRIGHT_DEVICES": "cpu"}
    with spoken(["-m", "batchwright", "serve", "--port", "0", *arguments], LISTENS, environment) as served:
        api = Api(served.url)
        path = api.submit("/v1/tunings", tuning() | {"memory_limit_bytes": 2**28, "device": "cpu"})
        # The process of the workers, the fork server, and a probe forked from that.
        wait_until(lambda: len(children_of(served.process.pid)) >= 3, lambda: str(api.get(path)))
        processes = children_of(served.process.pid)
        served.end(signal.SIGKILL)
        wait_until(lambda: are_gone(processes))
        api.http.close()
