"""The thread of one device's worker: it claims work, runs one piece after another, and pauses while none waits."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from batchwright.system.host_failures import host_failure_of
from batchwright_service.domain import lease_waits
from batchwright_service.errors import ClaimsCrowdedError, StoreUnavailableError
from batchwright_service.observability.logging import log_context, rate_limited_logger
from batchwright_service.worker.attempts import AttemptRunner
from batchwright_service.worker.host_health import HostHealth
from batchwright_service.worker.lease import WorkClaimer

_log = logging.getLogger(__name__)

_ERROR_PAUSE_SECONDS = 1.0
_RECHECK_SECONDS = 0.3
"""Pause after which an idle worker looks once more for work that was queued while it began to wait."""
_TICK_SECONDS = 5.0
"""Longest pause between two looks at the host's health, which use no database."""


class IdlePause:
    """Pauses of ``poll_seconds``, or until a notification where ``await_work`` requests one.

    Args:
        poll_seconds: pause without notifications.
        await_work: requests a notification of the next work; None where there are none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        poll_seconds: float,
        await_work: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.poll_seconds = poll_seconds
        self._await_work = await_work
        self._clock = clock
        self._until = 0.0
        self._is_recheck = False

    @property
    def seconds(self) -> float:
        """Seconds to the end of the pause, or to the next look at the health of the host."""
        return self.poll_seconds if self._await_work is None else min(_TICK_SECONDS, max(0.0, self._left))

    @property
    def is_over(self) -> bool:
        """Return whether to look for work now."""
        return self._await_work is None or self._left <= 0.0

    def begin(self) -> None:
        """Begin a pause, after a claim that found nothing.

        Raises:
            StoreUnavailableError: when no notification can be requested.
        """
        if self._await_work is None:
            return
        if self._is_recheck:
            self._is_recheck, seconds = False, lease_waits.NOTIFICATION_SECONDS
        else:
            # Work that was queued after the claim and before this request has notified no one: look once more, soon.
            self._await_work()
            self._is_recheck, seconds = True, _RECHECK_SECONDS
        self._until = self._clock() + seconds * random.uniform(0.75, 1.25)

    def end(self) -> None:
        """End the pause: work is looked for now, and a later pause begins with a request."""
        self._until, self._is_recheck = 0.0, False

    @property
    def _left(self) -> float:
        return self._until - self._clock()


class WorkLoop:
    """Claim and run one piece of work per step, in a thread, until it is stopped.

    Args:
        claimer: claims work for the device.
        runner: runs what is claimed.
        health: the health of the host, which decides whether work is claimed.
        pause: the pauses between claims that find nothing; ``wake`` cuts them short.
        once: end after one step, whether it finds work or not.
    """

    def __init__(
        self, claimer: WorkClaimer, runner: AttemptRunner, health: HostHealth, pause: IdlePause, *, once: bool = False
    ) -> None:
        self._claimer = claimer
        self._runner = runner
        self._health = health
        self._pause = pause
        self._once = once
        self.is_idle = False
        """True if the worker waits for work, and would take some."""
        self._stopping = threading.Event()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=f"worker-{claimer.served.device.id}")
        self._warnings = rate_limited_logger(_log)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def was_started(self) -> bool:
        """Return whether the thread was started, also when it has ended since."""
        return self._thread.ident is not None

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Look for work now."""
        self._due.set()

    def request_stop(self) -> None:
        """Take no further step. Returns at once."""
        self._stopping.set()
        self._due.set()

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _repeat(self) -> None:
        with log_context(device=self._claimer.served.device.id):
            while not self._stopping.is_set():
                if self._due.is_set():
                    self._due.clear()
                    self._pause.end()
                seconds = self._step()
                if self._once:
                    return
                if seconds > 0.0:
                    self._due.wait(seconds)

    def _step(self) -> float:
        """Take one step without raising, and return the seconds until the next one."""
        slot = self._claimer.served.slot
        self.is_idle = False
        try:
            return self._run_next()
        except ClaimsCrowdedError:  # the database works, and hands out other work
            seconds = 0.0
        except StoreUnavailableError as error:
            self._warnings.warning("%s: %s", slot, error)
            seconds = self._pause.poll_seconds
        except Exception as error:  # noqa: BLE001 - a worker outlives any failure of one piece of work
            if (trouble := host_failure_of(error)) is not None:
                self._health.report_trouble(trouble)
            else:
                _log.exception("%s: the worker continues after an unexpected error", slot)
                self._stopping.wait(_ERROR_PAUSE_SECONDS)
            seconds = self._pause.poll_seconds
        self._pause.end()
        return seconds

    def _run_next(self) -> float:
        """Claim and run one piece of work, unless none waits or the host is not healthy."""
        if not self._health.is_ready():
            self._pause.end()
            return self._pause.poll_seconds
        self._runner.hand_back_pending()
        if self._pause.is_over:
            with self._claimer.next() as claimed:
                if claimed is not None:
                    self._pause.end()
                    self._runner.run(*claimed)
                    return 0.0
            self._pause.begin()
        self.is_idle = True
        return self._pause.seconds
