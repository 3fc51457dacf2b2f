"""The service that ``fleet_chaos.py`` disturbs: an API with its dispatcher, whose addresses survive their deaths."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from chaos_processes import MARK_VARIABLE, Component, below, marked, tasks
from fleet_chaos_clusters import Cluster
from fleet_chaos_database import Server

from batchwright.client import Client
from batchwright.client.documents.fleet import FleetStatus
from batchwright.client.documents.work import Job, Tuning, WorkSummary
from tests.exports.test_real_launchers import free_port
from tests.fleet.work import workers
from tests.support.paths import ROOT

LEASE_SECONDS = 10
_RETRY_SECONDS = 600.0
_WATCH_SECONDS = 0.2


class TimeIsUpError(Exception):
    """The hard limit of the run has come."""


class Service:
    """An API process with a dispatcher, and what it says of its work.

    Args:
        folder: everything that it writes.
        cluster: the cluster that it dispatches to.
        server: its database.
        deadline: the time (monotonic) at which every wait ends.
    """

    def __init__(self, folder: Path, cluster: Cluster, server: Server, deadline: float) -> None:
        port = free_port()
        self.cluster = cluster
        self.server = server
        self.deadline = deadline
        self.url = f"http://127.0.0.1:{port}"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "BATCHWRIGHT_DATABASE_URL": server.url.render_as_string(hide_password=False),
            "BATCHWRIGHT_DATA_DIR": str(folder / "api"),
            "BATCHWRIGHT_LEASE_SECONDS": str(LEASE_SECONDS),
            **cluster.environment,
        }
        command = [sys.executable, "-m", "batchwright", "serve", "--port", str(port), *cluster.options]
        self.api = Component(command, environment, folder / "api.log", self.answers)
        self.client = Client(self.url, retry_seconds=_RETRY_SECONDS)

    def answers(self) -> bool:
        """Return whether the API answers."""
        try:
            return httpx.get(f"{self.url}/livez", timeout=2.0).is_success
        except httpx.HTTPError:
            return False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Started, with all devices of the cluster announced; ended with the block."""
        try:
            self.api.start()
            self.wait_until(lambda: self.living_devices() >= self.cluster.nodes, "the devices are announced")
            yield
        finally:
            self.client.close()
            self.api.stop()

    def living_devices(self) -> int:
        """Number of devices that take work."""
        return sum(device.alive for device in self.client.devices.list())

    def fleet(self) -> FleetStatus:
        """The cluster as the dispatcher reported it last."""
        return self.client.fleet().items[0]

    def rows(self) -> dict[str, WorkSummary]:
        """All work, by its id."""
        return {row.id: row for kind in (self.client.tunings, self.client.jobs) for row in kind.list()}

    def ended(self, work_id: str) -> Tuning | Job:
        """A tuning or job once it has ended."""
        kind = self.client.tunings if work_id.startswith("tun_") else self.client.jobs
        self.wait_until(lambda: kind.get(work_id).state.terminal, f"{work_id} ends")
        return kind.get(work_id)

    def wait_until(self, condition: Callable[[], bool], what: str, pause_seconds: float = 0.5) -> float:
        """Wait for a condition; the seconds that it took.

        Raises:
            TimeIsUpError: at the hard limit of the run.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() > self.deadline:
                raise TimeIsUpError(f"the time was up before {what}")
            time.sleep(pause_seconds)
        return time.monotonic() - began


class Watch:
    """The processes that ran at once for each piece of work, looked at five times a second.

    ``workers`` has the most worker processes of each at once; ``at_work`` the most of them that had a probe or a
    training process. A worker that was cut off from the database may outlive its lease, but not its work on the device.
    """

    def __init__(self, mark: str) -> None:
        self.workers: Counter[str] = Counter()
        self.at_work: Counter[str] = Counter()
        self.busy: Counter[int] = Counter()
        self._mark = mark
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look for the time of the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_WATCH_SECONDS):
            found = workers()
            at_once = Counter(found.values())
            self.busy[len(at_once)] += 1
            _raise_to(self.workers, at_once)
            if max(at_once.values(), default=0) > 1:
                _raise_to(self.at_work, self._at_work(found))

    def _at_work(self, found: dict[int, str]) -> Counter[str]:
        processes = marked(self._mark)
        return Counter(work for process, work in found.items() if tasks(below(process, processes)))


def _raise_to(most: Counter[str], now: Counter[str]) -> None:
    for work, number in now.items():
        most[work] = max(most[work], number)


def mark_processes(mark: str) -> None:
    """Have every process that this one starts from now on carry a mark, one thread for sums, and no report to Ray."""
    os.environ.update({MARK_VARIABLE: mark, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
