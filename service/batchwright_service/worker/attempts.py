"""Attempts at claimed work on one device: run to a recorded ending, or handed back."""

import logging
from datetime import UTC, datetime

from batchwright.client.documents.states import State
from batchwright.errors import HostFailureError
from batchwright.system.host_failures import Cause, HostFailure, host_failure_of
from batchwright_service.errors import ConflictError, NotFoundError, StaleLeaseError, StoreUnavailableError
from batchwright_service.observability.instruments import Instruments
from batchwright_service.observability.logging import log_context
from batchwright_service.observability.tracing import Attribute, SpanKind
from batchwright_service.problem_mapping import stored_problem
from batchwright_service.store.models import Claim, Ending, Lease
from batchwright_service.store.store import Store
from batchwright_service.worker.lease import LeaseHolder, StopReason
from batchwright_service.worker.runner import DeviceContext, WorkRunner, WorkStoppedError

_log = logging.getLogger(__name__)

_MAX_HOST_FAILURES = 5
"""Consecutive host failures of one piece of work, on a host that is healthy after each, before the work fails."""
_MAX_HUB_FAILURES = 40
"""Attempts while a model hub does not answer: about ten minutes, with the pauses of ``host_health``."""


class AttemptRunner:
    """Run claimed work, one piece at a time, on the worker's thread."""

    def __init__(self, store: Store, runner: WorkRunner, context: DeviceContext, instruments: Instruments) -> None:
        self._store = store
        self._runner = runner
        self._slot = context.served.slot
        self._device = context.served.device.id
        self._health = context.health
        self._instruments = instruments
        self._host_failures = ("", 0)
        """The work of the last host failure, and the consecutive failures after which the host was healthy."""
        self._pending_hand_back: Lease | None = None
        """The lease of work that could not be handed back, since the store could not be reached."""

    def hand_back_pending(self) -> None:
        """Hand back the work that could not be handed back in time, unless another worker has claimed it.

        Raises:
            StoreUnavailableError: when the store still cannot be reached.
        """
        if self._pending_hand_back is None:
            return
        try:
            self._store.leases.hand_back(self._pending_hand_back)
        except StaleLeaseError as error:
            _log.info("%s: %s", self._slot, error)
        self._pending_hand_back = None

    def _retain_lost(self, holder: LeaseHolder) -> None:
        self._pending_hand_back = holder.lease if holder.is_store_unreachable else None

    def run(self, claim: Claim, holder: LeaseHolder) -> None:
        """Run claimed work, with its log fields, metrics and trace span."""
        item, device = claim.item, self._device
        attributes: dict[str, Attribute] = {
            f"{item.kind}_id": item.id,
            "device": device,
            "attempt": claim.lease.token,
        }
        with (
            self._instruments.metrics.device_busy(device),
            self._instruments.spans.span(item.kind.value, SpanKind.CONSUMER, item.trace_parent, **attributes) as span,
            log_context(**{f"{item.kind}_id": item.id}),
        ):
            _log.info("%s: %s, attempt %d", self._slot, item.id, claim.lease.token)
            if claim.taken_over:
                self._instruments.metrics.takeovers.labels(device).inc()
            try:
                span.set("outcome", self._run(claim, holder))
            except StaleLeaseError as error:
                span.set("outcome", StopReason.LOST.name)
                _log.warning("%s: %s", self._slot, error)
                self._retain_lost(holder)

    def _run(self, claim: Claim, holder: LeaseHolder) -> str:
        """Run claimed work, record its ending, and return the outcome in a word.

        Raises:
            StaleLeaseError: when another owner has claimed the work.
        """
        if claim.item.state is State.CANCELLING:
            ending = Ending(State.CANCELLED)
        else:
            try:
                ending = self._runner.run(claim, holder)
            except (WorkStoppedError, ConflictError, StoreUnavailableError) as error:
                return self._end_stopped(claim, holder, error)
            except StaleLeaseError:
                raise
            except Exception as error:  # noqa: BLE001 - the work ends as FAILED, the worker continues
                if (trouble := host_failure_of(error) or self._health.examine()) is not None:
                    return self._end_after_host_failure(claim, holder, trouble)
                _log.exception("%s: %s failed with an unexpected error", self._slot, holder.lease.work_id)
                ending = Ending(State.FAILED, problem=stored_problem(error))
        self._health.succeeded()
        return self._finish(claim, holder, ending)

    def _end_after_host_failure(self, claim: Claim, holder: LeaseHolder, trouble: HostFailure) -> str:
        """Hand back work that a failure of the host has ended, and suspend claims until the host is healthy.

        Work that fails repeatedly in this way, on a host that is healthy after each failure, is the cause itself.
        """
        work_id = holder.lease.work_id
        error = HostFailureError(trouble.cause, f"{self._slot}: {trouble.message}", trouble.needed_bytes)
        before, count = self._host_failures
        is_healthy = self._health.examine() is None
        self._host_failures = (work_id, (count if before == work_id else 0) + int(is_healthy))
        most = _MAX_HUB_FAILURES if trouble.cause is Cause.HUB else _MAX_HOST_FAILURES
        if holder.reason() is None and self._host_failures[1] > most:
            return self._finish(claim, holder, Ending(State.FAILED, problem=stored_problem(error)))
        self._health.report_trouble(trouble, lambda: self._is_queued(work_id))
        return self._end_stopped(claim, holder, error)

    def _is_queued(self, work_id: str) -> bool:
        """Return whether work is still queued: work that runs elsewhere needs no space on this host."""
        try:
            return self._store.work.get(work_id).state is State.QUEUED
        except (NotFoundError, StoreUnavailableError):
            return False

    def _finish(self, claim: Claim, holder: LeaseHolder, ending: Ending) -> str:
        holder.retry(lambda: self._store.leases.finish(holder.lease, ending))
        began = claim.item.started_at or datetime.now(UTC)
        seconds = max(0.0, (datetime.now(UTC) - began).total_seconds())
        duration = self._instruments.metrics.work[claim.item.kind].labels(ending.state.value, ending.outcome)
        duration.observe(seconds)
        if ending.problem is not None:
            self._instruments.metrics.failures.labels(claim.item.kind.value, ending.problem.code).inc()
        _log.info("%s: %s %s", self._slot, holder.lease.work_id, ending.outcome.name)
        return ending.outcome.name

    def _end_stopped(self, claim: Claim, holder: LeaseHolder, error: Exception) -> str:
        """End cancelled work; hand other interrupted work back, unless another worker has claimed it."""
        reason = holder.reason()
        _log.info("%s: %s stopped: %s", self._slot, holder.lease.work_id, reason.name if reason else error)
        if reason is StopReason.CANCELLED:
            return self._finish(claim, holder, Ending(State.CANCELLED))
        if reason is StopReason.LOST:
            self._retain_lost(holder)
        else:
            holder.retry(lambda: self._store.leases.hand_back(holder.lease))
        return reason.name if reason else "INTERRUPTED"
