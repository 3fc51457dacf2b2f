"""Attempts at claimed work on one device: driven to an ending that is recorded, or handed back."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from service.domain.states import State
from service.errors import ConflictError, NotFoundError, StaleLeaseError, StoreUnavailableError
from service.observability.instruments import Instruments
from service.observability.logging import log_context
from service.observability.tracing import Attribute, SpanKind
from service.problem_mapping import stored_problem
from service.store.interface import LeaseStore, WorkStore
from service.store.models import Claim, Ending, Lease
from service.worker.lease import LeaseHolder, Stop
from service.worker.runner import Driver, Site, StoppedError
from tuner.errors import HostFailureError
from tuner.system.host_failures import HostFailure, host_failure_of

_log = logging.getLogger(__name__)

_MOST_TROUBLES = 5
"""Troubles in a row of one piece of work on a host that was found well after each: one more is the work's own."""


class Attempts:
    """Run claimed work, one piece at a time, on the worker's thread.

    Args:
        leases: of the work; they end with it.
        work: tells whether work still waits.
        driver: drives claimed work.
        site: the device, and the health of its host.
        instruments: metrics and spans.
    """

    def __init__(
        self, leases: LeaseStore, work: WorkStore, driver: Driver, site: Site, instruments: Instruments
    ) -> None:
        self._leases = leases
        self._work = work
        self._driver = driver
        self._slot = site.served.slot
        self._device = site.served.device.id
        self._health = site.health
        self._watch = instruments
        self._troubled = ("", 0)
        """The work that met trouble last on a host that is well, and how often in a row."""
        self._unreturned: Lease | None = None
        """A lease that ended while the store could not be reached: nobody vanished."""

    def return_late(self) -> None:
        """Hand back the work that could not be handed back in time, unless another worker has it.

        Raises:
            StoreUnavailableError: when the store still cannot be reached.
        """
        if self._unreturned is None:
            return
        try:
            self._leases.hand_back(self._unreturned)
        except StaleLeaseError as error:
            _log.info("%s: %s", self._slot, error)
        self._unreturned = None

    def _keep_lost(self, holder: LeaseHolder) -> None:
        self._unreturned = holder.lease if holder.is_unanswered else None

    def run(self, claim: Claim, holder: LeaseHolder) -> None:
        """Run claimed work, within its context of the log, the metrics and the trace."""
        item, device = claim.item, self._device
        attributes: dict[str, Attribute] = {
            f"{item.kind}_id": item.id,
            "device": device,
            "attempt": claim.lease.token,
        }
        with (
            self._watch.metrics.device_busy(device),
            self._watch.spans.span(item.kind.value, SpanKind.CONSUMER, item.trace_parent, **attributes) as span,
            log_context(**{f"{item.kind}_id": item.id}),
        ):
            _log.info("%s: %s, attempt %d", self._slot, item.id, claim.lease.token)
            try:
                span.set("outcome", self._run(claim, holder))
            except StaleLeaseError as error:
                span.set("outcome", Stop.LOST.name)
                _log.warning("%s: %s", self._slot, error)
                self._keep_lost(holder)

    def _run(self, claim: Claim, holder: LeaseHolder) -> str:
        """Drive claimed work, record how it ended, and return that in a word.

        Raises:
            StaleLeaseError: when another owner has it by now.
        """
        if claim.item.state is State.CANCELLING:
            ending = Ending(State.CANCELLED)
        else:
            try:
                ending = self._driver.drive(claim, holder)
            except (StoppedError, ConflictError, StoreUnavailableError) as error:
                return self._end_stopped(claim, holder, error)
            except StaleLeaseError:
                raise
            except Exception as error:  # noqa: BLE001 - the work ends as FAILED, the worker goes on
                if (trouble := host_failure_of(error) or self._health.examine()) is not None:
                    return self._end_troubled(claim, holder, trouble)
                _log.exception("%s: %s failed for a reason we did not foresee", self._slot, holder.lease.work_id)
                ending = Ending(State.FAILED, problem=stored_problem(error))
        self._health.succeeded()
        return self._finish(claim, holder, ending)

    def _end_troubled(self, claim: Claim, holder: LeaseHolder, trouble: HostFailure) -> str:
        """Hand back work that trouble of the host has ended, and take no more before that is over.

        Work that meets trouble again and again, on a host that is found well each time, is the trouble's cause.
        """
        work_id = holder.lease.work_id
        error = HostFailureError(trouble.cause, f"{self._slot}: {trouble.message}", trouble.needed_bytes)
        before, count = self._troubled
        well = self._health.examine() is None
        self._troubled = (work_id, (count if before == work_id else 0) + int(well))
        if holder.reason() is None and self._troubled[1] > _MOST_TROUBLES:
            return self._finish(claim, holder, Ending(State.FAILED, problem=stored_problem(error)))
        self._health.suspect(trouble, lambda: self._waits(work_id))
        return self._end_stopped(claim, holder, error)

    def _waits(self, work_id: str) -> bool:
        """Return whether work is queued still: where it runs elsewhere, it needs no room on this host."""
        try:
            return self._work.get(work_id).state is State.QUEUED
        except (NotFoundError, StoreUnavailableError):
            return False

    def _finish(self, claim: Claim, holder: LeaseHolder, ending: Ending) -> str:
        holder.retry(lambda: self._leases.finish(holder.lease, ending))
        began = claim.item.started_at or datetime.now(UTC)
        seconds = max(0.0, (datetime.now(UTC) - began).total_seconds())
        self._watch.metrics.observe_work(claim.item.kind, ending.state, seconds)
        _log.info("%s: %s %s", self._slot, holder.lease.work_id, ending.state)
        return ending.state.value

    def _end_stopped(self, claim: Claim, holder: LeaseHolder, error: Exception) -> str:
        """End cancelled work; queue otherwise interrupted work again, unless another worker has it."""
        reason = holder.reason()
        _log.info("%s: %s stopped: %s", self._slot, holder.lease.work_id, reason.name if reason else error)
        if reason is Stop.CANCELLED:
            return self._finish(claim, holder, Ending(State.CANCELLED))
        if reason is Stop.LOST:
            self._keep_lost(holder)
        else:
            holder.retry(lambda: self._leases.hand_back(holder.lease))
        return reason.name if reason else "INTERRUPTED"
