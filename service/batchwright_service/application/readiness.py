"""The checks behind `/readyz` and `/readyz/database`."""

import threading
import time
from collections.abc import Callable, Sequence

from anyio import CapacityLimiter
from cachetools import TTLCache, cached

from batchwright.client.documents.workers import Health
from batchwright.units import format_duration
from batchwright_service.application.rules.hardware_matches import workers_with
from batchwright_service.domain.hardware import need_of_lane
from batchwright_service.errors import NotReadyError, ServiceError, StoreUnavailableError
from batchwright_service.store.devices import DeviceStore
from batchwright_service.store.models import AnnouncedDevice
from batchwright_service.store.scheduling import QueueDepth, QueueStore

_CACHE_SECONDS = 1.0
"""Lifetime of a result: requests need no key, and the database is read once in this time however many come."""
_RECHECK_SECONDS = 1.0
"""A worker between two pieces of work looks idle: work that still waits after this is stuck."""


class SharedCheck:
    """Run a check at most once a second. Safe to share between threads: one checks, all get its result.

    Args:
        check: the check; returns what it found, or raises NotReadyError or StoreUnavailableError.
    """

    def __init__(self, check: Callable[[], Health]) -> None:
        self._check = check
        self._recent = cached(TTLCache(1, _CACHE_SECONDS), condition=threading.Condition())(self._result)
        self.threads = CapacityLimiter(1)
        """The thread of callers, separate from the API's others, which waiting checks must not use up."""

    def __call__(self) -> Health:
        """Return or raise the result of the check, which is at most a second old."""
        result = self._recent()
        if isinstance(result, ServiceError):
            raise type(result)(str(result))
        return result

    def _result(self) -> Health | ServiceError:
        try:
            return self._check()
        except (NotReadyError, StoreUnavailableError) as error:
            return error


class Readiness:
    """Check the database, the workers and the queue. Safe to share between threads.

    A long queue is no fault: work may wait for hours behind a training job, and a load balancer that removes the API
    then would make it worse. A queue that does not move is a fault. So the age of the oldest waiting work counts only
    where a live worker of its device is idle, or where no worker serves the device. A request for hardware that no
    worker has is no fault of the service. A heartbeat may be ``lease_seconds`` old, and waiting work ``stuck_seconds``.
    """

    def __init__(  # noqa: PLR0913 - built in one place
        self,
        queue: QueueStore,
        devices: DeviceStore,
        lease_seconds: float,
        stuck_seconds: float,
        pause: Callable[[float], object] = time.sleep,
        *,
        commands: Callable[[], str] = lambda: "",
    ) -> None:
        self._work_queue = queue
        self._devices = devices
        self._lease_seconds = lease_seconds
        self._stuck_seconds = stuck_seconds
        self._pause = pause
        self._commands = commands
        self.check = SharedCheck(self._check_all)
        """Check that work can be queued and will be run.

        Raises:
            StoreUnavailableError: when the database cannot be written.
            NotReadyError: naming every reason: no worker is alive, no worker takes work, or work is stuck.
        """
        self.database = SharedCheck(self._check_database)
        """Check the database alone: an API that can queue work is of use while no worker is alive.

        Raises:
            StoreUnavailableError: when the database cannot be written.
        """

    def is_ready(self) -> bool:
        """Return whether ``check`` passes."""
        try:
            self.check()
        except (NotReadyError, StoreUnavailableError):
            return False
        return True

    def _check_database(self) -> Health:
        self._work_queue.check()
        return Health(status="ok", checks={"store": "written"})

    def _check_all(self) -> Health:
        self._work_queue.check()
        devices = self._devices.list()
        alive = [device for device in devices if device.age_seconds <= self._lease_seconds]
        unready = [f"{device.served.slot} ({device.served.unready})" for device in alive if device.served.unready]
        silent = sorted(device.served.slot for device in devices if device not in alive)
        missing = f"; without a heartbeat: {', '.join(silent)}" if silent else ""
        reasons = [] if alive else [f"no worker sent a heartbeat within {self._lease_seconds:g} s{missing}"]
        if alive and len(unready) == len(alive):
            reasons.append(f"no worker takes work: {', '.join(unready)}")
        depths, stuck = self._read_depths()
        if stuck:
            self._pause(_RECHECK_SECONDS)
            depths, stuck = self._read_depths()
        oldest = max((depth.oldest_age_seconds for depth in depths), default=0.0)
        reasons += stuck
        if reasons:
            allowed = (
                f". BATCHWRIGHT_READY_QUEUE_SECONDS allows {format_duration(self._stuck_seconds)}." if stuck else ""
            )
            raise NotReadyError("; ".join(reasons) + allowed)
        not_ready = f"; unready: {', '.join(unready)}" if unready else ""
        workers = f"{len(alive)} of {len(devices)} alive{missing}{not_ready}"
        checks = {"store": "written", "workers": workers, "queue": f"oldest {oldest:.0f} s"}
        commands = self._commands()
        return Health(status="ok", checks=checks | ({"commands": commands} if commands else {}))

    def _read_depths(self) -> tuple[Sequence[QueueDepth], list[str]]:
        depths = self._work_queue.depths()
        old = [depth for depth in depths if depth.oldest_age_seconds > self._stuck_seconds]
        if not old:
            return depths, []
        alive = [device for device in self._devices.list() if device.age_seconds <= self._lease_seconds]
        return depths, [reason for depth in old if (reason := _why_stuck(depth, alive)) is not None]


def _why_stuck(depth: QueueDepth, alive: Sequence[AnnouncedDevice]) -> str | None:
    """Return why waiting work is not taken: its device is idle, or no worker serves it. None if it has to wait.

    Work for hardware may wait until there is such hardware, and work of several devices until enough are free.
    """
    waiting = f"({depth.waiting:,} waiting, the oldest for {format_duration(depth.oldest_age_seconds)})"
    if depth.lane is None:
        workers = [worker for worker in alive if worker.served.device.id == depth.device]
        if not workers:
            return f"no worker serves {depth.name} {waiting}: start one, or cancel what waits"
    else:
        need = need_of_lane(depth.lane)
        workers = [] if need.takes_several else workers_with(need, alive)
    return (
        f"a worker of {depth.name} is idle {waiting}" if any(worker.running_id is None for worker in workers) else None
    )
