"""/v1/jobs."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from starlette.concurrency import run_in_threadpool

from service.api.authentication import Calling, Lasting, needs
from service.api.dependencies import Cases, Cursor, Feed, JobId, LastEventId, Limit, Wait
from service.api.following import event_stream, until_ended
from service.api.problems import declared
from service.api.tunings import EVENT_STREAM
from service.domain import ConfiguredJob, Job, JobPage, JobSubmission
from service.keys import Scope

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

EXAMPLE: dict[str, Any] = {
    "recommendation_id": "rec_0192f3a1b2c3700089abcdef01234567",
    "training": {"updates": 200, "checkpoint_every": 50},
    "dry_run": True,
}


_SUBMITTED: dict[int | str, dict[str, Any]] = {
    200: {"model": ConfiguredJob, "description": "The configured job of a dry run: nothing was started."},
    202: {"description": "Queued.", "headers": {"Location": {"schema": {"type": "string"}}}},
}


@router.post(
    "",
    operation_id="submitJob",
    summary="Run, or configure, a training job",
    dependencies=[needs(Scope.JOBS_RUN)],
    status_code=HTTPStatus.ACCEPTED,
    response_model=Job,
    responses=_SUBMITTED
    | declared(
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.TOO_MANY_REQUESTS,
    ),
)
def submit_job(
    submission: Annotated[JobSubmission, Body(openapi_examples={"dry run": {"value": EXAMPLE}})],
    caller: Calling,
    cases: Cases,
    response: Response,
) -> Job | Response:
    """Make a training run from a recommendation: queue it, or with `dry_run` answer with what would be run."""
    if submission.dry_run:
        configured = cases.configure_job(submission)
        return Response(configured.model_dump_json(), media_type="application/json")
    job = cases.submit_job(submission, caller)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


@router.get(
    "",
    operation_id="listJobs",
    summary="List jobs",
    dependencies=[needs(Scope.JOBS_READ)],
    responses=declared(HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def list_jobs(cases: Cases, limit: Limit = 50, cursor: Cursor = None) -> JobPage:
    """Jobs, newest first, a page at a time."""
    return cases.jobs(limit, cursor)


@router.get(
    "/{job_id}",
    operation_id="getJob",
    summary="Read a job",
    dependencies=[needs(Scope.JOBS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def get_job(job_id: JobId, cases: Cases, feed: Feed, standing: Lasting, wait: Wait = 0.0) -> Job:
    """One job. With `wait`, the answer comes when it has ended, or after that many seconds."""
    return await until_ended(partial(cases.job, job_id), feed, wait, standing)


@router.get(
    "/{job_id}/events",
    operation_id="followJob",
    summary="Follow a job",
    dependencies=[needs(Scope.JOBS_READ)],
    response_class=Response,
    responses=EVENT_STREAM | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def follow_job(
    job_id: JobId, cases: Cases, feed: Feed, standing: Lasting, last_event_id: LastEventId = 0
) -> Response:
    """State changes and optimizer updates as they happen, as server-sent events."""
    followed = await run_in_threadpool(cases.job, job_id)
    return event_stream(followed, cases, feed, standing, last_event_id)


@router.post(
    "/{job_id}/cancel",
    operation_id="cancelJob",
    summary="Cancel a job",
    dependencies=[needs(Scope.JOBS_RUN)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def cancel_job(job_id: JobId, caller: Calling, cases: Cases) -> Job:
    """End a job. One that has ended already stays as it is, so repeating this is harmless."""
    return cases.cancel_job(job_id, caller)
