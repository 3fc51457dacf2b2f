"""Health of a device's host: whether its worker may take work, and why not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from service.observability.logging import rate_limited_logger
from tuner.system.host_failures import HostFailure

_log = logging.getLogger(__name__)

_EVERY_SECONDS = 15.0
"""The longest age of a good check: a disk that fills is noticed on an idle host too."""
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 15.0
"""Bounds of the time between a trouble and the next check, doubled each time: soon over, soon at work again."""
Check = Callable[[int], HostFailure | None]
"""Looks at the host, given the bytes that must be free on its disk."""


class Watcher(Protocol):
    """A callback for changes of health."""

    def __call__(self, cause: str | None) -> None:
        """Take the stable word of a trouble, or none when all is well."""


class Health:
    """The health of one device's host: checked now and then, and after every trouble before more work is taken.

    The worker's thread checks; any thread may read ``unready``.

    Args:
        name: what the log calls the device.
        check: looks at the host.
        watcher: called at every trouble, and at its end.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        check: Check,
        watcher: Watcher = lambda cause: None,  # noqa: ARG005 - the default does nothing
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._check = check
        self._watcher = watcher
        self._clock = clock
        self._lock = threading.Lock()
        self._trouble: HostFailure | None = None
        self._needed_by: Callable[[], bool] = lambda: False
        self._row = 0
        """Troubles since work last went well."""
        self._due = 0.0
        self._warnings = rate_limited_logger(_log, clock)

    @property
    def unready(self) -> str | None:
        """The reason why the device takes no work now; none when it does."""
        trouble = self._trouble
        return None if trouble is None else f"{trouble.cause}: {trouble.message}"

    def may_work(self) -> bool:
        """Look at the host where that is due; true when work may be taken now."""
        if self._clock() >= self._due:
            self._judge(self.examine())
        return self._trouble is None

    def examine(self) -> HostFailure | None:
        """Look at the host now, and change nothing."""
        return self._check(self._needed())

    def suspect(self, trouble: HostFailure, waits: Callable[[], bool] = lambda: False) -> None:
        """Take no work before the host was found well.

        Args:
            trouble: what has shown that something is wrong.
            waits: returns whether there still is work that needs the trouble's ``needed_bytes`` of room.
        """
        self._needed_by = waits
        self._judge(trouble)

    def succeeded(self) -> None:
        """Work went well: the next trouble is a first one again."""
        self._row = 0

    def _needed(self) -> int:
        needed = self._trouble.needed_bytes if self._trouble is not None else 0
        return needed if needed and self._needed_by() else 0

    def _judge(self, trouble: HostFailure | None) -> None:
        with self._lock:
            before, self._trouble = self._trouble, self._kept(trouble)
            if trouble is None:
                self._due = self._clock() + _EVERY_SECONDS
            else:
                self._due = self._clock() + min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(self._row, 16))
                self._row += 1
        self._report(before, trouble)

    def _kept(self, trouble: HostFailure | None) -> HostFailure | None:
        """The new trouble, with the room that is still needed of the one before."""
        before = self._trouble
        if trouble is None or before is None or trouble.needed_bytes or trouble.cause is not before.cause:
            return trouble
        return HostFailure(trouble.cause, trouble.message, before.needed_bytes)

    def _report(self, before: HostFailure | None, now: HostFailure | None) -> None:
        if now is not None:
            self._warnings.warning("%s takes no work: %s: %s", self._name, now.cause, now.message)
        elif before is not None:
            _log.warning("%s takes work again: %s is over", self._name, before.cause)
        if now is not None or before is not None:
            self._watcher(None if now is None else now.cause.value)
