"""Run one claimed tuning or job to its end."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from typing_extensions import override

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import JobRequest, RecordedProbe
from batchwright.client.documents.workers import ServedDevice
from batchwright.driving.activities import activity_of
from batchwright.driving.loop import TuningHooks
from batchwright.errors import BatchwrightError, HostFailureError, ProbeCancelledError, SpecError
from batchwright.planning.learning.correction import conditions_of, corrected
from batchwright.planning.learning.measured_context import expect_measured_context
from batchwright.planning.learning.residual import residual_of
from batchwright.planning.learning.workload_family import family_of
from batchwright.planning.session import TuningSession
from batchwright.planning.steps import Step
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import ProbeRequest, TuningRequest
from batchwright.schemas.residuals import EstimateResidual
from batchwright.schemas.results import ExpectedPeaks, ProbeResult
from batchwright.schemas.training import RunOutcome, RunProgress, TrainingProgress, TrainingResult
from batchwright.system.host_failures import (
    Cause,
    DiskUsage,
    HostFailure,
    disk_usage_of,
    host_failure_of,
    is_filled_by_run,
)
from batchwright.units import counted, format_bytes
from batchwright_service.application.rules.device_checks import mark_slot, probe_environment
from batchwright_service.application.rules.equal_tunings import answer_from
from batchwright_service.application.rules.stored_warm_start import warm_start_of
from batchwright_service.domain import lease_waits
from batchwright_service.domain.hardware import HardwareNeed
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.errors import ServiceError, StaleLeaseError, StoreUnavailableError
from batchwright_service.observability.instruments import Instruments
from batchwright_service.observability.metrics import NOT_FINITE_CODE, OUT_OF_MEMORY_CODE
from batchwright_service.problem_mapping import stored_problem
from batchwright_service.store.models import Binding, Claim, Ending, WorkItem
from batchwright_service.store.store import Store
from batchwright_service.worker.executors.base import Executor, TrainingRun
from batchwright_service.worker.host_health import HostHealth
from batchwright_service.worker.lease import LeaseHolder

_log = logging.getLogger(__name__)

_MAX_LOST_LEASES = 5
"""Consecutive owners that may vanish without recording anything; with one more, the work is taken as the cause."""
_EQUAL_TUNING_PAUSE_SECONDS = 0.5
_MAX_RESIDUALS = 32
"""Newest residuals of the family, and as many of other families, by which the estimates of a tuning are corrected."""


class WorkStoppedError(Exception):
    """The work was stopped before its end; ``LeaseHolder.reason`` has the reason."""


class WorkerLostError(ServiceError):
    """Every worker that claimed this work vanished."""

    code = "worker-lost"
    title = "Its workers vanished"


class EnvironmentChangedError(ServiceError):
    """The environment of a tuning changed between its probes."""

    code = "environment-changed"
    title = "The environment changed during the tuning"


class RunFailedError(ServiceError):
    """The training run cannot go on."""

    code = "training-failed"
    title = "The training run failed"


class RunOutOfMemoryError(RunFailedError):
    """The training run cannot go on, since it ran out of memory."""

    code = OUT_OF_MEMORY_CODE
    title = "The training run ran out of memory"


class RunNotFiniteError(RunFailedError):
    """The training run cannot go on, since its loss, gradient or weights are infinite or NaN."""

    code = NOT_FINITE_CODE
    title = "The training run is no longer finite"


@dataclass(frozen=True)
class DeviceContext:
    """The context of a run: a device, the folder of its runs, and the health of its host."""

    served: ServedDevice
    runs_dir: Path
    health: HostHealth


class WorkRunner:
    """Run claimed work on one executor, and record each step."""

    def __init__(self, store: Store, executor: Executor, context: DeviceContext, instruments: Instruments) -> None:
        self._store = store
        self._executor = executor
        self._context = context
        self._served = context.served
        self._instruments = instruments
        self._identifiers = IdentifierSource()

    def run(self, claim: Claim, holder: LeaseHolder) -> Ending:
        """Run work to its end; a failure of the work is an ending too.

        Raises:
            WorkStoppedError: when a stop was requested.
            StaleLeaseError: when the lease ended before a report.
            HostFailureError: when the host could not run the work, which is no failure of the work.
            OSError: as ``HostFailureError``.
        """
        try:
            _refuse_repeated_losses(claim)
            if claim.item.kind is WorkKind.TUNING:
                return self._tune(claim, holder)
            return self._train(claim, holder)
        except ProbeCancelledError as error:
            raise WorkStoppedError from error
        except (BatchwrightError, WorkerLostError, EnvironmentChangedError) as error:
            _require_healthy(self._context.health, host_failure_of(error))
            return Ending(State.FAILED, problem=stored_problem(error))

    # --- tunings ---

    def _tune(self, claim: Claim, holder: LeaseHolder) -> Ending:
        item, store, served = claim.item, self._store, self._served
        request, peers = TuningRequest.from_stored(item.payload), _devices_beside(claim)
        recorded = holder.retry(lambda: store.evidence.probes(item.id))
        environment = probe_environment(request, served)
        tuning = TuningSession(request, served.device, environment=environment, versions=served.versions, peers=peers)
        if recorded:
            if tuning.fingerprint != item.fingerprint:
                raise EnvironmentChangedError(
                    f"{counted(item.probes, 'probe')} ran before the device, its memory or a version changed "
                    f"(fingerprint {item.fingerprint}, now {tuning.fingerprint}): submit it again"
                )
        elif (answer := self._answer(item, tuning, holder)) is not None:
            return answer
        stored = holder.retry(lambda: warm_start_of(store.recommendations, item))
        residuals: Sequence[EstimateResidual] = ()
        if request.command is None:  # which has no estimate
            family = family_of(request.workload)
            residuals = holder.retry(lambda: store.residuals.newest(served.hardware, family, _MAX_RESIDUALS))
        hooks = _RecordingHooks(store, self._context, self._instruments, tuning, holder, residuals)
        _restore(item, tuning, stored, residuals, recorded)
        self._executor.tune(tuning, hooks, holder.grace_seconds)
        recommendation = self._recommendation(item, tuning)
        residual = residual_of(recommendation, served.hardware)
        if residual is not None:
            holder.retry(lambda: store.residuals.add(item.id, residual))
        return Ending(State.SUCCEEDED, recommendation=recommendation)

    def _answer(self, item: WorkItem, tuning: TuningSession, holder: LeaseHolder) -> Ending | None:
        """The ending of a tuning that an equal one answers, which has ended since the submission or is running now.

        A quick tuning does not wait for one that is running: its one probe takes less time.
        """
        if item.fresh:
            return None
        store, fingerprint = self._store, tuning.fingerprint
        deadline = time.monotonic() + lease_waits.EQUAL_TUNING_SECONDS
        while True:
            is_awaited = holder.retry(lambda: store.evidence.is_measured_elsewhere(item.id, fingerprint))
            found = holder.retry(lambda: store.recommendations.with_fingerprint(fingerprint))
            if found is not None:
                new_id = self._identifiers.new("rec")
                answer = answer_from(found, tuning.request, self._served.device, item.names, new_id)
                return Ending(State.SUCCEEDED, recommendation=answer, is_stored=answer is found)
            if not is_awaited or tuning.request.quick or time.monotonic() > deadline:
                return None
            if holder.reason() is not None:
                raise WorkStoppedError
            time.sleep(_EQUAL_TUNING_PAUSE_SECONDS)

    def _recommendation(self, item: WorkItem, tuning: TuningSession) -> Recommendation:
        now = datetime.now(UTC)
        started = item.started_at or now
        found = tuning.recommendation(
            identifier=self._identifiers.new("rec"),
            created_at=now,
            total_seconds=max(0.0, (now - started).total_seconds()),
        )
        evidence = found.evidence.model_copy(update={"tuning_id": item.id})
        return found.model_copy(update=dict(item.names) | {"evidence": evidence})

    # --- jobs ---

    def _train(self, claim: Claim, holder: LeaseHolder) -> Ending:
        item = claim.item
        job = JobRequest.from_stored(item.payload)
        starts_anew = job.recommendation.request.command is not None  # and so are its updates counted
        newest = item.progress.update if item.progress and not starts_anew else 0
        recommendation = job.recommendation
        if item.device is None:  # measured on a device like this one, with another id perhaps
            recommendation = recommendation.model_copy(update={"device": self._served.device})
        devices = (self._served.device.id, *_devices_beside(claim))
        run = TrainingRun(self._context.runs_dir / item.id, recommendation, job.training, newest, devices)

        def on_progress(updates: Sequence[RunProgress]) -> None:
            # After a crash the run repeats the updates since its checkpoint, which are recorded already.
            nonlocal newest
            unrecorded = [update for update in updates if update.update > newest]
            if unrecorded:
                holder.retry(lambda: self._store.evidence.record_progress(holder.lease, unrecorded))
                splits = sum(len(update.splits) for update in unrecorded if isinstance(update, TrainingProgress))
                self._instruments.metrics.splits.labels(self._served.device.id).inc(splits)
                newest = unrecorded[-1].update

        mark_slot(run.directory, self._served.slot)
        before = disk_usage_of(run.directory)
        result = self._executor.train(run, on_progress, holder.grace_seconds)
        if holder.reason() is not None and result.outcome is not RunOutcome.SUCCEEDED:
            raise WorkStoppedError(result.message)  # also when it had to be killed, which looks like a failure
        if result.outcome is RunOutcome.FAILED:
            result = self._checked_failure(run.directory, before, result)
        return _job_ending(result)

    def _checked_failure(self, directory: Path, before: DiskUsage, result: TrainingResult) -> TrainingResult:
        """Return the result of a run that the host did not make fail; a disk full of the run's own files is its fault.

        Raises:
            HostFailureError: naming the trouble of the host.
        """
        reported = result.trouble
        found = (
            None if reported is None else HostFailure(Cause(reported.cause), reported.message, reported.needed_bytes)
        )
        if found is None or found.cause is not Cause.DISK_FULL:
            found = self._context.health.examine() or found
        if found is None:
            return result
        now = disk_usage_of(directory)
        if found.cause is not Cause.DISK_FULL or not is_filled_by_run(before, now, found.needed_bytes):
            _require_healthy(self._context.health, found)
        message = (
            f"{result.message}. The run's own files take {format_bytes(now.own)} of the "
            f"{format_bytes(now.total)} on the disk of {directory}: free space, or keep fewer checkpoints "
            "(`training.keep_checkpoints`, or an option of the command), and resume"
        )
        return result.model_copy(update={"message": message})


@dataclass(frozen=True)
class _RecordingHooks(TuningHooks):
    """Record the probes of a claimed tuning, and correct its estimates by the residuals of earlier tunings."""

    store: Store
    context: DeviceContext
    instruments: Instruments
    tuning: TuningSession
    holder: LeaseHolder
    residuals: Sequence[EstimateResidual]

    @override
    def begins(self, step: Step) -> None:
        with suppress(StaleLeaseError, StoreUnavailableError):  # only shown: no failure to store it ends a tuning
            self.store.evidence.record_activity(self.holder.lease, activity_of(step))

    @override
    def corrected(self, peaks: ExpectedPeaks) -> ExpectedPeaks:
        return corrected(peaks, self.residuals, conditions_of(self.tuning))

    @override
    def run_probe(self, probe: ProbeRequest, run: Callable[[], ProbeResult]) -> ProbeResult:
        ordinal = len(self.tuning.probes) + 1
        with self.instruments.spans.span("probe", micro_batch_size=probe.micro_batch_size, ordinal=ordinal) as span:
            result = run()
            span.set("outcome", result.outcome.value)
        return result

    @override
    def require_host(self, ended: str) -> None:
        _require_healthy(self.context.health)

    @override
    def recorded(self, result: ProbeResult) -> None:
        ordinal, binding = len(self.tuning.probes), self._binding()
        self.holder.retry(lambda: self.store.evidence.record_probe(self.holder.lease, ordinal, result, binding))
        self.instruments.metrics.probes.labels(self.context.served.device.id, result.outcome.value).inc()

    def _binding(self) -> Binding | None:
        """Return the binding that the first probe of a tuning for hardware is recorded with."""
        hardware, conditions = self.tuning.request.hardware, self.tuning.conditions
        if hardware is None or len(self.tuning.probes) > 1:
            return None
        need = HardwareNeed.of_kind(self.context.served.device, hardware.devices_per_node)
        return Binding(need.lane, conditions.fingerprint, conditions.request_fingerprint)


def _restore(
    item: WorkItem,
    tuning: TuningSession,
    stored: Recommendation | None,
    residuals: Sequence[EstimateResidual],
    recorded: Sequence[RecordedProbe],
) -> None:
    """Restore the state of a tuning: its warm start, the context that estimates expect, and its recorded probes."""
    if stored is not None:
        try:
            tuning.warm_start_from(stored)
        except SpecError as error:
            _log.info("%s is not warm-started by %s: %s", item.id, stored.id, error)
    expect_measured_context(tuning, residuals)
    for probe in recorded:
        tuning.record(probe.result)


def _require_healthy(health: HostHealth, trouble: HostFailure | None = None) -> None:
    """Raise the trouble of the host, if there is any, so that no failure is blamed on the work wrongly."""
    if (found := trouble or health.examine()) is not None:
        raise HostFailureError(found.cause, found.message, found.needed_bytes)


def _devices_beside(claim: Claim) -> tuple[str, ...]:
    """Return the devices of the same host that the work holds beside its own."""
    return tuple(slot.rpartition("/")[2] for slot in claim.other_slots)


def _refuse_repeated_losses(claim: Claim) -> None:
    if claim.lost_leases > _MAX_LOST_LEASES:
        raise WorkerLostError(
            f"{claim.lost_leases} workers in a row vanished while they ran this work, without a record: "
            "the work probably kills them. See the logs of the service and the kernel"
        )


def _job_ending(result: TrainingResult) -> Ending:
    """Return the ending of a job whose run has ended."""
    match result.outcome:
        case RunOutcome.SUCCEEDED:
            return Ending(State.SUCCEEDED, result=result)
        case RunOutcome.FAILED:
            kind = RunOutOfMemoryError if result.out_of_memory else RunFailedError
            kind = RunNotFiniteError if result.not_finite_since is not None else kind
            return Ending(State.FAILED, result=result, problem=stored_problem(kind(result.message)))
        case RunOutcome.STOPPED:
            raise WorkStoppedError(result.message)
