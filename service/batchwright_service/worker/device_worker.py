"""The worker of one device: a thread that claims and runs one piece of work after another."""

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from batchwright.client.documents.workers import DeviceMemory, ServedDevice
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright.system.host_failures import Cause, HostFailure, check_host, host_failure_of
from batchwright.workloads.required_packages import installed_packages
from batchwright_service.errors import ClaimsCrowdedError, StoreUnavailableError
from batchwright_service.observability.logging import log_context, rate_limited_logger
from batchwright_service.store.models import Claim
from batchwright_service.store.store import Store
from batchwright_service.worker.attempts import AttemptRunner
from batchwright_service.worker.executors.base import Executor
from batchwright_service.worker.host_health import HostHealth
from batchwright_service.worker.idle_pause import IdlePause
from batchwright_service.worker.lease import LeaseHolder, LeaseTerms, StopReason
from batchwright_service.worker.runner import DeviceContext, WorkRunner
from batchwright_service.worker.slot import Slot
from batchwright_service.worker.worker_settings import WorkerSettings

_log = logging.getLogger(__name__)

_ERROR_PAUSE_SECONDS = 1.0


class DeviceWorker:
    """Claim and run work for one device, in a thread; the heartbeat is that of the process.

    Any thread may use ``holder``, wake the worker, or request a stop. ``is_notified`` tells whether the database
    notifies waiting workers; ``announce_now`` has devices announced now.
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
        self.holder: LeaseHolder | None = None
        """The lease in use, or None."""
        self.is_idle = False
        """True if the worker waits for work, and would take some."""
        self._store = store
        self._executor = executor
        self._settings = settings
        self._slot = Slot(self.served, store.leases, store.devices, settings)
        self._memory = MemoryWatch(executor.memory_in_use, device.total_bytes)
        self._health = HostHealth(self.served.slot, self._check, self._report_health)
        context = DeviceContext(self.served, settings.runs_dir, self._health)
        self._attempts = AttemptRunner(store, WorkRunner(store, executor, context, instruments), context, instruments)
        self._terms = LeaseTerms(settings.lease_seconds, settings.shutdown_grace_seconds)
        self._is_announced = assignment is None  # a dispatcher announces the devices of its cluster
        await_work = (lambda: store.devices.await_work(self.served)) if is_notified else None
        self._pause = IdlePause(settings.poll_seconds, await_work)
        self._announce_now = announce_now
        self._stop_reason: StopReason | None = None
        self._stopping = threading.Event()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=f"worker-{device.id}")
        self._warnings = rate_limited_logger(_log)

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
                self._store.devices.announce(self._with_health())
        except BaseException:
            self._memory.stop()
            self._slot.release()
            raise
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Look for work now."""
        self._due.set()

    def request_stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """Begin to stop: running work, and work that is being claimed, is handed back. Returns at once."""
        self._stop_reason = reason if self._stop_reason is None else max(self._stop_reason, reason)
        if (holder := self.holder) is not None:
            holder.request(self._stop_reason)
        self._stopping.set()
        self._due.set()

    def join(self) -> None:
        """Wait until the thread has ended. The heartbeat must go on until then."""
        if self._was_started:
            self._thread.join()

    def close(self) -> None:
        """Withdraw the device, and release the slot. The heartbeat, which would announce it again, has ended."""
        self._memory.stop()
        if self._was_started and self._is_announced:
            self._slot.withdraw()
        self._executor.close()
        self._slot.release()

    def served_now(self) -> ServedDevice | None:
        """Return the device with its memory and health, or None when it is not announced."""
        return self._with_health() if self._is_announced and self.is_alive() else None

    @property
    def _was_started(self) -> bool:
        return self._thread.ident is not None

    def _repeat(self) -> None:
        with log_context(device=self.served.device.id):
            while not self._stopping.is_set():
                if self._due.is_set():
                    self._due.clear()
                    self._pause.end()
                seconds = self._step()
                if self._settings.assignment is not None:  # this process was started for one piece of work
                    return
                if seconds > 0.0:
                    self._due.wait(seconds)

    def _step(self) -> float:
        """Take one step without raising, and return the seconds until the next one."""
        slot = self.served.slot
        self.is_idle = False
        try:
            return self._run_next()
        except ClaimsCrowdedError:  # the database works, and hands out other work
            seconds = 0.0
        except StoreUnavailableError as error:
            self._warnings.warning("%s: %s", slot, error)
            seconds = self._pause.poll_seconds
        except Exception as error:  # noqa: BLE001 - a worker outlives any failure of one piece of work
            if (trouble := host_failure_of(error)) is not None:
                self._health.report_trouble(trouble)
            else:
                _log.exception("%s: the worker continues after an unexpected error", slot)
                self._stopping.wait(_ERROR_PAUSE_SECONDS)
            seconds = self._pause.poll_seconds
        self._pause.end()
        return seconds

    def _run_next(self) -> float:
        """Claim and run one piece of work, unless none waits or the host is not healthy."""
        if not self._health.is_ready():
            self._pause.end()
            return self._pause.poll_seconds
        self._attempts.hand_back_pending()
        if self._pause.is_over:
            claimed_at = time.monotonic()
            if (claim := self._claim()) is not None:
                self._run(claim, LeaseHolder(claim.lease, self._terms, claimed_at))
                return 0.0
            self._pause.begin()
        self.is_idle = True
        return self._pause.seconds

    def _claim(self) -> Claim | None:
        """Claim the next piece of work, or the assigned one. None if none waits."""
        leases, seconds = self._store.leases, self._settings.lease_seconds
        if (assignment := self._settings.assignment) is None:
            return leases.claim(self.served, seconds)
        claim = leases.claim_work(assignment.work_id, self.served, seconds)
        beside = tuple(f"{self.served.host}/{device}" for device in assignment.beside)
        return None if claim is None else replace(claim, other_slots=beside)

    def _run(self, claim: Claim, holder: LeaseHolder) -> None:
        """Run claimed work, and hold its lease until then."""
        self.holder = holder
        try:
            # Read after the holder is set: a request that comes in between reaches the holder itself.
            if self._stop_reason is not None:
                holder.request(self._stop_reason)
            self._pause.end()
            self._attempts.run(claim, holder)
        finally:
            self.holder = None

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
