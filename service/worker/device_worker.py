"""Claims work and has it driven: one worker per device, each with a heartbeat that keeps its lease alive."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from service.domain.workers import ServedDevice
from service.errors import DeviceTakenError, ServiceError, StoreUnavailableError
from service.observability.instruments import Instruments
from service.observability.logging import logging_about, sparse_logger
from service.store.interface import SeenDevice, Store
from service.worker.attempts import Attempts
from service.worker.device_lock import DeviceLock, folder_identity
from service.worker.executors.base import Executor
from service.worker.host_health import Health
from service.worker.lease import Hold, LeaseTerms, Stop
from service.worker.runner import Driver, Site
from tuner.system.host_failures import Cause, Trouble, check_host, trouble_of

_log = logging.getLogger(__name__)

_LOCK_WAIT_SECONDS = 5.0
"""How long a service that starts waits for the one before it to be gone."""
_LONGEST_BEAT_SECONDS = 0.75
"""A cancellation made in another process is seen at the next beat: well within the two seconds promised."""
_RETRY_SECONDS = 0.2
_ERROR_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerSettings:
    """What every worker of a process shares."""

    node_name: str
    runs_dir: Path
    locks_dir: Path
    lease_seconds: float
    poll_seconds: float
    shutdown_grace_seconds: float
    instruments: Instruments = field(default_factory=Instruments)

    @property
    def beat_seconds(self) -> float:
        """Seconds between heartbeats."""
        return min(self.lease_seconds / 4, _LONGEST_BEAT_SECONDS)

    @property
    def owner_prefix(self) -> str:
        """How the names of all owners begin that used the lock files of this folder since the host was started."""
        return f"{self.node_name}:{folder_identity(self.locks_dir)}:"

    def new_owner(self) -> str:
        """A name that no other process has or had."""
        return f"{self.owner_prefix}{os.getpid()}:{secrets.token_hex(4)}"


class DeviceWorker:
    """Serves one device: two threads, one that runs work and one that beats."""

    def __init__(
        self, store: Store, executor: Executor, versions: dict[str, str], settings: WorkerSettings, owner: str
    ) -> None:
        device = executor.device
        self.served = ServedDevice(
            slot=f"{settings.node_name}/{device.id}",
            owner=owner,
            device=device,
            environment=executor.environment(),
            versions=versions,
        )
        self._store = store
        self._executor = executor
        self._settings = settings
        self._watch = settings.instruments
        self._lock = DeviceLock(settings.locks_dir, device.id)
        self._health = Health(self.served.slot, self._check, self._tell_health)
        site = Site(self.served, settings.runs_dir, self._health)
        self._attempts = Attempts(store, Driver(store, executor, site, settings.instruments), site, self._watch)
        self._hold: Hold | None = None
        self._stop = Stop.SHUTDOWN
        self._stopping = threading.Event()
        self._finished = threading.Event()
        self._wake = threading.Event()
        self._beat_now = threading.Event()
        self._announce_due = 0.0
        self._warnings = sparse_logger(_log)
        self._worker = threading.Thread(target=self._work, name=f"worker-{device.id}")
        self._heart = threading.Thread(target=self._beat, name=f"heartbeat-{device.id}")

    # --- for the coordinator ---

    def start(self) -> None:
        """Take the device, release what a dead owner left on it, and begin.

        Raises:
            DeviceTakenError: when another live process serves it.
        """
        self._lock.acquire(self.served.owner, _LOCK_WAIT_SECONDS)
        self._watch.metrics.device_served(self.served.device.id)
        try:
            self._await_silence()
            self._store.release_slot(self.served.slot, self._settings.owner_prefix)
            self._health.may_work()
            self._store.announce(self.served.model_copy(update={"unready": self._health.unready}))
        except BaseException:
            self._lock.release()
            raise
        self._worker.start()
        self._heart.start()

    def request_stop(self, how: Stop = Stop.SHUTDOWN) -> None:
        """Begin to stop: what runs is handed back. Returns at once."""
        self._stop = max(self._stop, how)
        self._stopping.set()
        if (hold := self._hold) is not None:
            hold.request(self._stop)
        self._wake.set()

    def join(self) -> None:
        """Wait until nothing runs, then leave."""
        if self._worker.ident is not None:
            self._worker.join()
            self._finished.set()
            self._beat_now.set()
            self._heart.join()
            self._leave()
        self._executor.close()
        self._lock.release()

    def notify(self) -> None:
        """Look for work and for cancellations now."""
        self._wake.set()
        self._beat_now.set()

    def _await_silence(self) -> None:
        """Wait while it looks as if a worker with another data folder served this very slot: it may have just died.

        Its lock file is not ours, so only its silence tells.

        Raises:
            DeviceTakenError: when it is heard of again.
        """
        last: SeenDevice | None = None
        while (other := self._other_here()) is not None:
            if last is not None and (other.age_seconds < last.age_seconds or other.served.owner != last.served.owner):
                raise DeviceTakenError(
                    f"{self.served.slot} is served by {other.served.owner} already, out of another data folder: end "
                    "that process, or serve other devices; another host needs a BATCHWRIGHT_NODE_NAME of its own"
                )
            last = other
            time.sleep(_RETRY_SECONDS)

    def _other_here(self) -> SeenDevice | None:
        """A worker of this slot, heard of lately, whose death no lock file of ours could prove."""
        for seen in self._store.devices():
            foreign = not seen.served.owner.startswith(self._settings.owner_prefix)
            if seen.served.slot == self.served.slot and foreign and seen.age_seconds <= self._settings.lease_seconds:
                return seen
        return None

    # --- the worker's thread ---

    def _work(self) -> None:
        with logging_about(device=self.served.device.id):
            self._serve()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                busy = self._run_next()
            except StoreUnavailableError as error:
                self._warnings.warning("%s: %s", self.served.slot, error)
                busy = False
            except Exception as error:  # noqa: BLE001 - a worker outlives whatever one piece of work does
                self._outlive(error)
                busy = False
            if not busy:
                self._wake.wait(self._settings.poll_seconds)
            self._wake.clear()

    def _outlive(self, error: Exception) -> None:
        if (trouble := trouble_of(error)) is not None:
            self._health.suspect(trouble)
            return
        _log.exception("%s: the worker goes on after an error of its own", self.served.slot)
        self._stopping.wait(_ERROR_PAUSE_SECONDS)

    def _check(self, needed_bytes: int) -> Trouble | None:
        """Look at the host, and for the device."""
        folders = [self._settings.runs_dir, Path(tempfile.gettempdir())]
        if (trouble := check_host(folders, needed_bytes)) is not None:
            return trouble
        lost = self._executor.lost_device()
        return None if lost is None else Trouble(Cause.DEVICE, lost)

    def _tell_health(self, cause: str | None) -> None:
        self._watch.metrics.device_troubled(self.served.device.id, cause)
        self._announce_due = 0.0
        self._beat_now.set()

    def _run_next(self) -> bool:
        """Claim and run one piece of work; false when there is none, or the host is in trouble."""
        if not self._health.may_work():
            return False
        self._attempts.return_late()
        claimed_at = time.monotonic()
        claim = self._store.claim(self.served, self._settings.lease_seconds)
        if claim is None:
            return False
        terms = LeaseTerms(self._settings.lease_seconds, self._settings.shutdown_grace_seconds)
        hold = Hold(self._store, claim.lease, terms, claimed_at)
        self._hold = hold
        try:
            if self._stopping.is_set():
                hold.request(self._stop)
            self._attempts.run(claim, hold)
        finally:
            self._hold = None
        return True

    # --- the heartbeat's thread ---

    def _beat(self) -> None:
        with logging_about(device=self.served.device.id):
            self._beat_on()

    def _beat_on(self) -> None:
        while not self._finished.is_set():
            try:
                self._beat_once()
            except Exception as error:  # noqa: BLE001 - without a heartbeat the device would be lost for good
                text = "%s: the heartbeat goes on after an error of its own: %s"
                self._warnings.warning(text, self.served.slot, error, exc_info=error)
            self._beat_now.wait(self._settings.beat_seconds)
            self._beat_now.clear()

    def _beat_once(self) -> None:
        if (hold := self._hold) is not None:
            hold.renew()
        if self._worker.is_alive() and time.monotonic() >= self._announce_due:
            self._announce()

    def _announce(self) -> None:
        try:
            self._store.announce(self.served.model_copy(update={"unready": self._health.unready}))
        except StoreUnavailableError as error:
            self._warnings.warning("%s: cannot announce: %s", self.served.slot, error)
        else:
            self._announce_due = time.monotonic() + self._settings.lease_seconds / 3

    def _leave(self) -> None:
        try:
            self._store.withdraw(self.served)
        except ServiceError as error:
            _log.warning("%s: cannot withdraw: %s", self.served.slot, error)
