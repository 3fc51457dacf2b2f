"""A bound on the threads that a slow dependency may hold, so that the other requests still get one."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchwright_service.errors import DependencyBusyError, ServiceError

_POLL_SECONDS = 0.05


class Bulkhead:
    """Slots for the callers of one dependency. Safe to share between threads.

    The API serves requests in forty threads (anyio's default). A call that hangs keeps its slot; callers who find no
    slot are refused within ``wait_seconds``.

    Args:
        dependency: its name in the message of a refusal.
        slots: calls at once.
        queue: callers that may wait for a slot; each holds a thread.
        wait_seconds: the longest wait for a slot.
        busy: the error of a refusal.
        remedy: what its message advises.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the bounds, and how a refusal is told
        self,
        dependency: str,
        slots: int,
        queue: int,
        wait_seconds: float,
        busy: type[ServiceError] = DependencyBusyError,
        remedy: str = "try again later",
    ) -> None:
        self._message = f"too many requests wait for {dependency}: {remedy}"
        self._busy = busy
        self._slots = threading.BoundedSemaphore(slots)
        self._admitted = threading.BoundedSemaphore(slots + queue)
        self._wait_seconds = wait_seconds

    @contextmanager
    def slot(self, require_caller: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold a slot within the block.

        Args:
            require_caller: called many times a second while a slot is awaited; raises once the caller has left.

        Raises:
            ServiceError: the error of a refusal, when no slot became free in time, or too many callers wait.
        """
        if not self._admitted.acquire(blocking=False):
            raise self._busy(self._message)
        try:
            deadline = time.monotonic() + self._wait_seconds
            while not self._slots.acquire(timeout=min(_POLL_SECONDS, self._wait_seconds)):
                require_caller()
                if time.monotonic() >= deadline:
                    raise self._busy(self._message)
            try:
                yield
            finally:
                self._slots.release()
        finally:
            self._admitted.release()
