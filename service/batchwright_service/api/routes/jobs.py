"""The routes of `/v1/jobs`."""

from http import HTTPStatus
from typing import Annotated

from fastapi import Response

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import WorkKind
from batchwright.client.documents.work import CheckpointList, ConfiguredJob, Job, JobPage, JobSubmission
from batchwright_service.api.authentication import CurrentCaller, requires_scope
from batchwright_service.api.context import WAKES_WORKERS, Context
from batchwright_service.api.dependencies import (
    IdempotencyHeader,
    JobCursor,
    JobId,
    Limit,
    Tail,
    Total,
    WorkFilters,
    strict_body,
)
from batchwright_service.api.problems import declared
from batchwright_service.api.reads.coalesced import WorkListQuery
from batchwright_service.api.responses import QUEUED_HEADERS, Responses, json_response, submitted
from batchwright_service.api.routes.work import SUBMISSION_STATUSES, WorkRoutes


async def _page(
    filters: WorkFilters, limit: Limit = 50, cursor: JobCursor = None, *, total: Total = False
) -> WorkListQuery:
    return WorkListQuery(limit, cursor, filters, total)


_WORK = WorkRoutes(
    kind=WorkKind.JOB,
    document=Job,
    page=JobPage,
    list_query=_page,
    read_scope=Scope.JOBS_READ,
    write_scope=Scope.JOBS_RUN,
    item_links=("getJob",),
    links=("getJob", "followJob", "cancelJob", "resumeJob", "deleteJob", "readJobLog", "listJobCheckpoints"),
    event_nouns=("update", "optimizer updates"),
    deletion="""\
Delete a job that has ended, with its events, and its folder with log, checkpoints and weights.

A folder on another host is not deleted. A job that has not ended is refused with 409: cancel it first.""",
)
_DEFAULT_TAIL_BYTES = 64 * 1024
_SUBMITTED: Responses = {
    200: {
        "model": ConfiguredJob,
        "description": "The configured job of a dry run. Nothing was started.",
    },
    202: {
        "description": "Queued.",
        "headers": QUEUED_HEADERS,
        "links": _WORK.own_links,
    },
}
_RESUMED: Responses = {202: {"description": "Queued again.", "links": _WORK.own_links}}
_LOG: Responses = {
    200: {
        "description": "The output of the run.",
        "content": {
            "text/plain": {"schema": {"type": "string"}, "example": "update 1 of 200: loss 5.5452\n"},
        },
    },
}

router = _WORK.router()


@router.post(
    "",
    summary="Submit a training job",
    dependencies=[requires_scope(Scope.JOBS_RUN), WAKES_WORKERS],
    status_code=HTTPStatus.ACCEPTED,
    response_model=Job,
    responses=_SUBMITTED | declared(*SUBMISSION_STATUSES),
)
def submit_job(
    submission: Annotated[JobSubmission, strict_body(JobSubmission)],
    caller: CurrentCaller,
    context: Context,
    idempotency: IdempotencyHeader,
) -> Response:
    """Queue a training run that is configured from a recommendation.

    Of the settings of `training`, a registered command takes `updates` alone, if it has the placeholder `{updates}`.

    With `dry_run` the response is the configuration of the run. A dry run creates nothing, so that its
    `Idempotency-Key` is ignored.
    """
    if submission.dry_run:
        return json_response(context.jobs.configure(submission).model_dump_json())
    response = context.jobs.submit(submission, caller, idempotency)
    return submitted(response, f"/v1/jobs/{response.work_id}")


_WORK.add_reading(router)
_WORK.add_bulk(router)
_WORK.add_following(router)


@router.get(
    "/{job_id}/logs",
    summary="Read the log of a job",
    dependencies=[requires_scope(Scope.JOBS_READ)],
    response_class=Response,
    responses=_LOG | declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
def read_job_log(job_id: JobId, context: Context, tail: Tail = _DEFAULT_TAIL_BYTES) -> Response:
    """Read the end of the run's output, which is empty until the run has started.

    The files of a job are on the host that runs it. Another host responds 409, `not-on-this-host`, and names the slot.
    """
    text = context.jobs.log(job_id, tail).decode(errors="replace")
    return Response(text, media_type="text/plain", headers={"X-Content-Type-Options": "nosniff"})


@router.get(
    "/{job_id}/checkpoints",
    summary="List the checkpoints of a job",
    dependencies=[requires_scope(Scope.JOBS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
def list_job_checkpoints(job_id: JobId, context: Context) -> CheckpointList:
    """List the checkpoints that the run has kept, oldest first. Those of a command are its own, and not listed.

    The files of a job are on the host that runs it. Another host responds 409, `not-on-this-host`, and names the slot.
    """
    return context.jobs.checkpoints(job_id)


_WORK.add_ending(router)


@router.post(
    "/{job_id}/resume",
    summary="Resume a job",
    dependencies=[requires_scope(Scope.JOBS_RUN), WAKES_WORKERS],
    status_code=HTTPStatus.ACCEPTED,
    responses=_RESUMED | declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
)
def resume_job(job_id: JobId, caller: CurrentCaller, context: Context) -> Job:
    """Queue a FAILED or CANCELLED job again. It resumes from its newest checkpoint, in the same folder.

    A command starts from its beginning, in the same folder, where it may find checkpoints of its own. Another job is
    refused with 409 if it has no checkpoint, and any job if its folder is on another host, or no worker serves its
    slot. If hosts share no `BATCHWRIGHT_RUNS_DIR`, another host with such a device may take the job, and starts it from
    the beginning.
    """
    return context.jobs.resume(job_id, caller)
