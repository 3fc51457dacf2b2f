"""Make the estimate of a search in a process of its own, while the search may already run. No torch."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from batchwright.errors import EstimateError, ProbeCancelledError
from batchwright.estimation.client import expect
from batchwright.schemas.requests import ExpectationRequest
from batchwright.schemas.results import ExpectedPeaks

_POLL_SECONDS = 0.05
_TIMEOUT_SECONDS = 600.0
"""An estimate that takes longer is ended. A search has ended by then for nearly every workload."""


class BackgroundEstimate:
    """An estimate that is being made, in a process that touches no GPU. A thread waits for that process."""

    def __init__(self, request: ExpectationRequest) -> None:
        self.request = request
        self._stopped = threading.Event()
        self._made: Future[ExpectedPeaks] = Future()
        self._thread = threading.Thread(target=self._make, name="estimate", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            self._made.set_result(expect(self.request, self._stopped.is_set, timeout_seconds=_TIMEOUT_SECONDS))
        except BaseException as error:  # noqa: BLE001 - raised where the estimate is asked for
            self._made.set_exception(error)

    def wait(self, seconds: float, should_stop: Callable[[], bool]) -> bool:
        """Wait for the end of the estimate; return whether it came in time.

        Raises:
            ProbeCancelledError: when ``should_stop`` returned true; the estimate's process is gone by then.
        """
        deadline = time.monotonic() + seconds
        while not wait((self._made,), min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))).done:
            if should_stop():
                self.stop()
                raise ProbeCancelledError("the estimate was stopped")
            if time.monotonic() >= deadline:
                return False
        return True

    def peaks(self) -> ExpectedPeaks | None:
        """Return the estimate; None before its end, and if it failed."""
        return self._made.result() if self._made.done() and self._made.exception() is None else None

    def result(self) -> ExpectedPeaks:
        """Wait for the estimate, and return it.

        Raises:
            EstimateError: when it failed; for a wrong spec too, which the check of the spec reports by its fields.
        """
        if (error := self._made.exception()) is not None:
            raise EstimateError(" ".join(str(error).split())) from error
        return self._made.result()

    def stop(self) -> None:
        """End the estimate's process, and wait until it is gone. Idempotent."""
        self._stopped.set()
        self._thread.join()
