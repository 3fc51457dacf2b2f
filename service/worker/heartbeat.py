"""The heartbeat of one worker: its lease is renewed and its device announced, also while work runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from service.domain.workers import ServedDevice
from service.errors import StoreUnavailableError
from service.observability.logging import logging_about, sparse_logger
from service.store.interface import DeviceStore
from service.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)


class Heartbeat:
    """A thread that renews and announces.

    Args:
        renew: renews the lease in use.
        served: gives the device as it is now.
        devices: where it is announced.
        working: tells whether the worker's own thread lives; without it the device is not announced.
        settings: of the worker.
    """

    def __init__(
        self,
        renew: Callable[[], None],
        served: Callable[[], ServedDevice],
        devices: DeviceStore,
        working: Callable[[], bool],
        settings: WorkerSettings,
    ) -> None:
        self._renew = renew
        self._served = served
        self._devices = devices
        self._working = working
        self._settings = settings
        self._announce_due = 0.0
        self._finished = threading.Event()
        self._due = threading.Event()
        self._warnings = sparse_logger(_log)
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{served().device.id}")

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def beat_now(self) -> None:
        """Renew the lease at once."""
        self._due.set()

    def announce_now(self) -> None:
        """Renew the lease and announce the device at once."""
        self._announce_due = 0.0
        self._due.set()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._finished.set()
        self._due.set()
        self._thread.join()

    def _beat(self) -> None:
        served = self._served()
        with logging_about(device=served.device.id):
            while not self._finished.is_set():
                try:
                    self._beat_once()
                except Exception as error:  # noqa: BLE001 - without a heartbeat the device would be lost for good
                    text = "%s: the heartbeat goes on after an error of its own: %s"
                    self._warnings.warning(text, served.place, error, exc_info=error)
                self._due.wait(self._settings.beat_seconds)
                self._due.clear()

    def _beat_once(self) -> None:
        self._renew()
        if not self._working() or time.monotonic() < self._announce_due:
            return
        served = self._served()
        try:
            self._devices.announce(served)
        except StoreUnavailableError as error:
            self._warnings.warning("%s: cannot announce: %s", served.place, error)
        else:
            self._announce_due = time.monotonic() + self._settings.lease_seconds / 3
