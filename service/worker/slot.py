"""The exclusive right of one process to serve a device of this host: its slot."""

from __future__ import annotations

import logging
import time

from service.domain.workers import ServedDevice
from service.errors import DeviceTakenError, ServiceError
from service.store.interface import DeviceStore, LeaseStore
from service.store.models import SeenDevice
from service.worker.device_lock import DeviceLock
from service.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

_LOCK_WAIT_SECONDS = 5.0
"""How long a service that starts waits for the one before it to be gone."""
_RETRY_SECONDS = 0.2


class Slot:
    """Take a slot from dead owners, and leave it.

    Args:
        served: the device, its slot and its new owner.
        leases: of the work that dead owners left in the slot.
        devices: the served devices.
        settings: of the worker.
    """

    def __init__(
        self, served: ServedDevice, leases: LeaseStore, devices: DeviceStore, settings: WorkerSettings
    ) -> None:
        self._served = served
        self._leases = leases
        self._devices = devices
        self._settings = settings
        self._lock = DeviceLock(settings.locks_dir, served.device.id)

    def take(self) -> None:
        """Lock the device, and expire the leases that a dead owner left in the slot.

        Raises:
            DeviceTakenError: when another live process serves the device.
            StoreUnavailableError: when the database cannot be used.
        """
        self._lock.acquire(self._served.owner, _LOCK_WAIT_SECONDS)
        try:
            self._await_silence()
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

    def _await_silence(self) -> None:
        """Wait while a worker with another data folder seems to serve this very slot: it may have just died.

        Its lock file is not ours, so only its silence proves its death.

        Raises:
            DeviceTakenError: when it announces itself again.
        """
        last: SeenDevice | None = None
        while (other := self._foreign_worker()) is not None:
            if last is not None and (other.age_seconds < last.age_seconds or other.served.owner != last.served.owner):
                raise DeviceTakenError(
                    f"{self._served.slot} is served by {other.served.owner} already, out of another data folder: end "
                    "that process, or serve other devices; another host needs a BATCHWRIGHT_NODE_NAME of its own"
                )
            last = other
            time.sleep(_RETRY_SECONDS)

    def _foreign_worker(self) -> SeenDevice | None:
        """A worker of this slot, announced lately, whose death no lock file of ours could prove."""
        for seen in self._devices.list():
            foreign = not seen.served.owner.startswith(self._settings.owner_prefix)
            if seen.served.slot == self._served.slot and foreign and seen.age_seconds <= self._settings.lease_seconds:
                return seen
        return None
