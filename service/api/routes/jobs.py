"""/v1/jobs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import Body, Response

from service.api import examples
from service.api.authentication import Calling, needs
from service.api.context import Context
from service.api.dependencies import (
    DeviceFilter,
    JobCursor,
    JobId,
    Limit,
    ModelFilter,
    Once,
    StateFilter,
    Tail,
    strictly,
)
from service.api.problems import declared
from service.api.reads.coalesced import Page
from service.api.responses import QUEUED_HEADERS, Responses, json_response, submitted
from service.api.routes.work import SUBMISSION_STATUSES, WorkRoutes
from service.domain.api_keys import Scope
from service.domain.states import WorkKind
from service.domain.work import CheckpointList, ConfiguredJob, Job, JobPage, JobSubmission
from service.store.models import WorkFilter, in_states


async def _page(
    state: StateFilter = None,
    device: DeviceFilter = None,
    model: ModelFilter = None,
    limit: Limit = 50,
    cursor: JobCursor = None,
) -> Page:
    return Page(limit, cursor, WorkFilter(in_states(state), device, model))


_WORK = WorkRoutes(
    kind=WorkKind.JOB,
    document=Job,
    page=JobPage,
    page_of=_page,
    read_scope=Scope.JOBS_READ,
    write_scope=Scope.JOBS_RUN,
    item_links=("getJob",),
    links=("getJob", "followJob", "cancelJob", "resumeJob", "deleteJob", "readJobLog", "listJobCheckpoints"),
    example="JobQueued",
    news=("an update", "optimizer updates"),
    deletion="""\
Delete a job that has ended, with its events, and its folder with log, checkpoints and weights.

The folder stays where it is on another host. Cancel a job that has not ended first: it is refused with 409.""",
)
_DEFAULT_TAIL_BYTES = 64 * 1024
_SUBMITTED: Responses = {
    200: {
        "model": ConfiguredJob,
        "description": "The configured job of a dry run: nothing was started.",
        "content": examples.of("ConfiguredJob"),
    },
    202: {
        "description": "Queued.",
        "headers": QUEUED_HEADERS,
        "links": _WORK.own_links,
        "content": examples.of("JobQueued"),
    },
}
_RESUMED: Responses = {202: {"description": "Queued again.", "links": _WORK.own_links}}
_LOG: Responses = {
    200: {
        "description": "What the run printed.",
        "content": {
            "text/plain": {"schema": {"type": "string"}, "example": "update 1 of 200: loss 5.5452\n"},
        },
    },
}

router = _WORK.router()


@router.post(
    "",
    operation_id="submitJob",
    summary="Run, or configure, a training job",
    dependencies=[needs(Scope.JOBS_RUN)],
    status_code=HTTPStatus.ACCEPTED,
    response_model=Job,
    responses=_SUBMITTED | declared(*SUBMISSION_STATUSES, HTTPStatus.NOT_FOUND),
)
def submit_job(
    submission: Annotated[
        JobSubmission, strictly(JobSubmission), Body(openapi_examples=examples.REQUESTS["JobSubmission"])
    ],
    caller: Calling,
    context: Context,
    once: Once,
) -> Response:
    """Make a training run from a recommendation: queue it, or with `dry_run` answer with what would be run.

    A dry run creates nothing, so that its `Idempotency-Key` is ignored.
    """
    if submission.dry_run:
        return json_response(context.jobs.configure(submission).model_dump_json())
    answer = context.jobs.submit(submission, caller, once)
    return submitted(answer, f"/v1/jobs/{answer.work_id}")


_WORK.add_reading(router)
_WORK.add_following(router)


@router.get(
    "/{job_id}/logs",
    operation_id="readJobLog",
    summary="Read the log of a job",
    dependencies=[needs(Scope.JOBS_READ)],
    response_class=Response,
    responses=_LOG | declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
def read_job_log(job_id: JobId, context: Context, tail: Tail = _DEFAULT_TAIL_BYTES) -> Response:
    """The end of what the run printed; nothing while it has not begun.

    Its files are on the host that runs it: another one answers 409, `not-on-this-host`, naming the slot.
    """
    text = context.jobs.log(job_id, tail).decode(errors="replace")
    return Response(text, media_type="text/plain", headers={"X-Content-Type-Options": "nosniff"})


@router.get(
    "/{job_id}/checkpoints",
    operation_id="listJobCheckpoints",
    summary="List the checkpoints of a job",
    dependencies=[needs(Scope.JOBS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
def list_job_checkpoints(job_id: JobId, context: Context) -> CheckpointList:
    """The checkpoints that the run has kept, from the oldest to the newest.

    Its files are on the host that runs it: another one answers 409, `not-on-this-host`, naming the slot.
    """
    return context.jobs.checkpoints(job_id)


_WORK.add_ending(router)


@router.post(
    "/{job_id}/resume",
    operation_id="resumeJob",
    summary="Resume a job",
    dependencies=[needs(Scope.JOBS_RUN)],
    status_code=HTTPStatus.ACCEPTED,
    responses=_RESUMED | declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS),
)
def resume_job(job_id: JobId, caller: Calling, context: Context) -> Job:
    """Queue a job again that is FAILED or CANCELLED: it goes on from its newest checkpoint, in the same folder.

    Refused with 409 where it cannot: it has no checkpoint, its folder is on another host, nobody serves the slot it
    ran at. Where hosts share no `BATCHWRIGHT_RUNS_DIR`, another one with such a device may take it, and begins anew.
    """
    return context.jobs.resume(job_id, caller)
