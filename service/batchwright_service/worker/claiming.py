"""Claims of work for one device, and the lease in use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from batchwright.client.documents.workers import ServedDevice
from batchwright_service.store.leases import LeaseStore
from batchwright_service.store.models import Claim
from batchwright_service.worker.lease import LeaseHolder, LeaseTerms, StopReason
from batchwright_service.worker.settings import Assignment


class WorkClaimer:
    """Claim work for a device, one piece at a time. Any thread may use the lease holder, or request a stop.

    Args:
        leases: where work is claimed.
        served: the device.
        terms: the terms of every lease.
        assignment: the only work to claim.
    """

    def __init__(
        self, leases: LeaseStore, served: ServedDevice, terms: LeaseTerms, assignment: Assignment | None = None
    ) -> None:
        self._leases = leases
        self.served = served
        self._terms = terms
        self._assignment = assignment
        self._holder: LeaseHolder | None = None
        self._stop: StopReason | None = None

    @contextmanager
    def next(self) -> Iterator[tuple[Claim, LeaseHolder] | None]:
        """Claim the next piece of work, and hold its lease within the block; None when no work waits.

        Raises:
            StoreUnavailableError: when the store cannot be reached.
        """
        claimed_at = time.monotonic()
        if self._assignment is None:
            claim = self._leases.claim(self.served, self._terms.lease_seconds)
        else:
            claim = self._leases.claim_work(self._assignment.work_id, self.served, self._terms.lease_seconds)
            beside = tuple(f"{self.served.host}/{device}" for device in self._assignment.beside)
            claim = None if claim is None else replace(claim, other_slots=beside)
        if claim is None:
            yield None
            return
        holder = self._holder = LeaseHolder(claim.lease, self._terms, claimed_at)
        try:
            if self._stop is not None:
                holder.request(self._stop)
            yield claim, holder
        finally:
            self._holder = None

    @property
    def holder(self) -> LeaseHolder | None:
        """The lease in use, or None."""
        return self._holder

    def request_stop(self, reason: StopReason) -> None:
        """Request the running work, and work that is claimed later, to stop."""
        self._stop = reason if self._stop is None else max(self._stop, reason)
        if (holder := self._holder) is not None:
            holder.request(self._stop)
