"""A thread of a worker that repeats one step."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from batchwright.client.documents.workers import ServedDevice
from batchwright_service.observability.logging import log_context


class DeviceThread(ABC):
    """Repeat ``_step`` in a thread until it is stopped, with pauses that ``wake`` cuts short."""

    def __init__(self, kind: str, served: ServedDevice, pause_seconds: float) -> None:
        self._device = served.device.id
        self._slot = served.slot
        self._pause_seconds = pause_seconds
        self._was_woken = False
        self._stopping = threading.Event()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=f"{kind}-{self._device}")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def was_started(self) -> bool:
        """Return whether the thread was started, also when it has ended since."""
        return self._thread.ident is not None

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Take the next step now."""
        self._due.set()

    def request_stop(self) -> None:
        """Take no further step. Returns at once."""
        self._stopping.set()
        self._due.set()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _repeat(self) -> None:
        with log_context(device=self._device):
            while not self._stopping.is_set():
                if not self._step():
                    self._due.wait(self._pause_seconds)
                self._was_woken = self._due.is_set()
                if self._was_woken:
                    self._due.clear()

    @abstractmethod
    def _step(self) -> bool:
        """Take one step without raising, and return whether the next one needs no pause."""
