"""The pauses of a worker between claims that find no work."""

import random
import time
from collections.abc import Callable

from batchwright_service.domain import lease_waits

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
