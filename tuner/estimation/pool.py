"""Make estimates in processes that stay a while, so that the next one need not import torch. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tuner.errors import EstimateCancelledError
from tuner.estimation.client import check_gpus, estimate_in, tracing_server
from tuner.schemas.estimates import Estimate, EstimateRequest
from tuner.system.fork_server.client import ForkServer
from tuner.system.fork_server.spawn import ChildProcess, Start

_IDLE_SECONDS = 300.0
"""A waiting process holds half a gigabyte."""


class WarmEstimates:
    """Makes estimates. Safe to share between threads; each request has a process of its own meanwhile.

    Args:
        idle_seconds: how long a process waits for the next request.
    """

    def __init__(self, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._free: list[ForkServer] = []
        self._closed = False
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="estimates")
        """Processes end with the thread that starts them: this one stays, whichever thread needs them."""

    def estimate(self, request: EstimateRequest, should_stop: Callable[[], bool] = lambda: False) -> Estimate:
        """Estimate as ``tuner.estimation.client.estimate`` does, in a process that is free, or else a new one.

        Raises:
            BatchwrightError: likewise.
        """
        check_gpus(request)
        with self._taken() as server:
            return estimate_in(server, request, should_stop)

    @contextmanager
    def _taken(self) -> Iterator[ForkServer]:
        """Take a server for the block."""
        with self._lock:
            server = self._free.pop() if self._free else tracing_server(self._start, self._idle_seconds)
        try:
            yield server
        finally:
            with self._lock:
                keeps = not self._closed
                if keeps:
                    self._free.append(server)
            if not keeps:
                server.close()

    def _start(self, start: Start) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise EstimateCancelledError("no more estimates are made: the service is ending")
            starting = self._starter.submit(ChildProcess, start)
        return starting.result()

    def close(self) -> None:
        """End the processes that wait; others end with their request. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, self._free = self._free, []
        for server in waiting:
            server.close()
        self._starter.shutdown(wait=False)
