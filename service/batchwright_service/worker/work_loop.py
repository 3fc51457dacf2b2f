"""The loop of one worker, which claims and runs work while its host is healthy."""

from __future__ import annotations

import logging

from typing_extensions import override

from batchwright.system.host_failures import host_failure_of
from batchwright_service.errors import ClaimsCrowdedError, StoreUnavailableError
from batchwright_service.observability.logging import rate_limited_logger
from batchwright_service.worker.attempts import AttemptRunner
from batchwright_service.worker.claiming import WorkClaimer
from batchwright_service.worker.device_thread import DeviceThread
from batchwright_service.worker.host_health import Health
from batchwright_service.worker.idle_pause import IdlePause

_log = logging.getLogger(__name__)

_ERROR_PAUSE_SECONDS = 1.0


class WorkLoop(DeviceThread):
    """Run claimed work, one piece per step; an idle worker pauses."""

    def __init__(self, claimer: WorkClaimer, runner: AttemptRunner, health: Health, pause: IdlePause) -> None:
        super().__init__("worker", claimer.served, pause.poll_seconds)
        self._claimer = claimer
        self._runner = runner
        self._health = health
        self._pause = pause
        self._is_idle = False
        self._warnings = rate_limited_logger(_log)

    @property
    def is_idle(self) -> bool:
        """Return whether the worker waits for work, and would take some."""
        return self._is_idle

    @override
    def _step(self) -> bool:
        self._is_idle, self._pause_seconds = False, self._pause.poll_seconds
        if self._was_woken:
            self._pause.end()
        try:
            if self._run_next():
                return True
        except ClaimsCrowdedError:  # the database works, and hands out other work
            self._pause.end()
            return True
        except StoreUnavailableError as error:
            self._warnings.warning("%s: %s", self._slot, error)
        except Exception as error:  # noqa: BLE001 - a worker outlives any failure of one piece of work
            if (trouble := host_failure_of(error)) is not None:
                self._health.report_trouble(trouble)
            else:
                _log.exception("%s: the worker continues after an unexpected error", self._slot)
                self._stopping.wait(_ERROR_PAUSE_SECONDS)
        else:
            return False
        self._pause.end()
        return False

    def _run_next(self) -> bool:
        """Claim and run one piece of work; false when no work waits, or the host is not healthy."""
        if not self._health.is_ready():
            self._pause.end()
            return False
        self._runner.hand_back_pending()
        if self._pause.is_over:
            with self._claimer.next() as claimed:
                if claimed is not None:
                    self._pause.end()
                    self._runner.run(*claimed)
                    return True
            self._pause.begin()
        self._is_idle, self._pause_seconds = True, self._pause.seconds
        return False


class SingleRun(WorkLoop):
    """Run one piece of work, if it can be claimed, and end."""

    @override
    def _step(self) -> bool:
        try:
            return super()._step()
        finally:
            self.request_stop()
