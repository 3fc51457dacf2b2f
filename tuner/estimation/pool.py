"""Estimates made in processes that stay a while, so that the next one need not import torch. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from tuner.errors import EstimateCancelledError
from tuner.estimation.client import LostError, TracingProcess, check_gpus
from tuner.schemas.estimates import Estimate, EstimateRequest

_IDLE_SECONDS = 300.0
"""A process that waits holds half a gigabyte."""


class WarmEstimates:
    """Makes estimates. Safe to share between threads; each that asks has a process of its own meanwhile.

    Args:
        idle_seconds: how long a process waits for the next question.
    """

    def __init__(self, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._free: list[TracingProcess] = []
        self._closed = False
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="estimates")
        """Processes end with the thread that starts them: this one stays, whoever asks."""

    def estimate(self, request: EstimateRequest, should_stop: Callable[[], bool] = lambda: False) -> Estimate:
        """As ``tuner.estimation.client.estimate``, from a process that is free, or else a new one.

        Raises:
            BatchwrightError: likewise.
        """
        check_gpus(request)
        while (waiting := self._taken()) is not None:
            with suppress(LostError), self._given_back(waiting):  # it may have ended while it waited
                return waiting.estimate(request, should_stop)
        process = self._started()
        with self._given_back(process):
            return process.estimate(request, should_stop)

    def _taken(self) -> TracingProcess | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def _started(self) -> TracingProcess:
        with self._lock:
            if self._closed:
                raise EstimateCancelledError("no more estimates are made: whoever makes them is ending")
            starting = self._starter.submit(TracingProcess, idle_seconds=self._idle_seconds)
        return starting.result()

    @contextmanager
    def _given_back(self, process: TracingProcess) -> Iterator[None]:
        """Keep the process for the next who asks, unless what it was asked was given up."""
        try:
            yield
        finally:
            with self._lock:
                keeps = process.is_free and not self._closed
                if keeps:
                    self._free.append(process)
            if not keeps:
                process.close()

    def close(self) -> None:
        """End the processes that wait; others end when they have answered. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, self._free = self._free, []
        for process in waiting:
            process.close()
        self._starter.shutdown(wait=False)
