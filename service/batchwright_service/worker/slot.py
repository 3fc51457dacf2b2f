"""The exclusive right of one process to serve a device of this host, its slot, and the lock file that proves it."""

import logging
import time
from pathlib import Path

from filelock import FileLock, Timeout

from batchwright.client.documents.workers import ServedDevice
from batchwright_service.domain import lease_waits
from batchwright_service.errors import DeviceTakenError, ServiceError
from batchwright_service.folders import make_private_folder
from batchwright_service.store.devices import DeviceStore
from batchwright_service.store.leases import LeaseStore
from batchwright_service.store.models import SlotHolder
from batchwright_service.worker.worker_settings import WorkerSettings

_log = logging.getLogger(__name__)

_LOCK_RETRY_SECONDS = 0.1
_RETRY_SECONDS = 0.2


class DeviceLock:
    """The exclusive right to serve one device from one data folder. A new owner knows that the last one has ended.

    The kernel releases the lock file at any end of its process.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.path = folder / f"{device.replace(':', '-').replace('/', '-')}.lock"
        self._lock = FileLock(self.path, thread_local=False, poll_interval=_LOCK_RETRY_SECONDS, fallback_to_soft=False)

    def acquire(self, owner: str, wait_seconds: float = 0.0) -> None:
        """Acquire the lock; ``owner`` is written into the file as information for people.

        Raises:
            DeviceTakenError: when another live process does not release the lock within ``wait_seconds``.
        """
        make_private_folder(self.path.parent)
        try:
            self._lock.acquire(timeout=wait_seconds)
        except Timeout:
            holder = self.path.read_text(errors="replace").strip() or "another process"
            raise DeviceTakenError(
                f"{self.device} is served by {holder} already (lock file {self.path}): end that process, or serve "
                "other devices"
            ) from None
        self.path.write_text(owner)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._lock.release()


class Slot:
    """Take a slot from dead owners, and release it."""

    def __init__(
        self, served: ServedDevice, leases: LeaseStore, devices: DeviceStore, settings: WorkerSettings
    ) -> None:
        self._served = served
        self._leases = leases
        self._devices = devices
        self._settings = settings
        # Nodes of a cluster may share the folder, and only the engine assigns their devices.
        self._is_assigned = settings.assignment is not None
        self._lock = DeviceLock(settings.locks_dir, served.slot if self._is_assigned else served.device.id)

    def take(self) -> None:
        """Lock the device, and expire the leases that a dead owner left in the slot.

        Raises:
            DeviceTakenError: when another live process serves the device.
            StoreUnavailableError: when the database cannot be used.
        """
        self._lock.acquire(self._served.owner, lease_waits.SLOT_SECONDS)
        try:
            if not self._is_assigned:
                self._await_death_of_other()
            self._leases.release_slot(self._served.slot, self._settings.owner_prefix)
        except BaseException:
            self.release()
            raise

    def withdraw(self) -> None:
        """Remove the device from the served ones, as far as the store can be reached."""
        try:
            self._devices.withdraw(self._served)
        except ServiceError as error:
            _log.warning("%s: cannot withdraw: %s", self._served.slot, error)

    def release(self) -> None:
        """Unlock the device. Idempotent."""
        self._lock.release()

    def _await_death_of_other(self) -> None:
        """Wait while a worker with another data folder seems to serve this slot, since it may have just died.

        It uses another lock file, so only missing heartbeats prove its death.
        """
        last: SlotHolder | None = None
        while (other := self._foreign_worker()) is not None:
            if last is not None and (other.age_seconds < last.age_seconds or other.owner != last.owner):
                raise DeviceTakenError(
                    f"{self._served.slot} is served by {other.owner} already, from another data folder: end that "
                    "process, or serve other devices; each host needs its own BATCHWRIGHT_NODE_NAME"
                )
            last = other
            time.sleep(_RETRY_SECONDS)

    def _foreign_worker(self) -> SlotHolder | None:
        """Return a live worker of this slot with another data folder, or None."""
        other = self._devices.holder(self._served.slot)
        if other is None or other.owner.startswith(self._settings.owner_prefix):
            return None
        return other if other.age_seconds <= self._settings.lease_seconds else None
