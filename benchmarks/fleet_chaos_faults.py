"""The faults of ``fleet_chaos.py``, and the times until work goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from fleet_chaos_service import Service, TimeIsUpError

from batchwright.client.documents.states import State
from batchwright.client.errors import ClientError
from tests.fleet.work import kill_dispatcher_of, workers

_SETTLE_SECONDS = 0.3
"""Time in which the processes of what was killed end; the kernel's signals take milliseconds."""

Fault = Callable[[Service], str]


def kill_node(service: Service) -> str:
    """Kill a node with all of its processes, and start it again."""
    return service.cluster.kill_node()


def kill_head(service: Service) -> str:
    """Kill what holds the cluster's state, and start it again."""
    return service.cluster.kill_head()


def kill_worker(service: Service) -> str:
    """Kill a worker process that holds the lease of its work."""

    def holders() -> list[tuple[int, str]]:
        running = _running(service)
        return [(process, work) for process, work in workers().items() if work in running]

    service.wait_until(lambda: bool(holders()), "a worker holds a lease")
    process, work = holders()[0]
    os.kill(process, signal.SIGKILL)
    return work


def kill_dispatcher(service: Service) -> str:
    """Kill the dispatcher, which the API starts again."""
    kill_dispatcher_of(service.api.pid)
    return "the dispatcher"


def kill_api(service: Service) -> str:
    """Kill the API process, with which its dispatcher ends, and start it again as a supervisor would."""
    service.api.kill()
    service.api.start()
    return "the API and its dispatcher"


def kill_database(service: Service) -> str:
    """Kill PostgreSQL, and start it again."""
    service.server.kill()
    service.server.start()
    return "PostgreSQL"


FAULTS: dict[str, Fault] = {
    "worker": kill_worker,
    "node": kill_node,
    "dispatcher": kill_dispatcher,
    "postgres": kill_database,
    "api": kill_api,
    "head": kill_head,
}


def strike(service: Service, name: str) -> dict[str, Any]:
    """Let a fault happen, and measure from its beginning, in seconds.

    Returns:
        A row: ``mended_seconds`` until what was killed ran again (a dispatcher and a worker are not started by us),
        ``dispatched_seconds`` until the dispatcher had reported a cluster in order, ``more_work_seconds`` until a
        worker ran that had not run right after the fault, ``all_goes_on_seconds`` until all that had run at the fault
        ran on, here or elsewhere, or had ended. None where the time was up before.
    """
    before, ran = _running(service), workers()
    row: dict[str, Any] = {"fault": name, "ran": sorted(before)}
    began = time.monotonic()
    row["what"] = FAULTS[name](service)
    row["mended_seconds"] = round(time.monotonic() - began, 1)
    time.sleep(_SETTLE_SECONDS)
    left = workers()
    row["workers_lost"] = sorted(set(ran.values()) - set(left.values()))
    row |= dict.fromkeys(("dispatched_seconds", "more_work_seconds", "all_goes_on_seconds"))
    waiting: dict[str, Callable[[], bool]] = {
        "dispatched_seconds": lambda: _is_in_order(service, time.monotonic() - began),
        "more_work_seconds": lambda: bool(set(workers()) - set(left)) or not _unended(service),
        "all_goes_on_seconds": lambda: _all_go_on(service, before),
    }
    try:
        while waiting:
            service.wait_until(lambda: any(condition() for condition in waiting.values()), f"work went on after {name}")
            for key in [key for key, condition in waiting.items() if condition()]:
                row[key] = round(time.monotonic() - began, 1)
                del waiting[key]
    except TimeIsUpError as error:
        row["wrong"] = str(error)
    return row


def _running(service: Service) -> dict[str, int]:
    """The work that runs, with the number of its events."""
    return {key: row.events for key, row in service.rows().items() if row.state is State.RUNNING}


def _unended(service: Service) -> bool:
    return any(not row.state.terminal for row in service.rows().values())


def _all_go_on(service: Service, before: dict[str, int]) -> bool:
    rows = service.rows()
    return all(
        rows[work].state.terminal or (rows[work].state is State.RUNNING and rows[work].events > events)
        for work, events in before.items()
    )


def _is_in_order(service: Service, age_seconds: float) -> bool:
    """Return whether the dispatcher has reported, since the fault, a cluster with all nodes."""
    try:
        fleet = service.fleet()
    except (ClientError, IndexError):
        return False
    living = sum(node.alive and bool(node.slots) for node in fleet.nodes)
    is_new = fleet.report_age_seconds < age_seconds
    return fleet.alive and fleet.error is None and is_new and living >= service.cluster.nodes
