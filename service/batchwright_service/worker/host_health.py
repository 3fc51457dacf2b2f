"""Health of a device's host, which decides on claims of its worker."""

import logging
import threading
import time
from collections.abc import Callable

from batchwright.system.host_failures import HostFailure
from batchwright_service.observability.logging import rate_limited_logger

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 15.0
"""Interval of checks while the host is healthy; a disk that fills is noticed on an idle host too."""
_FIRST_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 15.0
"""Bounds of the time between a trouble and the next check, which doubles with each consecutive trouble."""
Check = Callable[[int], HostFailure | None]
"""Checks the host, given the bytes that must be free on its disk."""


class HostHealth:
    """The health of one device's host, checked at intervals, and after each trouble before more work is taken.

    The worker's thread checks; any thread may read ``unready``.

    Args:
        name: the name of the device in the log.
        check: checks the host.
        listener: called at each trouble with its code, and at its end with None.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        check: Check,
        listener: Callable[[str | None], None] = lambda _cause: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._check = check
        self._listener = listener
        self._clock = clock
        self._lock = threading.Lock()
        self._trouble: HostFailure | None = None
        self._is_space_needed: Callable[[], bool] = lambda: False
        self._consecutive = 0
        """Troubles since work last succeeded."""
        self._due = 0.0
        self._warnings = rate_limited_logger(_log, clock)

    @property
    def unready(self) -> str | None:
        """The reason why the device takes no work now, or None when it takes work."""
        trouble = self._trouble
        return None if trouble is None else f"{trouble.cause}: {trouble.message}"

    def is_ready(self) -> bool:
        """Check the host if that is due, and return whether work may be taken now."""
        if self._clock() >= self._due:
            self._update(self.examine())
        return self._trouble is None

    def examine(self) -> HostFailure | None:
        """Check the host now, without changing the state."""
        needed = self._trouble.needed_bytes if self._trouble is not None else 0
        return self._check(needed if needed and self._is_space_needed() else 0)

    def report_trouble(self, trouble: HostFailure, is_space_needed: Callable[[], bool] = lambda: False) -> None:
        """Suspend work until a check finds the host healthy.

        Args:
            trouble: the observed trouble.
            is_space_needed: returns whether work still needs the trouble's ``needed_bytes`` of disk space.
        """
        self._is_space_needed = is_space_needed
        self._update(trouble)

    def succeeded(self) -> None:
        """Record that work succeeded: the next trouble counts as the first one."""
        self._consecutive = 0

    def _update(self, trouble: HostFailure | None) -> None:
        with self._lock:
            before, self._trouble = self._trouble, trouble
            if trouble and before and trouble.cause is before.cause and not trouble.needed_bytes:
                self._trouble = HostFailure(trouble.cause, trouble.message, before.needed_bytes)
            if trouble is None:
                self._due = self._clock() + _CHECK_SECONDS
            else:
                self._due = self._clock() + min(
                    _MAX_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(self._consecutive, 16)
                )
                self._consecutive += 1
        self._report(before, trouble)

    def _report(self, before: HostFailure | None, now: HostFailure | None) -> None:
        if now is not None:
            self._warnings.warning("%s takes no work: %s: %s", self._name, now.cause, now.message)
        elif before is not None:
            _log.warning("%s takes work again: %s is over", self._name, before.cause)
        if now is not None or before is not None:
            self._listener(None if now is None else now.cause.value)
