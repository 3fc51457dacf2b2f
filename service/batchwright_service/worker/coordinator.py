"""The workers of one process, one per device: started, woken and stopped together."""

import logging
from collections.abc import Sequence

from batchwright_service.observability.logging import rate_limited_logger
from batchwright_service.store.store import Store
from batchwright_service.worker.device_worker import DeviceWorker
from batchwright_service.worker.executors.base import Executor
from batchwright_service.worker.heartbeat import Heartbeat
from batchwright_service.worker.lease import StopReason
from batchwright_service.worker.worker_settings import WorkerSettings

_log = logging.getLogger(__name__)


class Coordinator:
    """The workers of this process, their heartbeat, and the notifications for them."""

    def __init__(
        self,
        store: Store,
        executors: Sequence[Executor],
        versions: dict[str, str],
        settings: WorkerSettings,
    ) -> None:
        owner = settings.new_owner() if executors else ""
        self._listener = store.new_listener(owner, self) if executors else None
        self._warnings = rate_limited_logger(_log)
        self._workers = [
            DeviceWorker(store, executor, versions, settings, owner, self._listener is not None, self.announce_now)
            for executor in executors
        ]
        self._by_slot = {worker.served.slot: worker for worker in self._workers}
        is_notified = None if self._listener is None else self._is_notified
        self._heartbeat = Heartbeat(self._workers, store.devices, settings, is_notified)
        self._started = False
        self._stopped = False

    def start(self) -> None:
        """Start every worker, or none. Does nothing when they run.

        Raises:
            DeviceTakenError: when another live process serves one of the devices.
        """
        if self._started or not self._workers:
            return
        self._started = True
        try:
            self._heartbeat.start()
            if self._listener is not None:
                self._listener.start()
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.stop()
            raise
        self._heartbeat.wake()

    def notify(self) -> None:
        """Check for work and for cancellations now. Needless, and ignored, while the database notifies."""
        if not self._is_notified():
            self._wake_all()

    def work_queued(self, slot: str) -> None:
        """Wake the worker of a slot to claim work."""
        if (worker := self._by_slot.get(slot)) is not None:
            worker.wake()

    def work_cancelled(self) -> None:
        """Send a heartbeat, which finds the cancellation."""
        self._heartbeat.wake()

    def notifications_resumed(self) -> None:
        """Check for work and for cancellations whose notifications were lost; idle workers request new ones."""
        self._wake_all()

    def notifications_lost(self, error: Exception) -> None:
        """Poll more often, until notifications resume."""
        self._warnings.warning("no notifications of the database, heartbeats poll more often instead: %s", error)
        self._heartbeat.wake()

    def announce_now(self) -> None:
        """Announce the devices now."""
        self._heartbeat.announce_now()

    def is_alive(self) -> bool:
        """Return whether every worker works or waits for work, and the heartbeat is not blocked."""
        return not self._workers or (self._heartbeat.is_alive() and all(worker.is_alive() for worker in self._workers))

    @property
    def slots(self) -> list[str]:
        """Return the slot (host and device) of each worker."""
        return list(self._by_slot)

    def join(self) -> None:
        """Wait until every worker has ended: by a request, or because its only work has."""
        for worker in self._workers:
            worker.join()

    def request_stop(self) -> None:
        """Begin a graceful stop. Returns at once."""
        for worker in self._workers:
            worker.request_stop()

    def force_stop(self) -> None:
        """End running work now, without a grace period. Returns at once; ``stop`` then returns soon."""
        for worker in self._workers:
            worker.request_stop(StopReason.FORCED)

    def stop(self) -> None:
        """Stop gracefully: running work is handed back to the queue. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self.request_stop()
        self.join()
        self._heartbeat.stop()
        if self._listener is not None:
            self._listener.stop()
        for worker in self._workers:
            worker.close()

    def _is_notified(self) -> bool:
        return self._listener is not None and self._listener.is_live

    def _wake_all(self) -> None:
        for worker in self._workers:
            worker.wake()
        self._heartbeat.wake()
