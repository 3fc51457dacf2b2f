"""The worker of one device: a loop that claims and runs work."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from batchwright.client.documents.workers import DeviceMemory, ServedDevice
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright.system.host_failures import Cause, HostFailure, check_host
from batchwright.workloads.required_packages import installed_packages
from batchwright_service.store.store import Store
from batchwright_service.worker.attempts import AttemptRunner
from batchwright_service.worker.executors.base import Executor
from batchwright_service.worker.host_health import HostHealth
from batchwright_service.worker.lease import LeaseHolder, LeaseTerms, StopReason, WorkClaimer
from batchwright_service.worker.runner import DeviceContext, WorkRunner
from batchwright_service.worker.slot import Slot
from batchwright_service.worker.work_loop import IdlePause, WorkLoop
from batchwright_service.worker.worker_settings import WorkerSettings


class DeviceWorker:
    """Serve one device with a thread; the heartbeat is that of the process.

    ``is_notified`` tells whether the database notifies waiting workers; ``announce_now`` has devices announced now.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - built in one place
        self,
        store: Store,
        executor: Executor,
        versions: dict[str, str],
        settings: WorkerSettings,
        owner: str,
        is_notified: bool,  # noqa: FBT001 - as above
        announce_now: Callable[[], None],
    ) -> None:
        device, instruments, assignment = executor.device, settings.instruments, settings.assignment
        self.served = ServedDevice(
            slot=f"{settings.node_name}/{device.id if assignment is None else assignment.device}",
            owner=owner,
            device=device,
            environment=executor.environment(),
            versions=versions,
            packages=installed_packages(),
        )
        self._devices = store.devices
        self._executor = executor
        self._settings = settings
        self._slot = Slot(self.served, store.leases, store.devices, settings)
        self._memory = MemoryWatch(executor.memory_in_use, device.total_bytes)
        self._health = HostHealth(self.served.slot, self._check, self._report_health)
        context = DeviceContext(self.served, settings.runs_dir, self._health)
        runner = WorkRunner(store, executor, context, instruments)
        attempt_runner = AttemptRunner(store, runner, context, instruments)
        terms = LeaseTerms(settings.lease_seconds, settings.shutdown_grace_seconds)
        self._is_announced = assignment is None  # a dispatcher announces the devices of its cluster
        self._claimer = WorkClaimer(store.leases, self.served, terms, assignment)
        await_work = (lambda: store.devices.await_work(self.served)) if is_notified else None
        pause = IdlePause(settings.poll_seconds, await_work)
        self._loop = WorkLoop(self._claimer, attempt_runner, self._health, pause, once=assignment is not None)
        self._announce_now = announce_now

    def start(self) -> None:
        """Take the slot, release the work of its dead owners, and start the thread.

        Raises:
            DeviceTakenError: when another live process serves it.
        """
        self._slot.take()
        self._settings.instruments.metrics.register_device(self.served.device.id)
        try:
            self._health.is_ready()
            if self._is_announced:
                self._memory.start()
                self._devices.announce(self._with_health())
        except BaseException:
            self._memory.stop()
            self._slot.release()
            raise
        self._loop.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._loop.is_alive()

    def request_stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """Begin to stop: running work is handed back. Returns at once."""
        self._claimer.request_stop(reason)
        self._loop.request_stop()

    def join(self) -> None:
        """Wait until the thread has ended. The heartbeat must go on until then."""
        if self._loop.was_started:
            self._loop.join()

    def close(self) -> None:
        """Withdraw the device, and release the slot. The heartbeat, which would announce it again, has ended."""
        self._memory.stop()
        if self._loop.was_started and self._is_announced:
            self._slot.withdraw()
        self._executor.close()
        self._slot.release()

    def wake(self) -> None:
        """Look for work now."""
        self._loop.wake()

    @property
    def holder(self) -> LeaseHolder | None:
        """The lease in use, or None."""
        return self._claimer.holder

    @property
    def is_idle(self) -> bool:
        """Return whether the worker waits for work, and would take some."""
        return self._loop.is_idle

    def served_now(self) -> ServedDevice | None:
        """Return the device with its memory and health, or None when it is not announced."""
        return self._with_health() if self._is_announced and self.is_alive() else None

    def _with_health(self) -> ServedDevice:
        return self.served.model_copy(update={"memory": self._memory.latest, "unready": self._health.unready})

    def _check(self, needed_bytes: int) -> HostFailure | None:
        """Check the host and the device."""
        folders = [self._settings.runs_dir, Path(tempfile.gettempdir())]
        if (trouble := check_host(folders, needed_bytes)) is not None:
            return trouble
        lost = self._executor.lost_device()
        return None if lost is None else HostFailure(Cause.DEVICE, lost)

    def _report_health(self, cause: str | None) -> None:
        self._settings.instruments.metrics.set_device_trouble(self.served.device.id, cause)
        self._announce_now()


_SECONDS = 5.0
"""Pause between two readings: less than the third of a lease after which devices are announced."""
_LEAST_CHANGE = 512
"""A change by less than this part of the memory is not announced: each one writes a row of the store."""


class MemoryWatch:
    """Read the memory in use until it is stopped."""

    def __init__(self, read: Callable[[], MemoryInUse | None], total_bytes: int) -> None:
        self._read = read
        self._least_bytes = total_bytes / _LEAST_CHANGE
        self.latest: DeviceMemory | None = None
        """The last reading that differed from the one before; None while there is none, and where it fails."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="memory-watch", daemon=True)

    def start(self) -> None:
        """Take the first reading, and start the thread."""
        self.update()
        self._thread.start()

    def stop(self) -> None:
        """Take no more readings. One that hangs is left behind. Idempotent."""
        self._stopping.set()

    def update(self) -> None:
        """Take a reading."""
        found = self._read()
        now = None if found is None else DeviceMemory(used_bytes=found.used_bytes, own_bytes=found.own_bytes)
        if self._differs(now):
            self.latest = now

    def _repeat(self) -> None:
        while not self._stopping.wait(_SECONDS):
            self.update()

    def _differs(self, now: DeviceMemory | None) -> bool:
        before = self.latest
        if before is None or now is None or (before.own_bytes is None) != (now.own_bytes is None):
            return True
        changes = (now.used_bytes - before.used_bytes, (now.own_bytes or 0) - (before.own_bytes or 0))
        return any(abs(change) >= self._least_bytes for change in changes)
