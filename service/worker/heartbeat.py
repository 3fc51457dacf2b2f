"""The heartbeat of one worker: renewal of its lease and announcement of its device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from typing_extensions import override

from service.domain.workers import ServedDevice
from service.errors import StoreUnavailableError
from service.observability.logging import rate_limited_logger
from service.store.interface import DeviceStore
from service.worker.device_thread import DeviceThread
from service.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)


class Heartbeat(DeviceThread):
    """Renew the lease at every beat, and announce the device a few times per lease.

    Args:
        served: the device.
        renew: renews the lease in use.
        served_now: returns the device with its health, or None when it is not served any more.
        devices: where the device is announced.
        settings: the settings of the worker.
    """

    def __init__(
        self,
        served: ServedDevice,
        renew: Callable[[], None],
        served_now: Callable[[], ServedDevice | None],
        devices: DeviceStore,
        settings: WorkerSettings,
    ) -> None:
        super().__init__("heartbeat", served, settings.beat_seconds)
        self._renew = renew
        self._served_now = served_now
        self._devices = devices
        self._announce_seconds = settings.lease_seconds / 3
        self._announce_due = 0.0
        self._warnings = rate_limited_logger(_log)

    def announce_now(self) -> None:
        """Send a heartbeat now, and announce the device with it."""
        self._announce_due = 0.0
        self.wake()

    @override
    def _step(self) -> bool:
        try:
            self._renew()
            if time.monotonic() >= self._announce_due and (served := self._served_now()) is not None:
                self._announce(served)
        except Exception as error:  # noqa: BLE001 - without a heartbeat the device would be lost for good
            text = "%s: the heartbeat continues after an unexpected error: %s"
            self._warnings.warning(text, self._slot, error, exc_info=error)
        return False

    def _announce(self, served: ServedDevice) -> None:
        try:
            self._devices.announce(served)
        except StoreUnavailableError as error:
            self._warnings.warning("%s: cannot announce: %s", served.slot, error)
        else:
            self._announce_due = time.monotonic() + self._announce_seconds
