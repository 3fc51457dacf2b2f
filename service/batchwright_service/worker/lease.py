"""The lease in use: its renewal, expiry and stop requests."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from batchwright.client.documents.states import State
from batchwright_service.domain import lease_waits
from batchwright_service.errors import StaleLeaseError, StoreBrokenError, StoreUnavailableError
from batchwright_service.observability.logging import rate_limited_logger
from batchwright_service.store.models import BeatReply, Lease

_log = logging.getLogger(__name__)

_MARGIN = 0.2
"""Share of the lease reserved for killing the running work, which must have ended before another worker starts it."""
_RETRY_SECONDS = 0.2

_T = TypeVar("_T")


class StopReason(IntEnum):
    """A reason to stop the work, the most pressing last."""

    SHUTDOWN = 1
    """The service stops: hand the work back."""
    FORCED = 2
    """Forced shutdown: hand the work back without a grace period."""
    CANCELLED = 3
    """The work was cancelled: end it."""
    LOST = 4
    """The lease has ended, or cannot be renewed: kill the work and report nothing."""


@dataclass(frozen=True)
class LeaseTerms:
    """The lifetime of a lease without renewal, and the grace period of a job when the service stops."""

    lease_seconds: float
    shutdown_grace_seconds: float


class LeaseHolder:
    """A lease in use. The heartbeat renews the lease; the worker reads ``grace_seconds`` and writes with ``retry``."""

    def __init__(
        self, lease: Lease, terms: LeaseTerms, claimed_at: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lease = lease
        self._lease_seconds = terms.lease_seconds
        self._clock = clock
        self._renewed_at = claimed_at
        self._grace = {
            StopReason.SHUTDOWN: terms.shutdown_grace_seconds,
            StopReason.FORCED: 0.0,
            StopReason.CANCELLED: lease_waits.CANCEL_GRACE_SECONDS,
            StopReason.LOST: 0.0,
        }
        self._warnings = rate_limited_logger(_log)
        self.is_store_unreachable = False
        """True if the store could not be reached since the last renewal."""
        self._stops: set[StopReason] = set()  # only ever added to, and copied to be read: safe between threads

    def reason(self) -> StopReason | None:
        """Return the most pressing reason to stop, or None."""
        if self._clock() >= self._renewed_at + self._lease_seconds * (1 - _MARGIN):
            self.request(StopReason.LOST)
        return max(tuple(self._stops), default=None)

    def grace_seconds(self) -> float | None:
        """Seconds left before the run must have stopped, or None if it need not stop (the strictest reason wins)."""
        return None if self.reason() is None else min(self._grace[reason] for reason in tuple(self._stops))

    def request(self, reason: StopReason) -> None:
        """Request the work to stop."""
        self._stops.add(reason)

    def begin_renewal(self) -> Callable[[BeatReply], None]:
        """Begin a renewal, by the heartbeat, and return the function that takes its result.

        Until the result is known, the store counts as unreachable.
        """
        began, was_unreachable = self._clock(), self.is_store_unreachable
        self.is_store_unreachable = True

        def end(reply: BeatReply) -> None:
            if (state := reply.renewed.get(self.lease)) is not None:
                # From before the request was sent: the database counts from when it came, so its lease ends no earlier.
                self._renewed_at, self.is_store_unreachable = began, False
                if state is State.CANCELLING:
                    self.request(StopReason.CANCELLED)
                return
            self.is_store_unreachable = was_unreachable
            if self.lease in reply.lost:
                self.request(StopReason.LOST)

        return end

    def retry(self, call: Callable[[], _T]) -> _T:
        """Call the store until it can be reached, while the lease is valid.

        Raises:
            StaleLeaseError: when the lease ended first, or a forced shutdown leaves no time.
            StoreBrokenError: when trying again is of no use.
        """
        while True:
            try:
                return call()
            except StoreBrokenError:
                raise
            except StoreUnavailableError as error:
                self.is_store_unreachable = True
                if self.reason() is StopReason.LOST or StopReason.FORCED in self._stops:
                    raise StaleLeaseError(f"the store could not be reached before the lease ended: {error}") from error
                self._warnings.warning("cannot write to the store, trying again: %s", error)
                time.sleep(_RETRY_SECONDS)
