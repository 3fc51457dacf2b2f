"""The worker of one device: a loop that claims and runs work, and a heartbeat beside it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from service.domain.workers import ServedDevice
from service.store.store import Store
from service.worker.attempts import Attempts
from service.worker.claiming import Claims
from service.worker.executors.base import Executor
from service.worker.heartbeat import Heartbeat
from service.worker.host_health import Health
from service.worker.lease import LeaseTerms, Stop
from service.worker.runner import Driver, Site
from service.worker.settings import WorkerSettings
from service.worker.slot import Slot
from service.worker.work_loop import WorkLoop
from tuner.system.host_failures import Cause, HostFailure, check_host


class DeviceWorker:
    """Serve one device with two threads: wires claiming, running and heartbeat, and starts and stops them."""

    def __init__(
        self, store: Store, executor: Executor, versions: dict[str, str], settings: WorkerSettings, owner: str
    ) -> None:
        device, watch = executor.device, settings.instruments
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
        site = Site(self.served, settings.runs_dir, self._health)
        driver = Driver(store.evidence, store.recommendations, executor, site, watch)
        attempts = Attempts(store.leases, store.work, driver, site, watch)
        terms = LeaseTerms(settings.lease_seconds, settings.shutdown_grace_seconds)
        self._claims = Claims(store.leases, self.served, terms)
        self._loop = WorkLoop(self._claims, attempts, self._health, settings.poll_seconds)
        self._heartbeat = Heartbeat(self.served, self._claims.renew, self._served_now, store.devices, settings)

    def start(self) -> None:
        """Take the device, release the work that a dead owner left on it, and begin.

        Raises:
            DeviceTakenError: when another live process serves it.
        """
        self._slot.take()
        self._settings.instruments.metrics.register_device(self.served.device.id)
        try:
            self._health.may_work()
            self._devices.announce(self._with_health())
        except BaseException:
            self._slot.release()
            raise
        self._loop.start()
        self._heartbeat.start()

    def request_stop(self, how: Stop = Stop.SHUTDOWN) -> None:
        """Begin to stop: running work is handed back. Returns at once."""
        self._claims.request_stop(how)
        self._loop.request_stop()

    def join(self) -> None:
        """Wait until nothing runs, then leave."""
        if self._loop.was_started:
            self._loop.join()
            self._heartbeat.request_stop()
            self._heartbeat.join()
            self._slot.withdraw()
        self._executor.close()
        self._slot.release()

    def notify(self) -> None:
        """Look for work and for cancellations now."""
        self._loop.wake()
        self._heartbeat.wake()

    def _served_now(self) -> ServedDevice | None:
        return self._with_health() if self._loop.is_alive() else None

    def _with_health(self) -> ServedDevice:
        return self.served.model_copy(update={"unready": self._health.unready})

    def _check(self, needed_bytes: int) -> HostFailure | None:
        """Look at the host, and for the device."""
        folders = [self._settings.runs_dir, Path(tempfile.gettempdir())]
        if (trouble := check_host(folders, needed_bytes)) is not None:
            return trouble
        lost = self._executor.lost_device()
        return None if lost is None else HostFailure(Cause.DEVICE, lost)

    def _report_health(self, cause: str | None) -> None:
        self._settings.instruments.metrics.set_device_trouble(self.served.device.id, cause)
        self._heartbeat.announce_now()
