"""The fleet on a real Slurm of two nodes, through submitit."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright_service.dispatch.cluster_engine import EngineJob, JobName, JobState, NewJob
from tests.fleet.conftest import StartService, environment_of
from tests.fleet.work import PATIENCE_SECONDS, Dispatching, watched, workers
from tests.support.exports.slurm_cluster import Slurm
from tests.support.service.processes import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]

_NODES = 2


def test_killed_workers_and_dispatchers_change_no_answer(slurm: Slurm, serve: StartService, tmp_path: Path) -> None:
    """Three tunings and a job end as undisturbed ones do, also when a worker and the dispatcher are killed."""
    with slurm.started():
        service = serve("--slurm", str(tmp_path / "jobs"), environment=environment_of(slurm))
        service.wait_for_devices(_NODES)
        calm = service.submit_tuning(32)
        expected = service.answer(calm)
        tuning = service.api.get(calm)
        weights = service.answer(service.submit_job(tuning, 20))
        with watched() as most:
            paths = [service.submit_tuning(32) for _ in range(3)]
            job = service.submit_job(tuning, 20)
            wait_until(lambda: len(workers()) >= _NODES)
            service.kill_dispatcher()
            service.kill_worker()
            assert [service.answer(path) for path in paths] == [expected] * len(paths)
            assert service.answer(job) == weights
        assert set(most.values()) == {1}, most
        assert service.process.end(signal.SIGTERM) == 0
        wait_until(lambda: not workers())


def test_a_job_says_to_which_nodes_it_was_restricted(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that excludes a node may run on the other one; a job that excludes none, on any."""
    from batchwright_service.dispatch.slurm_engine import SlurmEngine

    for name, value in environment_of(slurm).items():
        monkeypatch.setenv(name, value)
    with slurm.started():
        engine = SlurmEngine(tmp_path / "jobs", "sleep 60")
        both = frozenset(node.id for node in engine.nodes())
        for number, nodes in enumerate((both, frozenset({"localhost"}))):
            engine.submit(NewJob(JobName("tun_1", 0, number), (), "cpu", 1, nodes))
        found = {job.name.attempt: job for job in engine.jobs()}
        assert {attempt: job.nodes for attempt, job in found.items()} == {0: None, 1: frozenset({"localhost"})}
        for job in found.values():
            engine.stop(job.id)


def test_a_job_whose_launch_fails_ends(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm would hold a requeued one until someone releases it, and its work would wait with it."""
    from batchwright_service.dispatch.slurm_engine import SlurmEngine

    for name, value in environment_of(slurm).items():
        monkeypatch.setenv(name, value)
    with slurm.started():
        engine = SlurmEngine(tmp_path / "jobs", "sleep 60")
        nodes = frozenset(node.id for node in engine.nodes())
        slurm.break_launches()
        engine.submit(NewJob(JobName("tun_1", 0, 0), (), "cpu", 1, nodes))
        seen: list[EngineJob] = []

        def has_ended() -> bool:
            seen[:] = engine.jobs()
            return [job.state for job in seen] == [JobState.ENDED]

        wait_until(has_ended, lambda: str(seen))


def test_a_job_over_two_nodes_equals_one_of_one_node(slurm: Slurm, serve: StartService, tmp_path: Path) -> None:
    """The second node's agent is a step of the allocation; a cancelled job leaves nothing that runs."""
    with slurm.started():
        service = serve("--slurm", str(tmp_path / "jobs"), environment=environment_of(slurm))
        service.wait_for_devices(_NODES)
        calm = service.submit_tuning(32)
        service.answer(calm)
        tuning = service.api.get(calm)
        one_node = service.answer(service.submit_job(tuning, 20, processes_per_node=2))
        assert service.answer(service.submit_job(tuning, 20, nodes=2, processes_per_node=1)) == one_node
        endless = service.submit_job(tuning, 100_000, nodes=2, processes_per_node=1)
        _when(service, endless, lambda found: bool(found["progress"]))
        service.api.http.post(f"{endless}/cancel").raise_for_status()
        _when(service, endless, lambda found: found["state"] == "CANCELLED")
        _when(service, "/v1/fleet", lambda found: found["items"][0]["running_jobs"] == 0)
        assert service.process.end(signal.SIGTERM) == 0
        assert not workers()


def _when(service: Dispatching, path: str, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition(service.api.get(path)):
        assert time.monotonic() < deadline, service.api.get(path)
        time.sleep(0.1)
