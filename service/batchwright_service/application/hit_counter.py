"""Count cache hits and misses, flushed to the store every two seconds off the request path."""

import logging
import threading
from collections.abc import Callable

from batchwright_service.errors import StoreUnavailableError

_log = logging.getLogger(__name__)

_FLUSH_SECONDS = 2.0
"""The time for which counts are collected; a process that is killed loses them."""


class HitCounter:
    """Collect hits and misses, and write them together later. Safe to share between threads.

    Args:
        write: writes the hits and misses since the last call.
        seconds: the time for which counts are collected.
        observe: called with each hit (true) and miss (false) at once, for the metrics of this process.
    """

    def __init__(
        self,
        write: Callable[[int, int], None],
        seconds: float = _FLUSH_SECONDS,
        observe: Callable[[bool], None] = lambda _hit: None,
    ) -> None:
        self._write = write
        self._observe = observe
        self._seconds = seconds
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._hits = 0
        self._misses = 0
        self._timer: threading.Timer | None = None

    def count(self, *, hit: bool) -> None:
        """Count one lookup."""
        self._observe(hit)
        with self._lock:
            self._hits += hit
            self._misses += not hit
            if self._timer is None:
                self._timer = threading.Timer(self._seconds, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Write the collected counts, and return when they are written, by another thread too.

        Counts that cannot be written are kept for the next flush.
        """
        with self._writing:
            self._flush()

    def _flush(self) -> None:
        with self._lock:
            hits, self._hits = self._hits, 0
            misses, self._misses = self._misses, 0
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if not (hits or misses):
            return
        try:
            self._write(hits, misses)
        except StoreUnavailableError as error:
            _log.warning("%d hits and %d misses are not written yet: %s", hits, misses, error)
            with self._lock:
                self._hits += hits
                self._misses += misses
