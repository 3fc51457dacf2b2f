"""The retry budget of a call. Pure: the caller reads the clock and sleeps."""

from __future__ import annotations

import random

from batchwright.client.errors import ClientError

_FIRST_PAUSE_SECONDS = 0.5
"""Pause before the second try. The pause doubles from try to try, less a random part of up to a half."""
_LONGEST_PAUSE_SECONDS = 10.0
"""Longest pause, unless the service asks for a longer one."""


class RetryBudget:
    """The remaining retry budget of one call or stream: lost connections, timeouts, 429, 502, 503 and 504 are retried.

    Args:
        seconds: how long a call is retried, from its first failure; 0 for never. A `Retry-After` beyond ends the call.
        until: the time after which there are no more tries in any case.

    Attributes:
        failures: failed tries since the last reset.
    """

    def __init__(self, seconds: float, until: float | None = None) -> None:
        self._seconds = seconds
        self._until = until
        self._deadline: float | None = None
        self.failures = 0

    def record_contact(self) -> None:
        """Restore the whole budget, because the service responded. The pauses keep their length."""
        self._deadline = None

    def reset(self) -> None:
        """Restore the whole budget and the first pause."""
        self._deadline, self.failures = None, 0

    def pause_after(self, error: ClientError, now: float) -> float | None:
        """Return the seconds to wait before the next try, or None if the call must not be retried."""
        if not error.is_transient:
            return None
        if self._deadline is None:
            deadline = now + self._seconds
            self._deadline = deadline if self._until is None else min(deadline, self._until)
        doubled = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self.failures, 30), _LONGEST_PAUSE_SECONDS)
        pause = max(error.retry_after_seconds or 0.0, doubled * random.uniform(0.5, 1.0))
        self.failures += 1
        return pause if now + pause < self._deadline else None
