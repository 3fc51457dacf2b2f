"""Watch the memory of a device in a thread of its own, since a driver that hangs must not delay a heartbeat."""

from __future__ import annotations

import threading
from collections.abc import Callable

from batchwright.client.documents.workers import DeviceMemory
from batchwright.hardware.memory_in_use import MemoryInUse

_SECONDS = 5.0
"""Pause between two readings: less than the third of a lease after which devices are announced."""
_LEAST_CHANGE = 512
"""A change by less than this part of the memory is not announced: each one writes a row of the store."""


class MemoryWatch:
    """Read the memory in use until it is stopped."""

    def __init__(self, read: Callable[[], MemoryInUse | None], total_bytes: int) -> None:
        self._read = read
        self._least_bytes = total_bytes / _LEAST_CHANGE
        self._latest: DeviceMemory | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="memory-watch", daemon=True)

    @property
    def latest(self) -> DeviceMemory | None:
        """The last reading that differed from the one before; None while there is none, and where it fails."""
        return self._latest

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
            self._latest = now

    def _repeat(self) -> None:
        while not self._stopping.wait(_SECONDS):
            self.update()

    def _differs(self, now: DeviceMemory | None) -> bool:
        before = self._latest
        if before is None or now is None or (before.own_bytes is None) != (now.own_bytes is None):
            return True
        changes = (now.used_bytes - before.used_bytes, (now.own_bytes or 0) - (before.own_bytes or 0))
        return any(abs(change) >= self._least_bytes for change in changes)
