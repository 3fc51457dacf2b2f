"""The worker of one device: a loop that claims and runs work, and a heartbeat."""

from __future__ import annotations

import tempfile
from pathlib import Path

from service.domain.workers import ServedDevice
from service.store.store import Store
from service.worker.attempts import AttemptRunner
from service.worker.claiming import WorkClaimer
from service.worker.executors.base import Executor
from service.worker.heartbeat import Heartbeat
from service.worker.host_health import Health
from service.worker.lease import LeaseTerms, StopReason
from service.worker.runner import DeviceContext, RunStores, WorkRunner
from service.worker.settings import WorkerSettings
from service.worker.slot import Slot
from service.worker.work_loop import WorkLoop
from tuner.system.host_failures import Cause, HostFailure, check_host

_BLOCKED_SECONDS = 120.0
"""Time after which a heartbeat is blocked for good. One on an unresponsive database ends in about half a minute."""


class DeviceWorker:
    """Serve one device with two threads: the work loop and the heartbeat."""

    def __init__(
        self, store: Store, executor: Executor, versions: dict[str, str], settings: WorkerSettings, owner: str
    ) -> None:
        device, instruments = executor.device, settings.instruments
        self.served = ServedDevice(
            slot=f"{settings.node_name}/{device.id}",
            owner=owner,
            device=device,
            environment=executor.environment(),
            versions=versions,
        )
        self._devices = store.devices
        self._executor = executor
        self._settings = settings
        self._slot = Slot(self.served, store.leases, store.devices, settings)
        self._health = Health(self.served.slot, self._check, self._report_health)
        context = DeviceContext(self.served, settings.runs_dir, self._health)
        stores = RunStores(store.evidence, store.recommendations, store.residuals)
        runner = WorkRunner(stores, executor, context, instruments)
        attempt_runner = AttemptRunner(store.leases, store.work, runner, context, instruments)
        terms = LeaseTerms(settings.lease_seconds, settings.shutdown_grace_seconds)
        self._claimer = WorkClaimer(store.leases, self.served, terms)
        self._loop = WorkLoop(self._claimer, attempt_runner, self._health, settings.poll_seconds)
        self._heartbeat = Heartbeat(self.served, self._claimer.renew, self._served_now, store.devices, settings)

    def start(self) -> None:
        """Take the slot, release the work of its dead owners, and start the threads.

        Raises:
            DeviceTakenError: when another live process serves it.
        """
        self._slot.take()
        self._settings.instruments.metrics.register_device(self.served.device.id)
        try:
            self._health.is_ready()
            self._devices.announce(self._with_health())
        except BaseException:
            self._slot.release()
            raise
        self._loop.start()
        self._heartbeat.start()

    def is_alive(self) -> bool:
        """Return whether both threads run, and the heartbeat is not blocked."""
        beats = self._heartbeat.is_alive() and self._heartbeat.seconds_since_step < _BLOCKED_SECONDS
        return beats and self._loop.is_alive()

    def request_stop(self, reason: StopReason = StopReason.SHUTDOWN) -> None:
        """Begin to stop: running work is handed back. Returns at once."""
        self._claimer.request_stop(reason)
        self._loop.request_stop()

    def join(self) -> None:
        """Wait until the threads have ended, then release the slot."""
        if self._loop.was_started:
            self._loop.join()
            self._heartbeat.request_stop()
            self._heartbeat.join()
            self._slot.withdraw()
        self._executor.close()
        self._slot.release()

    def notify(self) -> None:
        """Check for work and for cancellations now."""
        self._loop.wake()
        self._heartbeat.wake()

    def _served_now(self) -> ServedDevice | None:
        return self._with_health() if self._loop.is_alive() else None

    def _with_health(self) -> ServedDevice:
        return self.served.model_copy(update={"unready": self._health.unready})

    def _check(self, needed_bytes: int) -> HostFailure | None:
        """Check the host and the device."""
        folders = [self._settings.runs_dir, Path(tempfile.gettempdir())]
        if (trouble := check_host(folders, needed_bytes)) is not None:
            return trouble
        lost = self._executor.lost_device()
        return None if lost is None else HostFailure(Cause.DEVICE, lost)

    def _report_health(self, cause: str | None) -> None:
        self._settings.instruments.metrics.set_device_trouble(self.served.device.id, cause)
        self._heartbeat.announce_now()
