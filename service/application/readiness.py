"""Whether the service can do its work: what `/readyz` answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from anyio import CapacityLimiter

from service.domain.workers import Health
from service.errors import NotReadyError, ServiceError, StoreUnavailableError
from service.store.interface import DeviceStore, QueueStore
from service.store.models import QueueDepth, SeenDevice

_SHARED_SECONDS = 1.0
"""Anyone may ask, without a key: however many do, the database is asked once in this time."""
_SECOND_LOOK_SECONDS = 1.0
"""A worker between two pieces of work looks idle: what still waits after this really is stuck."""


class Readiness:
    """Looks at the database, the workers and the queue. Safe to share between threads: one looks, all get its answer.

    A queue that is long is no fault: work may wait for hours behind a job that trains, and a load balancer that takes
    the API away then would make it worse. A queue that does not move is one, and a service that calls itself healthy
    while everything is pending deceives its supervisor. So the age of the oldest work that waits counts only where its
    device could take it: where a live worker stands idle, or where none serves the device at all.

    Args:
        queue: the waiting work.
        devices: the served devices.
        lease_seconds: a worker not heard of for longer is not counted.
        stuck_seconds: how long work may wait where nothing keeps it waiting.
        pause: waits for some seconds.
    """

    def __init__(
        self,
        queue: QueueStore,
        devices: DeviceStore,
        lease_seconds: float,
        stuck_seconds: float,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._work_queue = queue
        self._devices = devices
        self._lease_seconds = lease_seconds
        self._stuck_seconds = stuck_seconds
        self._pause = pause
        self._one_looks = threading.Lock()
        self._answer: Health | ServiceError | None = None
        self._answered_at = 0.0
        self.threads = CapacityLimiter(1)
        """For those who check from a thread: who waits for the one that looks holds no thread of other work."""

    def check(self) -> Health:
        """Whether work can be queued and will be run, as it was at most a second ago.

        Raises:
            StoreUnavailableError: when the database cannot be written.
            NotReadyError: naming every reason: no worker was heard of lately or none takes work, or work is stuck.
        """
        with self._one_looks:
            if self._answer is None or time.monotonic() - self._answered_at > _SHARED_SECONDS:
                self._answer = self._looked()
                self._answered_at = time.monotonic()
            answer = self._answer
        if isinstance(answer, ServiceError):
            raise type(answer)(str(answer))
        return answer

    def _looked(self) -> Health | ServiceError:
        try:
            return self._look_at_all()
        except (NotReadyError, StoreUnavailableError) as error:
            return error

    def _look_at_all(self) -> Health:
        self._work_queue.check()
        devices = self._devices.list()
        alive = [seen for seen in devices if seen.age_seconds <= self._lease_seconds]
        unready = [f"{seen.served.slot} ({seen.served.unready})" for seen in alive if seen.served.unready]
        silent = sorted(seen.served.slot for seen in devices if seen not in alive)
        missing = f"; not heard of: {', '.join(silent)}" if silent else ""
        reasons = [] if alive else [f"no worker was heard of within {self._lease_seconds:g} s{missing}"]
        if alive and len(unready) == len(alive):
            reasons.append(f"no worker takes work: {', '.join(unready)}")
        oldest, stuck = self._queue()
        reasons += [self._in_words(depth) for depth in stuck]
        if reasons:
            raise NotReadyError("; ".join(reasons))
        waiting = f"; unready: {', '.join(unready)}" if unready else ""
        workers = f"{len(alive)} of {len(devices)} heard of{missing}{waiting}"
        return Health(status="ok", checks={"store": "written", "workers": workers, "queue": f"oldest {oldest:.0f} s"})

    def _queue(self) -> tuple[float, list[QueueDepth]]:
        """The age of the oldest work that waits, and what is stuck."""
        depths, stuck = self._look()
        if stuck:
            self._pause(_SECOND_LOOK_SECONDS)
            depths, stuck = self._look()
        return max((depth.oldest_age_seconds for depth in depths), default=0.0), stuck

    def _look(self) -> tuple[Sequence[QueueDepth], list[QueueDepth]]:
        depths = self._work_queue.depths()
        old = [depth for depth in depths if depth.oldest_age_seconds > self._stuck_seconds]
        if not old:
            return depths, []
        serving = [seen for seen in self._devices.list() if seen.age_seconds <= self._lease_seconds]
        return depths, [depth for depth in old if not _all_busy(depth.device, serving)]

    def _in_words(self, depth: QueueDepth) -> str:
        return (
            f"{depth.waiting} wait for {depth.device}, the oldest for {depth.oldest_age_seconds:.0f} s, though it is "
            f"idle or unserved (limit {self._stuck_seconds:g} s, BATCHWRIGHT_READY_QUEUE_SECONDS)"
        )


def _all_busy(device: str, serving: Sequence[SeenDevice]) -> bool:
    """Whether the device is served, and everything that serves it runs something."""
    held = [seen.running_id is not None for seen in serving if seen.served.device.id == device]
    return bool(held) and all(held)
