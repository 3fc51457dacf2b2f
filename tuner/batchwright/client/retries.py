"""Retry policy and retry budget of a call. Pure: the caller reads the clock and sleeps."""

from __future__ import annotations

import random
from dataclasses import dataclass

from batchwright.client.errors import ClientError


@dataclass(frozen=True)
class RetryPolicy:
    """Retries of repeatable calls after lost connections, timeouts, 429, 502, 503 and 504."""

    budget_seconds: float = 60.0
    """Seconds in which a call is retried, from its first failure; 0 for never. A `Retry-After` beyond ends the call."""
    first_pause_seconds: float = 0.5
    """Pause before the second try. The pause doubles from try to try, less a random part of up to a half."""
    longest_pause_seconds: float = 10.0
    """Longest pause, unless the service asks for a longer one."""


class RetryBudget:
    """The remaining retry budget of one call or stream.

    Args:
        policy: the budget and the pauses.
        until: the time after which there are no more tries in any case.
    """

    def __init__(self, policy: RetryPolicy, until: float | None = None) -> None:
        self._policy = policy
        self._until = until
        self._deadline: float | None = None
        self._failures = 0

    @property
    def failures(self) -> int:
        """Number of failed tries since the last reset."""
        return self._failures

    def record_contact(self) -> None:
        """Restore the whole budget, because the service responded. The pauses keep their length."""
        self._deadline = None

    def reset(self) -> None:
        """Restore the whole budget and the first pause."""
        self._deadline, self._failures = None, 0

    def pause_after(self, error: ClientError, now: float) -> float | None:
        """Return the seconds to wait before the next try, or None if the call must not be retried."""
        if not error.is_transient:
            return None
        if self._deadline is None:
            deadline = now + self._policy.budget_seconds
            self._deadline = deadline if self._until is None else min(deadline, self._until)
        requested = error.retry_after_seconds
        pause = self._backoff() if requested is None else max(requested, self._backoff())
        self._failures += 1
        return pause if now + pause < self._deadline else None

    def _backoff(self) -> float:
        doubled = self._policy.first_pause_seconds * 2.0 ** min(self._failures, 30)
        return min(doubled, self._policy.longest_pause_seconds) * random.uniform(0.5, 1.0)
