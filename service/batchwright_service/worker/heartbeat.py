"""The heartbeat of a process: one transaction renews all of its leases, announces its devices, and looks for work."""

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from batchwright.client.documents.workers import ServedDevice
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.observability.logging import rate_limited_logger
from batchwright_service.store.devices import DeviceStore
from batchwright_service.store.models import Beat, BeatReply
from batchwright_service.worker.lease import LeaseHolder
from batchwright_service.worker.worker_settings import WorkerSettings

_log = logging.getLogger(__name__)

_BLOCKED_SECONDS = 120.0
"""Time after which a beat is blocked for good. One on an unresponsive database ends in about half a minute."""
_RETRY_SECONDS = 0.2
"""Pause before a beat is repeated, when another transaction had locked a lease."""


class BeatingWorker(Protocol):
    """A worker as the heartbeat sees it."""

    @property
    def holder(self) -> LeaseHolder | None:
        """The lease in use, or None."""

    @property
    def is_idle(self) -> bool:
        """True while the worker waits for work, and would take some."""

    def served_now(self) -> ServedDevice | None:
        """Return the device with its health, or None when it is not served."""

    def wake(self) -> None:
        """Look for work now."""


class Heartbeat:
    """Repeat beats in a thread, until it is stopped.

    Args:
        workers: the workers of the process.
        devices: where leases are renewed and devices are announced.
        settings: the settings of the workers.
        is_notified: returns whether notifications of the database arrive; None where the database has none, so that
            every worker looks for work itself.
    """

    def __init__(
        self,
        workers: Sequence[BeatingWorker],
        devices: DeviceStore,
        settings: WorkerSettings,
        is_notified: Callable[[], bool] | None = None,
    ) -> None:
        self._workers = workers
        self._devices = devices
        self._settings = settings
        self._is_notified = is_notified
        self._announce_due = 0.0
        self._announced: dict[str, ServedDevice] = {}
        self._stopping = threading.Event()
        self._due = threading.Event()
        self._beat_at = time.monotonic()
        self._thread = threading.Thread(target=self._repeat, name="heartbeat")
        self._warnings = rate_limited_logger(_log)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs and is not blocked in a beat."""
        return self._thread.is_alive() and time.monotonic() - self._beat_at < _BLOCKED_SECONDS

    def wake(self) -> None:
        """Send a heartbeat now."""
        self._due.set()

    def stop(self) -> None:
        """Stop the thread, and wait for its end. Idempotent."""
        self._stopping.set()
        self._due.set()
        if self._thread.ident is not None:
            self._thread.join()

    def announce_now(self) -> None:
        """Send a heartbeat now, and announce the devices with it."""
        self._announce_due = 0.0
        self.wake()

    def _repeat(self) -> None:
        pause = 0.0
        while not self._stopping.is_set():
            self._due.wait(pause)
            self._due.clear()
            if self._stopping.is_set():
                return
            try:
                pause = self._beat()
            except StoreUnavailableError as error:
                pause = self._settings.beat_seconds
                self._warnings.warning("cannot send a heartbeat: %s", error)
            except Exception as error:  # noqa: BLE001 - without a heartbeat every device would be lost for good
                pause = self._settings.beat_seconds
                text = "the heartbeat continues after an unexpected error: %s"
                self._warnings.warning(text, error, exc_info=error)
            self._beat_at = time.monotonic()

    def _beat(self) -> float:
        """Send a beat if there is anything to send, and return the seconds until the next one."""
        pause = self._pause_seconds()
        holders = [holder for worker in self._workers if (holder := worker.holder) is not None]
        is_due = time.monotonic() + pause >= self._announce_due
        devices = [served for worker in self._workers if (served := worker.served_now()) is not None] if is_due else []
        is_polling = self._is_notified is not None
        idle = [worker for worker in self._workers if is_polling and worker.is_idle]
        if not holders and not devices and not idle:
            return pause
        asked = {served.slot: worker for worker in idle if (served := worker.served_now()) is not None}
        beat = Beat(
            self._settings.lease_seconds,
            devices=tuple(devices),
            changed=frozenset(served.slot for served in devices if self._announced.get(served.slot) != served),
            idle=tuple(served for worker in asked.values() if (served := worker.served_now()) is not None),
        )
        reply = send(self._devices, beat, holders)
        if devices:
            self._announced |= {served.slot: served for served in devices}
            self._announce_due = time.monotonic() + self._settings.lease_seconds / 3
        for slot in reply.wanted:
            asked[slot].wake()
        is_complete = all(holder.lease in reply.renewed or holder.lease in reply.lost for holder in holders)
        return pause if is_complete else min(pause, _RETRY_SECONDS)

    def _pause_seconds(self) -> float:
        """Return the seconds between beats, which differ a little so that processes do not beat together."""
        if self._is_notified is None:
            return self._settings.beat_seconds
        seconds = self._settings.notified_beat_seconds if self._is_notified() else self._settings.polling_beat_seconds
        return seconds * random.uniform(0.9, 1.0)


def send(devices: DeviceStore, beat: Beat, holders: Sequence[LeaseHolder]) -> BeatReply:
    """Send a beat with the leases of the holders, and give each of them its result.

    Raises:
        StoreUnavailableError: when the store cannot be reached; the holders count it as unreachable.
    """
    renewals = [holder.begin_renewal() for holder in holders]
    leases = tuple(holder.lease for holder in holders)
    reply = devices.beat(Beat(beat.lease_seconds, leases, beat.devices, beat.changed, beat.idle))
    for end in renewals:
        end(reply)
    return reply
