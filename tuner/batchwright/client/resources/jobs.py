"""The calls about jobs, as coroutines."""

from collections.abc import Mapping
from typing import Any

from batchwright.client.core import Core
from batchwright.client.documents.exports import ExportRequest
from batchwright.client.documents.work import (
    Checkpoint,
    CheckpointList,
    ConfiguredJob,
    JobPage,
    JobSubmission,
    JobSummary,
)
from batchwright.client.http_messages import Call, creation_call, path_of
from batchwright.client.resources.work import AsyncWork
from batchwright.client.sdk_documents import Job
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest

_JOBS = "/v1/jobs"


class AsyncJobs(AsyncWork[Job, JobSummary]):
    """Jobs: training runs made from recommendations."""

    def __init__(self, core: Core) -> None:
        super().__init__(core, _JOBS, Job, JobPage)

    async def submit(  # noqa: PLR0913 - one per field
        self,
        recommendation: Recommendation | str,
        training: TrainingRequest | None = None,
        *,
        priority: int = 0,
        name: str | None = None,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Submit a job that trains with the plan of a recommendation.

        Args:
            recommendation: the plan to train with, or the id of a stored recommendation.
            training: the settings of the run; a short run when left out.
            priority: work of a higher priority runs first; above 0 needs the scope `admin`.
            name: as for a tuning. Without any of the three, the job has the names of the recommendation.
            project: as for a tuning.
            labels: as for a tuning.
            idempotency_key: as for a tuning.
        """
        names = {"name": name, "project": project, "labels": dict(labels or {})}
        submission = _job_submission(recommendation, training, priority=priority, **names)
        return await self._core.call(Job, creation_call(_JOBS, submission, idempotency_key))

    async def configure(
        self,
        recommendation: Recommendation | str,
        training: TrainingRequest | None = None,
        *,
        export: ExportRequest | None = None,
    ) -> ConfiguredJob:
        """Return the command, files and environment that ``submit`` would run. Runs nothing.

        Args:
            recommendation: the plan to train with, or the id of a stored recommendation.
            training: the settings of the run; a short run when left out.
            export: also export the plan for this framework or launcher.
        """
        submission = _job_submission(recommendation, training, dry_run=True, export=export)
        return await self._core.call(ConfiguredJob, Call("POST", _JOBS, body=submission, repeatable=True))

    async def logs(self, job_id: str, tail_bytes: int | None = None) -> str:
        """Return the end of the job's log.

        Args:
            job_id: the job.
            tail_bytes: the length of that end; 64 KiB when left out.

        Raises:
            NotFoundError: when there is no such job.
        """
        return await self._core.text(Call("GET", path_of(_JOBS, job_id, "logs"), {"tail": tail_bytes}))

    async def checkpoints(self, job_id: str) -> tuple[Checkpoint, ...]:
        """List the stored checkpoints of the job, oldest first.

        Raises:
            NotFoundError: when there is no such job.
        """
        return (await self._core.read(CheckpointList, path_of(_JOBS, job_id, "checkpoints"))).items

    async def resume(self, job_id: str) -> Job:
        """Resume a failed or cancelled job from its newest checkpoint. The call is never retried.

        Raises:
            NotFoundError: when there is no such job.
            ConflictError: when the job cannot be resumed; the problem names the reason.
            NotAllowedError: when another API key submitted it.
        """
        return await self._core.call(Job, Call("POST", path_of(_JOBS, job_id, "resume"), repeatable=False))


def _job_submission(
    recommendation: Recommendation | str,
    training: TrainingRequest | None,
    **further: Any,  # noqa: ANN401 - its other fields
) -> JobSubmission:
    stored = isinstance(recommendation, str)
    return JobSubmission(
        recommendation_id=recommendation if stored else None,
        recommendation=None if stored else recommendation,
        training=training or TrainingRequest(),
        **further,
    )
