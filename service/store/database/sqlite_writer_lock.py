"""Writers of one SQLite file in this process, one after the other in the order in which they came.

SQLite lets go first whoever asks at the right moment: of many that write without a pause, one may wait for seconds. A
queue of our own is fair; other processes are left to SQLite.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import StoreUnavailableError


class Turns:
    """Whose turn it is. Safe to share between threads; not for one that has its turn to ask for another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        """Each waits at a lock of its own; the first has its turn."""

    @contextmanager
    def mine(self, patience_seconds: float) -> Iterator[None]:
        """The block is run when its turn has come.

        Args:
            patience_seconds: how long to wait for it.

        Raises:
            StoreUnavailableError: when it does not come.
        """
        come = threading.Lock()
        come.acquire()
        with self._lock:
            self._waiting.append(come)
            if self._waiting[0] is come:
                come.release()
        try:
            if not come.acquire(timeout=patience_seconds):
                raise StoreUnavailableError(
                    f"the database cannot be used: other writers were not done in {patience_seconds:g} s"
                )
            yield
        finally:
            with self._lock:
                had_it = self._waiting[0] is come
                self._waiting.remove(come)
                if had_it and self._waiting:
                    self._waiting[0].release()


_by_file: dict[str, Turns] = {}
_files = threading.Lock()


def turns_of(path: str) -> Turns:
    """Those of a file, for whoever opens it in this process."""
    with _files:
        return _by_file.setdefault(path, Turns())
