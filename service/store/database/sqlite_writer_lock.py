"""A fair lock for the writers of one SQLite engine: first come, first served.

SQLite serves the writer that retries at the right moment: of many that write without a pause, one may wait for seconds.
A lock of our own is fair; writers of other processes are left to SQLite.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import StoreUnavailableError


class FairLock:
    """A lock that is given in the order of the requests. Safe to share between threads; not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        """Each waits at a lock of its own; the first holds the fair lock."""

    @contextmanager
    def acquire(self, timeout_seconds: float) -> Iterator[None]:
        """Hold the lock within the block.

        Args:
            timeout_seconds: how long to wait for the lock.

        Raises:
            StoreUnavailableError: when the lock is not given in time.
        """
        given = threading.Lock()
        given.acquire()
        with self._lock:
            self._waiting.append(given)
            if self._waiting[0] is given:
                given.release()
        try:
            if not given.acquire(timeout=timeout_seconds):
                raise StoreUnavailableError(
                    f"the database cannot be used: other writers were not done in {timeout_seconds:g} s"
                )
            yield
        finally:
            with self._lock:
                held = self._waiting[0] is given
                self._waiting.remove(given)
                if held and self._waiting:
                    self._waiting[0].release()
