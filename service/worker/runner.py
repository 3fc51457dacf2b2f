"""Drive one claimed tuning or job to its end. Its errors tell the worker what became of the work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from service.application.rules.placement import mark_slot
from service.application.rules.warm_start import recall_earlier
from service.domain.identifiers import IdentifierSource
from service.domain.states import State, WorkKind
from service.domain.work import JobRequest
from service.domain.workers import ServedDevice
from service.errors import ServiceError
from service.observability.instruments import Instruments
from service.problem_mapping import stored_problem
from service.store.interface import EvidenceStore, RecommendationStore
from service.store.models import Claim, Ending, WorkItem
from service.worker.executors.base import Executor, TrainingRun
from service.worker.host_health import Health
from service.worker.lease import LeaseHolder
from tuner.errors import BatchwrightError, HostFailureError, ProbeCancelledError
from tuner.planning.session import Tuning, check_coupling, estimate_what_ifs, prepare_search
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import ProbeRequest, TuningRequest
from tuner.schemas.results import Outcome, ProbeResult
from tuner.schemas.training import RunOutcome, TrainingProgress, TrainingResult
from tuner.system.host_failures import Cause, DiskUsage, HostFailure, disk_usage_of, host_failure_of, is_filled_by_run
from tuner.units import format_bytes

_log = logging.getLogger(__name__)

_UNEXPLAINED = {Outcome.ERROR, Outcome.LOST, Outcome.TIMED_OUT}
"""Outcomes of probes that trouble of the host may have caused."""
_MOST_LOST_LEASES = 5
"""Owners in a row that may vanish without recording anything before the work itself is held to be the cause."""


class StoppedError(Exception):
    """The work was stopped before its end; the lease's holder knows why."""


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


@dataclass(frozen=True)
class Site:
    """The site of a run: a device, the folder of its runs, and the health of its host."""

    served: ServedDevice
    runs_dir: Path
    health: Health


