"""When a call is tried again, and when no more. Pure: the caller reads the clock and sleeps."""

from __future__ import annotations

import random
from dataclasses import dataclass

from service.client.errors import ClientError


@dataclass(frozen=True)
class Retries:
    """How calls are tried again that may be: after lost connections, timeouts, 429 and 503."""

    budget_seconds: float = 60.0
    """How long, from its first failure, a call is tried again; 0 for never. A `Retry-After` beyond it ends the call."""
    first_pause_seconds: float = 0.5
    """The pause before the second try; it doubles from try to try, less up to a half by chance."""
    longest_pause_seconds: float = 10.0
    """No pause is longer, unless the service asks for it."""


class Patience:
    """What is left of the budget of one call, or of one stream.

    Args:
        retries: the budget and the pauses.
        until: the time after which there are no more tries in any case.
    """

    def __init__(self, retries: Retries, until: float | None = None) -> None:
        self._retries = retries
        self._until = until
        self._ends: float | None = None
        self._failures = 0

    @property
    def failures(self) -> int:
        """Tries that failed, and were followed by another."""
        return self._failures

    def heard(self) -> None:
        """The service is there: the budget is whole again. Pauses stay as long as they have become."""
        self._ends = None

    def reset(self) -> None:
        """All is well: the next failure is the first."""
        self._ends, self._failures = None, 0

    def pause_after(self, error: ClientError, now: float) -> float | None:
        """Seconds to wait before the next try; none when there is to be none."""
        if not error.may_pass:
            return None
        if self._ends is None:
            ends = now + self._retries.budget_seconds
            self._ends = ends if self._until is None else min(ends, self._until)
        asked = error.retry_after_seconds
        pause = self._backoff() if asked is None else max(asked, self._backoff())
        self._failures += 1
        return pause if now + pause < self._ends else None

    def _backoff(self) -> float:
        doubled = self._retries.first_pause_seconds * 2.0 ** min(self._failures, 30)
        return min(doubled, self._retries.longest_pause_seconds) * random.uniform(0.5, 1.0)
