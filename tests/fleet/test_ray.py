"""The fleet on a real Ray cluster of three nodes, parts of which are killed."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fleet.conftest import StartService
from tests.fleet.ray_process import Ray, started
from tests.fleet.work import PATIENCE_SECONDS, Dispatching, watched, workers
from tests.support.service.processes import processes_with

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]

_NODES = 3
_WIDTHS = (32, 48, 64)
_UPDATES = 200
"""Updates of a job that is killed twice before it ends."""


def kill_worker(_ray: Ray, service: Dispatching) -> None:
    """Kill a worker that holds the lease of its work."""
    service.kill_worker()


def kill_node(ray: Ray, _service: Dispatching) -> None:
    """Kill a node with all of its processes."""
    ray.do("kill node0")


def kill_dispatcher(_ray: Ray, service: Dispatching) -> None:
    """Kill the dispatcher."""
    service.kill_dispatcher()


def kill_head(ray: Ray, _service: Dispatching) -> None:
    """Lose the head, its jobs and its nodes; another head comes up at the same address."""
    ray.do("kill head")


_FAULTS: tuple[Callable[[Ray, Dispatching], None], ...] = (kill_worker, kill_node, kill_dispatcher, kill_head)


def test_whatever_is_killed_every_answer_is_equal(serve: StartService, database: str, tmp_path: Path) -> None:
    """Six tunings and two jobs end as undisturbed ones do, none runs twice at once, and nothing is left."""
    with started(tmp_path, database, _NODES) as ray:
        service = serve("--ray", ray.address)
        service.wait_for_devices(_NODES)
        calm = [service.submit_tuning(width) for width in _WIDTHS]
        expected = dict(zip(_WIDTHS, [service.answer(path) for path in calm], strict=True))
        tuning = service.api.get(calm[0])
        weights = service.answer(service.submit_job(tuning, 40))
        with watched() as most:
            disturbed = {service.submit_tuning(width): width for width in _WIDTHS * 2}
            jobs = [service.submit_job(tuning, 40) for _ in range(2)]
            for fault in _FAULTS:
                _wait_for(lambda: len(workers()) > 1)
                began = time.monotonic()
                fault(ray, service)
                _wait_for_others(set(workers()), service)
                lost = time.monotonic() - began
                print(f"{fault.__name__}: {lost:.1f} s until more work runs")  # noqa: T201 - a figure
            assert {path: service.answer(path) for path in disturbed} == {
                path: expected[width] for path, width in disturbed.items()
            }
            assert [service.answer(path) for path in jobs] == [weights, weights]
        assert set(most.values()) == {1}, most
        _wait_for(lambda: not workers())
        assert service.process.end(signal.SIGTERM) == 0
    assert not processes_with("batchwright_service.entrypoints.hosted_dispatcher")
    _wait_for(lambda: not processes_with(str(tmp_path)))


def test_what_waits_has_a_reason_and_cancelled_work_is_stopped(
    serve: StartService, database: str, tmp_path: Path
) -> None:
    """Work without a free node has Ray's reason; work that is cancelled leaves neither a job nor a process."""
    with started(tmp_path, database, _NODES) as ray:
        service = serve("--ray", ray.address)
        service.wait_for_devices(_NODES)
        tuning = service.submit_tuning(_WIDTHS[0])
        service.answer(tuning)
        recommended = service.api.get(tuning)
        paths = [service.submit_job(recommended, 100_000) for _ in range(2 * _NODES)]  # none ends by itself
        _wait_for(lambda: len(workers()) == _NODES)
        fleet = service.api.get("/v1/fleet")["items"][0]
        assert fleet["alive"], fleet
        assert sorted(slot for node in fleet["nodes"] for slot in node["slots"]) == [
            "node0/cpu",
            "node1/cpu",
            "node2/cpu",
        ]
        _wait_for(lambda: "waiting for resources" in str(service.api.get("/v1/fleet")["items"][0]["waiting"]))
        for path in paths:
            service.api.http.post(f"{path}/cancel").raise_for_status()
        _wait_for(lambda: not workers())
        _wait_for(lambda: service.api.get("/v1/fleet")["items"][0]["pending_jobs"] == 0)


def test_a_job_over_two_nodes_survives_the_loss_of_either(serve: StartService, database: str, tmp_path: Path) -> None:
    """Two nodes with two ranks each train what four ranks on one node do, also when each of them is killed once."""
    with started(tmp_path, database, 2) as ray:
        service = serve("--ray", ray.address)
        service.wait_for_devices(2)
        calm = service.submit_tuning(_WIDTHS[0])
        service.answer(calm)
        tuning = service.api.get(calm)
        one_node = service.answer(service.submit_job(tuning, _UPDATES, processes_per_node=4))
        with watched() as most:
            path = service.submit_job(tuning, _UPDATES, nodes=2, processes_per_node=2)
            for leads in (False, True):
                own = _slot_of_progress(service, path).partition("/")[0]
                victim = own if leads else {"node0": "node1", "node1": "node0"}[own]
                began = time.monotonic()
                ray.do(f"kill {victim}")
                _wait_for(lambda: "fewer living nodes" in str(service.api.get("/v1/fleet")["items"][0]["waiting"]))
                ray.do(f"add {victim}")
                _slot_of_progress(service, path)
                print(f"{'leading' if leads else 'other'} node: {time.monotonic() - began:.1f} s until it runs again")  # noqa: T201 - a figure
            assert service.answer(path) == one_node
        assert set(most.values()) == {1}, most
        _wait_for(lambda: not workers())
        _wait_for(lambda: service.api.get("/v1/fleet")["items"][0]["running_jobs"] == 0)
        assert service.process.end(signal.SIGTERM) == 0
    _wait_for(lambda: not processes_with(str(tmp_path)))


def _slot_of_progress(service: Dispatching, path: str) -> str:
    """Wait until a job makes progress in its present attempt, beyond a checkpoint; its slot."""
    before = service.api.get(path)
    start = (before["progress"] or {}).get("update", 0)

    def goes_on() -> bool:
        found = service.api.get(path)
        assert found["state"] in {"QUEUED", "RUNNING"}, found
        return bool(found["state"] == "RUNNING" and (found["progress"] or {}).get("update", 0) > start + 6)

    _wait_for(goes_on)
    return str(service.api.get(path)["slot"])


def _wait_for_others(before: set[int], service: Dispatching) -> None:
    """Wait for a worker that did not run right after a fault, unless all work has ended."""
    _wait_for(lambda: bool(set(workers()) - before) or not _unended(service))


def _unended(service: Dispatching) -> list[str]:
    items = [item for kind in ("tunings", "jobs") for item in service.api.get(f"/v1/{kind}")["items"]]
    return [item["id"] for item in items if item["state"] in {"QUEUED", "RUNNING", "CANCELLING"}]


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.1)
