"""What a worker knows of its right to go on: its lease, renewed by a heartbeat, and who asked it to stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from service.domain.states import State
from service.errors import StaleLeaseError, StoreUnavailableError
from service.observability.logging import sparse_logger
from service.store.interface import LeaseStore
from service.store.models import Lease

_log = logging.getLogger(__name__)

_CANCEL_GRACE_SECONDS = 0.75
"""What a cancelled job gets to end itself: with a heartbeat before it, within the two seconds that are promised."""
_MARGIN = 0.2
"""Share of the lease kept back for killing what runs: it must be gone when another may start."""
_RETRY_SECONDS = 0.2

_T = TypeVar("_T")


class Stop(IntEnum):
    """Why a worker must stop, the most pressing last."""

    SHUTDOWN = 1
    """The service ends: hand the work back."""
    HURRY = 2
    """It was told so twice: hand the work back without waiting for anything."""
    CANCELLED = 3
    """Someone cancelled the work: end it."""
    LOST = 4
    """The lease is gone, or cannot be renewed: kill the work and say nothing."""


@dataclass(frozen=True)
class LeaseTerms:
    """How long a lease holds without a renewal, and what a job gets to end itself when the service stops."""

    lease_seconds: float
    shutdown_grace_seconds: float


class Hold:
    """A lease in use. The heartbeat calls ``renew``; the worker asks ``stop_within`` and writes through ``persist``."""

    def __init__(
        self,
        leases: LeaseStore,
        lease: Lease,
        terms: LeaseTerms,
        claimed_at: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease = lease
        self._leases = leases
        self._lease_seconds = terms.lease_seconds
        self._clock = clock
        self._renewed_at = claimed_at
        self._grace = {
            Stop.SHUTDOWN: terms.shutdown_grace_seconds,
            Stop.HURRY: 0.0,
            Stop.CANCELLED: _CANCEL_GRACE_SECONDS,
            Stop.LOST: 0.0,
        }
        self._warnings = sparse_logger(_log)
        self._unanswered = False
        self._stops: set[Stop] = set()  # only ever added to, and copied to be read: safe between threads

    @property
    def is_unanswered(self) -> bool:
        """Return whether the store could not be reached since the lease was renewed last."""
        return self._unanswered

    def reason(self) -> Stop | None:
        """Why to stop, if there is a reason: the most pressing one."""
        if self._clock() >= self._renewed_at + self._lease_seconds * (1 - _MARGIN):
            self.request(Stop.LOST)
        return max(tuple(self._stops), default=None)

    def stop_within(self) -> float | None:
        """None while the work may go on; else the seconds it has to end, from now: the least that any reason gives."""
        return None if self.reason() is None else min(self._grace[reason] for reason in tuple(self._stops))

    def request(self, reason: Stop) -> None:
        """Have the worker stop."""
        self._stops.add(reason)

    def renew(self) -> None:
        """Hold the lease longer, and learn of a cancellation. Called by the heartbeat."""
        before, was_unanswered, self._unanswered = self._clock(), self._unanswered, True
        try:
            state = self._leases.renew(self.lease, self._lease_seconds)
        except StaleLeaseError:
            self._unanswered = was_unanswered
            self.request(Stop.LOST)
        except StoreUnavailableError as error:
            self._warnings.warning("cannot renew the lease on %s: %s", self.lease.work_id, error)
        else:
            self._renewed_at, self._unanswered = before, False
            if state is State.CANCELLING:
                self.request(Stop.CANCELLED)

    def persist(self, write: Callable[[], _T]) -> _T:
        """Write to the store, or read from it, again and again while it cannot be reached and the lease is good.

        Raises:
            StaleLeaseError: when the lease ended first, or there is no time to wait for the store.
        """
        while True:
            try:
                return write()
            except StoreUnavailableError as error:
                self._unanswered = True
                if self.reason() is Stop.LOST or Stop.HURRY in self._stops:
                    raise StaleLeaseError(f"the store could not be reached before the lease ended: {error}") from error
                self._warnings.warning("cannot write to the store, trying again: %s", error)
                time.sleep(_RETRY_SECONDS)
