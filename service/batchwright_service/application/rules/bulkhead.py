"""A bound on the threads that a slow dependency may hold, so that the other requests still get one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from batchwright_service.errors import DependencyBusyError


class Bulkhead:
    """Slots for the callers of one dependency. Safe to share between threads.

    The API serves requests in forty threads (anyio's default). A call that hangs keeps its slot; callers who find no
    slot are refused within ``wait_seconds``.

    Args:
        dependency: its name in the message of a refusal.
        slots: calls at once.
        queue: callers that may wait for a slot; each holds a thread.
        wait_seconds: the longest wait for a slot.
    """

    def __init__(self, dependency: str, slots: int, queue: int, wait_seconds: float) -> None:
        self._dependency = dependency
        self._slots = threading.BoundedSemaphore(slots)
        self._admitted = threading.BoundedSemaphore(slots + queue)
        self._wait_seconds = wait_seconds

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot within the block.

        Raises:
            DependencyBusyError: when no slot became free in time, or too many callers wait.
        """
        busy = DependencyBusyError(f"too many requests wait for {self._dependency}: try again later")
        if not self._admitted.acquire(blocking=False):
            raise busy
        try:
            if not self._slots.acquire(timeout=self._wait_seconds):
                raise busy
            try:
                yield
            finally:
                self._slots.release()
        finally:
            self._admitted.release()
