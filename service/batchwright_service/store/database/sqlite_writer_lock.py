"""A fair lock for the writers of one SQLite engine: first come, first served.

SQLite serves the writer that retries at the right moment: among many busy writers, one may wait for seconds. This lock
is fair within a process; writers of other processes are left to SQLite.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from batchwright_service.errors import StoreUnavailableError


class FairLock:
    """A lock that is acquired in the order of the requests. Safe to share between threads; not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        """Each waiter waits on its own lock; the first one holds the fair lock."""

    @contextmanager
    def acquire(self, timeout_seconds: float) -> Iterator[None]:
        """Hold the lock within the block.

        Raises:
            StoreUnavailableError: when the lock is not acquired in time.
        """
        own = threading.Lock()
        own.acquire()
        with self._lock:
            self._waiting.append(own)
            if self._waiting[0] is own:
                own.release()
        try:
            if not own.acquire(timeout=timeout_seconds):
                raise StoreUnavailableError(
                    f"the database cannot be used: other writers held it for {timeout_seconds:g} s"
                )
            yield
        finally:
            with self._lock:
                held = self._waiting[0] is own
                self._waiting.remove(own)
                if held and self._waiting:
                    self._waiting[0].release()
