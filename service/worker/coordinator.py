"""The workers of one process, one per device: started, woken and stopped together."""

from __future__ import annotations

from collections.abc import Sequence

from service.store.store import Store
from service.worker.device_worker import DeviceWorker
from service.worker.executors.base import Executor
from service.worker.lease import StopReason
from service.worker.settings import WorkerSettings


class Coordinator:
    """The workers of this process."""

    def __init__(
        self, store: Store, executors: Sequence[Executor], versions: dict[str, str], settings: WorkerSettings
    ) -> None:
        owner = settings.new_owner() if executors else ""
        self._workers = [DeviceWorker(store, executor, versions, settings, owner) for executor in executors]
        self._started = False
        self._stopped = False

    def start(self) -> None:
        """Start every worker, or none. Does nothing when they run.

        Raises:
            DeviceTakenError: when another live process serves one of the devices.
        """
        if self._started:
            return
        self._started = True
        try:
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.stop()
            raise

    def notify(self) -> None:
        """Wake every worker to check for work and for cancellations."""
        for worker in self._workers:
            worker.notify()

    def is_alive(self) -> bool:
        """Return whether every worker works or waits for work."""
        return all(worker.is_alive() for worker in self._workers)

    @property
    def slots(self) -> list[str]:
        """Return the slot (host and device) of each worker."""
        return [worker.served.slot for worker in self._workers]

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
        for worker in self._workers:
            worker.join()
