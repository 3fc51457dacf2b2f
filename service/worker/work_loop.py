"""The loop of one worker: it claims work while its host is well, and has it run."""

from __future__ import annotations

import logging
import threading

from service.domain.workers import ServedDevice
from service.errors import StoreUnavailableError
from service.observability.logging import logging_about, sparse_logger
from service.worker.attempts import Attempts
from service.worker.claiming import Claims
from service.worker.host_health import Health
from tuner.system.host_failures import trouble_of

_log = logging.getLogger(__name__)

_ERROR_PAUSE_SECONDS = 1.0


class WorkLoop:
    """A thread that runs claimed work until it is stopped.

    Args:
        served: the device.
        claims: gives the work.
        attempts: runs it.
        health: of the host.
        poll_seconds: how long to wait for work.
    """

    def __init__(
        self, served: ServedDevice, claims: Claims, attempts: Attempts, health: Health, poll_seconds: float
    ) -> None:
        self._served = served
        self._claims = claims
        self._attempts = attempts
        self._health = health
        self._poll_seconds = poll_seconds
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._warnings = sparse_logger(_log)
        self._thread = threading.Thread(target=self._work, name=f"worker-{served.device.id}")

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def was_started(self) -> bool:
        """Return whether the thread was started."""
        return self._thread.ident is not None

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Look for work now."""
        self._wake.set()

    def request_stop(self) -> None:
        """Claim no more. Returns at once."""
        self._stopping.set()
        self._wake.set()

    def join(self) -> None:
        """Wait until nothing runs."""
        self._thread.join()

    def _work(self) -> None:
        with logging_about(device=self._served.device.id):
            while not self._stopping.is_set():
                if not self._run_safely():
                    self._wake.wait(self._poll_seconds)
                self._wake.clear()

    def _run_safely(self) -> bool:
        """Run one piece of work; false when there was none to run, or something went wrong."""
        try:
            return self._run_next()
        except StoreUnavailableError as error:
            self._warnings.warning("%s: %s", self._served.place, error)
        except Exception as error:  # noqa: BLE001 - a worker outlives whatever one piece of work does
            if (trouble := trouble_of(error)) is not None:
                self._health.suspect(trouble)
            else:
                _log.exception("%s: the worker goes on after an error of its own", self._served.place)
                self._stopping.wait(_ERROR_PAUSE_SECONDS)
        return False

    def _run_next(self) -> bool:
        """Claim and run one piece of work; false when there is none, or the host is in trouble."""
        if not self._health.may_work():
            return False
        self._attempts.return_late()
        with self._claims.next() as claimed:
            if claimed is None:
                return False
            self._attempts.run(*claimed)
        return True
