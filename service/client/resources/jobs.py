"""The calls about jobs, as coroutines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from service.client.core import PAGE_SIZE, Resource
from service.client.protocol import Call, creating, parsed, path_of
from service.domain.exports import ExportRequest
from service.domain.states import State
from service.domain.work import (
    Checkpoint,
    CheckpointList,
    ConfiguredJob,
    Event,
    Job,
    JobPage,
    JobSubmission,
    JobSummary,
)
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest

_JOBS = "/v1/jobs"


class AsyncJobs(Resource):
    """Jobs: training runs made from recommendations."""

    async def submit(
        self,
        recommendation: Recommendation | str,
        training: TrainingRequest | None = None,
        *,
        priority: int = 0,
        idempotency_key: str | None = None,
    ) -> Job:
        """Run a job from a recommendation, or from the id of a stored one.

        Args:
            recommendation: what to run.
            training: for how long; a short run when left out.
            priority: work of a higher one is taken first; above 0 needs the scope `admin`.
            idempotency_key: as for a tuning.

        Raises:
            ApiError: when the service refuses it.
            ConnectionFailedError: when it cannot be reached.
        """
        submission = _job_submission(recommendation, training, priority=priority)
        return await self._core.call(Job, creating(_JOBS, submission, idempotency_key))

    async def configure(
        self,
        recommendation: Recommendation | str,
        training: TrainingRequest | None = None,
        *,
        export: ExportRequest | None = None,
    ) -> ConfiguredJob:
        """What ``submit`` would run: command, files, environment. Runs nothing.

        Args:
            recommendation: what to run.
            training: for how long; a short run when left out.
            export: also give it in the words of this framework or launcher.

        Raises:
            ApiError: when the service refuses it.
        """
        submission = _job_submission(recommendation, training, dry_run=True, export=export)
        return await self._core.call(ConfiguredJob, Call("POST", _JOBS, body=submission, repeatable=True))

    async def get(self, job_id: str) -> Job:
        """A job as it is now.

        Raises:
            NotFoundError: when there is none with this id.
        """
        return await self._core.read(Job, path_of(_JOBS, job_id))

    async def wait(self, job_id: str, timeout_seconds: float | None = None) -> Job:
        """A job once it has ended. Goes on over restarts of the service.

        Raises:
            NotWaitedLongEnoughError: when it has not within ``timeout_seconds``.
            NotFoundError: when there is none with this id.
            ConnectionFailedError: when the service stays away.
        """
        return await self._core.until_ended(Job, path_of(_JOBS, job_id), timeout_seconds)

    def events(self, job_id: str, after: int = 0) -> AsyncGenerator[Event, None]:
        """State changes and updates after event ``after``, as they happen, to the last; resumes broken connections.

        Raises:
            NotFoundError: when there is no such job.
            ConnectionFailedError: when the service stays away.
        """
        return self._core.events(path_of(_JOBS, job_id, "events"), after)

    async def logs(self, job_id: str, tail_bytes: int | None = None) -> str:
        """The end of what the job's processes printed.

        Args:
            job_id: the job.
            tail_bytes: how much of it; 64 KiB when left out.

        Raises:
            NotFoundError: when there is no such job.
        """
        return await self._core.text(Call("GET", path_of(_JOBS, job_id, "logs"), {"tail": tail_bytes}))

    async def checkpoints(self, job_id: str) -> tuple[Checkpoint, ...]:
        """The checkpoints that the job has kept, from the oldest to the newest.

        Raises:
            NotFoundError: when there is no such job.
        """
        return (await self._core.read(CheckpointList, path_of(_JOBS, job_id, "checkpoints"))).items

    async def cancel(self, job_id: str) -> Job:
        """End a job; harmless when it has ended.

        Raises:
            NotFoundError: when there is no such job.
            NotAllowedError: when another API key made it.
        """
        return await self._core.call(Job, Call("POST", path_of(_JOBS, job_id, "cancel"), repeatable=True))

    async def resume(self, job_id: str) -> Job:
        """Let a job go on from its newest checkpoint that failed or was cancelled. Not sent twice.

        Raises:
            NotFoundError: when there is no such job.
            ConflictError: when it cannot go on; the problem says why.
            NotAllowedError: when another API key made it.
        """
        return await self._core.call(Job, Call("POST", path_of(_JOBS, job_id, "resume"), repeatable=False))

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its events and its run's folder.

        Raises:
            NotFoundError: when there is no such job.
            ConflictError: when it has not ended.
            NotAllowedError: when another API key made it.
        """
        await self._core.delete(path_of(_JOBS, job_id))

    def list(
        self,
        *,
        state: State | Sequence[State] | None = None,
        device: str | None = None,
        model: str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncGenerator[JobSummary, None]:
        """Jobs that match, newest first, fetched page by page.

        Raises:
            ApiError: when the service refuses.
        """
        filters = {"state": state, "device": device, "model": model, "limit": page_size}
        return self._core.rows(partial(parsed, JobPage), Call("GET", _JOBS, filters))


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