class Driver:
    """Run claimed work on one executor, recording every step."""

    def __init__(
        self,
        evidence: EvidenceStore,
        recommendations: RecommendationStore,
        executor: Executor,
        site: Site,
        instruments: Instruments,
    ) -> None:
        self._evidence = evidence
        self._recommendations = recommendations
        self._executor = executor
        self._served = site.served
        self._runs_dir = site.runs_dir
        self._watch = instruments
        self._health = site.health
        self._identifiers = IdentifierSource()

    def drive(self, claim: Claim, holder: LeaseHolder) -> Ending:
        """Run work to its end; a failure of the work is an ending too.

        Raises:
            StoppedError: when the holder was asked to stop.
            StaleLeaseError: when a report came too late.
            HostFailureError: when the host could not run it, which is no failure of the work.
            OSError: likewise.
        """
        try:
            _refuse_repeated_losses(claim)
            if claim.item.kind is WorkKind.TUNING:
                return self._tune(claim.item, holder)
            return self._train(claim.item, holder)
        except ProbeCancelledError as error:
            raise StoppedError from error
        except (BatchwrightError, WorkerLostError, EnvironmentChangedError) as error:
            self._excuse(host_failure_of(error))
            return Ending(State.FAILED, problem=stored_problem(error))

    def _excuse(self, trouble: HostFailure | None = None) -> None:
        """Go on only where the host is well: elsewhere a failure does not show that the work is at fault.

        Raises:
            HostFailureError: naming what the host lacks.
        """
        if (found := trouble or self._health.examine()) is not None:
            raise HostFailureError(found.cause, found.message, found.needed_bytes)

    # --- tunings ---

    def _tune(self, item: WorkItem, holder: LeaseHolder) -> Ending:
        request = TuningRequest.model_validate_json(item.payload)
        tuning = self._rebuild(item, request, holder)
        check_coupling(tuning, lambda check: self._executor.check_coupling(check, holder.grace_seconds))
        if not tuning.probes:
            prepare_search(
                tuning,
                lambda request: self._executor.check(request, holder.grace_seconds),
                lambda question: self._executor.expect(question, holder.grace_seconds),
            )
        while (probe := tuning.next_probe()) is not None:
            if holder.reason() is not None:
                raise StoppedError
            tuning.record(self._probe(probe, holder, len(tuning.probes) + 1))
        estimate_what_ifs(tuning, lambda question: self._executor.expect(question, holder.grace_seconds))
        return Ending(State.SUCCEEDED, recommendation=self._recommendation(item, tuning))

    def _probe(self, probe: ProbeRequest, holder: LeaseHolder, ordinal: int) -> ProbeResult:
        """Run a probe and record it."""
        with self._watch.spans.span("probe", micro_batch_size=probe.micro_batch_size, ordinal=ordinal) as span:
            result = self._executor.probe(probe, holder.grace_seconds)
            span.set("outcome", result.outcome.value)
        if result.outcome in _UNEXPLAINED:
            self._excuse()
        holder.retry(lambda: self._evidence.record_probe(holder.lease, ordinal, result))
        self._watch.metrics.count_probe(self._served.device.id, result.outcome.value)
        return result

    def _rebuild(self, item: WorkItem, request: TuningRequest, holder: LeaseHolder) -> Tuning:
        """The tuning as its recorded probes left it.

        Raises:
            EnvironmentChangedError: when those probes ran under other versions or limits than the next would.
        """
        served = self._served
        tuning = Tuning(request, served.device, environment=served.environment, versions=served.versions)
        recorded = holder.retry(lambda: self._evidence.probes(item.id))
        if recorded and tuning.fingerprint != item.fingerprint:
            raise EnvironmentChangedError(
                f"{len(recorded)} probes ran before the device, its memory or a version changed "
                f"(fingerprint {item.fingerprint}, now {tuning.fingerprint}): submit it again"
            )
        holder.retry(lambda: recall_earlier(self._recommendations, item, tuning))
        for probe in recorded:
            tuning.record(probe.result)
        return tuning

    def _recommendation(self, item: WorkItem, tuning: Tuning) -> Recommendation:
        now = datetime.now(UTC)
        started = item.started_at or now
        return tuning.recommendation(
            identifier=self._identifiers.new("rec"),
            created_at=now,
            total_seconds=max(0.0, (now - started).total_seconds()),
        )

    # --- jobs ---

    def _train(self, item: WorkItem, holder: LeaseHolder) -> Ending:
        job = JobRequest.model_validate_json(item.payload)
        newest = item.progress.update if item.progress else 0
        run = TrainingRun(self._runs_dir / item.id, job.recommendation, job.training, newest)

        def on_progress(updates: Sequence[TrainingProgress]) -> None:
            # After a crash the run repeats the updates since its checkpoint: those are recorded already.
            nonlocal newest
            fresh = [update for update in updates if update.update > newest]
            if fresh:
                holder.retry(lambda: self._evidence.record_progress(holder.lease, fresh))
                newest = fresh[-1].update

        mark_slot(run.directory, self._served.slot)
        before = disk_usage_of(run.directory)
        result = self._executor.train(run, on_progress, holder.grace_seconds)
        if holder.reason() is not None and result.outcome is not RunOutcome.SUCCEEDED:
            raise StoppedError(result.message)  # also when it had to be killed, which looks like a failure
        if result.outcome is RunOutcome.FAILED:
            result = self._excused(run.directory, before, result)
        return _job_ending(result)

    def _excused(self, directory: Path, before: DiskUsage, result: TrainingResult) -> TrainingResult:
        """The result of a run whose failure is its own, which it also is where its files have filled the disk.

        Raises:
            HostFailureError: naming what the host lacks.
        """
        reported = result.trouble
        found = (
            None if reported is None else HostFailure(Cause(reported.cause), reported.message, reported.needed_bytes)
        )
        if found is None or found.cause is not Cause.DISK_FULL:
            found = self._health.examine() or found
        if found is None:
            return result
        now = disk_usage_of(directory)
        if found.cause is not Cause.DISK_FULL or not is_filled_by_run(before, now, found.needed_bytes):
            self._excuse(found)
        message = (
            f"{result.message}. Of {format_bytes(now.total)} on the disk of {directory} the run's own files take "
            f"{format_bytes(now.own)}: make room, or keep fewer checkpoints (`training.keep_checkpoints`), and resume"
        )
        return result.model_copy(update={"message": message})


def _refuse_repeated_losses(claim: Claim) -> None:
    if claim.lost_leases > _MOST_LOST_LEASES:
        raise WorkerLostError(
            f"{claim.lost_leases} workers in a row vanished while they ran it, and recorded nothing: "
            "it probably ends them. See the service's log and the kernel's"
        )


def _job_ending(result: TrainingResult) -> Ending:
    """The ending of a job whose run's process has ended.

    Raises:
        StoppedError: when the run was stopped and can be resumed.
    """
    match result.outcome:
        case RunOutcome.SUCCEEDED:
            return Ending(State.SUCCEEDED, result=result)
        case RunOutcome.FAILED:
            return Ending(State.FAILED, result=result, problem=stored_problem(RunFailedError(result.message)))
        case RunOutcome.STOPPED:
            raise StoppedError(result.message)
