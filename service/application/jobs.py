"""Jobs: training runs made from recommendations."""

from __future__ import annotations

from pathlib import Path

from service.application import views
from service.application.exports import exported
from service.application.rules.idempotency import Submitted
from service.application.rules.placement import (
    check_every_process_has_samples,
    check_goes_with_one_device,
    check_same_device,
    processes_of,
)
from service.application.work import WorkCases, model_name, payload
from service.domain.api_keys import Caller
from service.domain.states import RESUMABLE_STATES, WorkKind
from service.domain.work import CheckpointList, ConfiguredJob, Job, JobFile, JobRequest, JobSubmission, QueuePosition
from service.domain.workers import ServedDevice
from service.errors import (
    ConflictError,
    InfeasibleRecommendationError,
    InvalidInputError,
    NotOnThisHostError,
    NotResumableError,
)
from service.observability.tracing import current_trace_parent
from service.store.models import Idempotency, NewWork, WorkItem
from tuner.schemas.base import Document
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.workload import WorkloadSpec
from tuner.training.launching.rank_processes import training_command
from tuner.training.launching.run_directory import RunPaths

_HERE = Path()
_PYTHON = "python"
"""A configured job names no folder and no interpreter of this host: it runs wherever its caller writes its files."""


class JobCases(WorkCases[JobSubmission, Job]):
    """What callers can do with jobs. Safe to share between threads."""

    kind = WorkKind.JOB

    def configure(self, submission: JobSubmission) -> ConfiguredJob:
        """What ``submit`` would run; runs nothing, so that it may need more devices than a job holds.

        Raises:
            RequestError: as ``submit``.
            ExportError: when it cannot be exported as asked.
        """
        recommendation, _ = self._trainable(submission)
        processes = processes_of(recommendation, submission.training)
        paths = RunPaths(_HERE)
        return ConfiguredJob(
            command=tuple(training_command(_HERE, processes, _PYTHON)),
            environment=recommendation.environment,
            working_directory=str(_HERE),
            files=(_file(paths.recommendation, recommendation), _file(paths.request, submission.training)),
            device=recommendation.device.id,
            recommendation_id=recommendation.id,
            export=exported(recommendation, submission.export) if submission.export else None,
        )

    def resume(self, job_id: str, caller: Caller) -> Job:
        """Let a job go on from its newest checkpoint, in the same folder, that failed or was cancelled.

        Raises:
            NotFoundError: when there is no such job.
            NotOwnerError: when another key made it.
            NotResumableError: when it is in another state, has no checkpoint, or nobody serves the slot it ran on.
            NotOnThisHostError: when its folder is elsewhere.
            RequestError: when the operator allows it no more, or another device is there by now.
            QuotaExceededError: when its key has used its quota.
        """
        item = self._own(job_id, caller, "resume")
        self._check_can_go_on(item)
        resumed = self._store.submissions.resume(job_id, self._context.policy.quota)
        self._context.notify()
        return self._view(resumed)

    def log(self, job_id: str, most_bytes: int) -> bytes:
        """The end of what the run printed; empty while it has not begun.

        Raises:
            NotFoundError: when there is no such job.
            NotOnThisHostError: when it ran elsewhere.
        """
        self._check_is_here(job_id)
        return self._context.runs.log_tail(job_id, most_bytes)

    def checkpoints(self, job_id: str) -> CheckpointList:
        """The checkpoints that the run has kept.

        Raises:
            NotFoundError: when there is no such job.
            NotOnThisHostError: when it ran elsewhere.
        """
        self._check_is_here(job_id)
        return CheckpointList(items=self._context.runs.checkpoints(job_id))

    # --- helpers ---

    def _submit(self, submission: JobSubmission, caller: Caller, once: Idempotency | None) -> Submitted:
        recommendation, here = self._trainable(submission)
        check_goes_with_one_device(recommendation, submission.training)
        request = JobRequest(recommendation=recommendation, training=submission.training)
        work = NewWork(
            id=self._context.identifiers.new("job"),
            kind=WorkKind.JOB,
            device=recommendation.device.id,
            model=model_name(recommendation.request.spec),
            effective_batch_size=recommendation.request.effective_batch_size,
            fingerprint=recommendation.fingerprint,
            payload=payload(request),
            recommendation_id=recommendation.id,
            priority=submission.priority,
            key_id=caller.key_id,
            hardware=here.hardware,
            trace_parent=current_trace_parent(),
        )
        return self._queue(work, once)

    def _view(self, item: WorkItem, queue: QueuePosition | None = None) -> Job:
        return views.job(item, self._context.runs.directory(item.id) if self._is_here(item) else None, queue)

    def _remove_files(self, work_id: str) -> None:
        """Remove the folder of a job, where that is on this host."""
        if not self._context.runs.remove(work_id):
            raise ConflictError(
                f"the folder of {work_id} cannot be removed: let the operator look at "
                f"{self._context.runs.directory(work_id)}, and delete it again"
            )

    def _check_can_go_on(self, item: WorkItem) -> None:
        if item.state not in RESUMABLE_STATES:
            raise NotResumableError(f"{item.id} is {item.state}: only a job that is FAILED or CANCELLED can be resumed")
        self._check_is_here(item.id)
        if not self._context.runs.checkpoints(item.id):
            raise NotResumableError(
                f"{item.id} has no checkpoint to go on from: submit it again, with `training.checkpoint_every`"
            )
        recommendation = JobRequest.model_validate_json(item.payload).recommendation
        seen = next((it for it in self._store.devices.list() if it.served.slot == item.slot), None)
        if seen is None or not self._context.is_alive(seen):
            raise NotResumableError(f"{item.id} ran on {item.slot}, which no worker serves now")
        check_same_device(recommendation.device, seen.served.device)
        self._check_spec(recommendation.request.spec)

    def _check_is_here(self, job_id: str) -> None:
        """Refuse what has begun and left no folder here, or one of an earlier attempt."""
        item = self._item(job_id)
        if item.slot is not None and not self._is_here(item):
            raise NotOnThisHostError(
                f"the folder of {job_id} is not on the host that answers; it runs, or ran last, on {item.slot}"
            )

    def _is_here(self, item: WorkItem) -> bool:
        """Whether the folder of a job's last attempt is on this host."""
        runs = self._context.runs
        return item.slot is not None and runs.are_here(item.id) and runs.slot(item.id) in {None, item.slot}

    def _trainable(self, submission: JobSubmission) -> tuple[Recommendation, ServedDevice]:
        """The recommendation of a submission, and what would run it."""
        recommendation = submission.recommendation
        if recommendation is None:
            recommendation = self._stored(str(submission.recommendation_id))
        here = self._context.serving(recommendation.device.id).served
        if submission.recommendation is not None:
            self._context.policy.check_foreign(recommendation, here.environment)
        if not recommendation.feasible:
            raise InfeasibleRecommendationError(
                f"recommendation {recommendation.id!r} says that nothing fits: {recommendation.infeasible_reason}"
            )
        self._check_spec(recommendation.request.spec)
        check_same_device(recommendation.device, here.device)
        check_every_process_has_samples(recommendation, submission.training)
        return recommendation, here

    def _stored(self, recommendation_id: str) -> Recommendation:
        views.check_identifier(recommendation_id, "recommendation")
        return self._store.recommendations.get(recommendation_id)

    def _check_spec(self, spec: WorkloadSpec) -> None:
        if spec.data is None:
            raise InvalidInputError(
                "the recommendation's spec has no `data`: say what to train on, for example "
                "`data: {kind: text, paths: [...]}` or `data: {kind: synthetic}`, and tune again"
            )
        self._context.policy.check_model(spec)
        self._context.policy.check_data(spec)


def _file(path: Path, document: Document) -> JobFile:
    return JobFile(path=str(path), content=document.model_dump_json(indent=2))
