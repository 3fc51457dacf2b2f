"""A pool of fork servers for estimates, so that the next estimate need not import torch. No torch itself."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from batchwright.errors import EstimateCancelledError
from batchwright.estimation.client import check_gpus, estimate_on, tracing_server
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright.system.fork_server.client import ForkServer
from batchwright.system.fork_server.spawn import ChildProcess

_IDLE_SECONDS = 300.0
"""Seconds that a process waits for the next request: limited because an idle process uses half a gigabyte of memory."""


class EstimatePool:
    """Makes estimates in pooled processes. Thread-safe: each request has a process for itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[ForkServer] = []
        self._closed = False
        self._start_executor = ThreadPoolExecutor(1, thread_name_prefix="estimates")
        """Starts all processes in one thread that stays, because a process ends with the thread that started it."""

    def estimate(self, request: EstimateRequest, should_stop: Callable[[], bool] = lambda: False) -> Estimate:
        """Estimate as ``batchwright.estimation.client.estimate`` does, in an idle process, or else in a new one.

        Raises:
            BatchwrightError: as ``batchwright.estimation.client.estimate``.
        """
        check_gpus(request)
        with self._borrow() as server:
            return estimate_on(server, request, should_stop)

    @contextmanager
    def _borrow(self) -> Iterator[ForkServer]:
        """Borrow a server for the block."""
        with self._lock:
            server = self._idle.pop() if self._idle else tracing_server(self._start, _IDLE_SECONDS)
        try:
            yield server
        finally:
            with self._lock:
                is_open = not self._closed
                if is_open:
                    self._idle.append(server)
            if not is_open:
                server.close()

    def _start(self, module: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise EstimateCancelledError("no more estimates are made: the service is shutting down")
            starting = self._start_executor.submit(ChildProcess, module, arguments, environment)
        return starting.result()

    def close(self) -> None:
        """End idle processes; busy ones end with their request. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for server in idle:
            server.close()
        self._start_executor.shutdown(wait=False)
