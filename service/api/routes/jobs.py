"""/v1/jobs."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Response

from service.api import examples
from service.api.authentication import Calling, needs
from service.api.dependencies import (
    Cases,
    DeviceFilter,
    IfNoneMatch,
    JobCursor,
    JobId,
    LastEventId,
    Limit,
    ModelFilter,
    Once,
    Reading,
    StateFilter,
    Tail,
    Wait,
    Watching,
    strictly,
)
from service.api.etags import NOT_MODIFIED, TAG_HEADERS
from service.api.events.streaming import Poll, event_stream, polled
from service.api.problems import ALWAYS, RETRY_AFTER_HEADER, declared
from service.api.reads.coalesced import Page
from service.api.responses import (
    DELETED,
    EVENT_STREAM,
    QUEUED_HEADERS,
    Responses,
    json_response,
    links,
    on_success,
    submitted,
)
from service.api.strict_route import StrictRoute
from service.domain.api_keys import Scope
from service.domain.work import CheckpointList, ConfiguredJob, Job, JobPage, JobSubmission
from service.store.models import WorkFilter, in_states

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ALWAYS, route_class=StrictRoute)

_OF_ONE = links(
    "job_id", "id", "getJob", "followJob", "cancelJob", "resumeJob", "deleteJob", "readJobLog", "listJobCheckpoints"
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
        "links": _OF_ONE,
        "content": examples.of("JobQueued"),
    },
}
_RESUMED: Responses = {202: {"description": "Queued again.", "links": _OF_ONE}}
_LOG: Responses = {
    200: {
        "description": "What the run printed.",
        "content": {
            "text/plain": {"schema": {"type": "string"}, "example": "update 1 of 200: loss 5.5452\n"},
        },
    },
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
    submission: Annotated[
        JobSubmission, strictly(JobSubmission), Body(openapi_examples=examples.REQUESTS["JobSubmission"])
    ],
    caller: Calling,
    cases: Cases,
    once: Once,
) -> Response:
    """Make a training run from a recommendation: queue it, or with `dry_run` answer with what would be run.

    A dry run creates nothing, so that its `Idempotency-Key` is ignored.
    """
    if submission.dry_run:
        return json_response(cases.jobs.configure(submission).model_dump_json())
    answer = cases.jobs.submit(submission, caller, once)
    return submitted(answer, f"/v1/jobs/{answer.work_id}")


@router.get(
    "",
    operation_id="listJobs",
    summary="List jobs",
    dependencies=[needs(Scope.JOBS_READ)],
    response_model=JobPage,
    responses=on_success(links=links("job_id", "items/0/id", "getJob"), content=examples.of("JobPage"))
    | declared(HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def list_jobs(  # noqa: PLR0913, PLR0917 - one parameter per filter
    reads: Reading,
    state: StateFilter = None,
    device: DeviceFilter = None,
    model: ModelFilter = None,
    limit: Limit = 50,
    cursor: JobCursor = None,
) -> Response:
    """Jobs that match every filter, newest first, a page at a time."""
    return json_response(await reads.jobs.get(Page(limit, cursor, WorkFilter(in_states(state), device, model))))


@router.get(
    "/{job_id}",
    operation_id="getJob",
    summary="Read a job",
    dependencies=[needs(Scope.JOBS_READ)],
    response_model=Job,
    responses=on_success(
        headers=TAG_HEADERS | RETRY_AFTER_HEADER,
        links=_OF_ONE | links("recommendation_id", "recommendation_id", "getRecommendation"),
        content=examples.of("JobQueued"),
    )
    | NOT_MODIFIED
    | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def get_job(
    job_id: JobId, reads: Reading, watch: Watching, wait: Wait = 0.0, if_none_match: IfNoneMatch = None
) -> Response:
    """One job. With `wait`, the answer comes when it has ended, or after that many seconds.

    With `wait` and `If-None-Match` it comes as soon as the job is not what that names any more: a state or an update
    is new. `Retry-After` is there while it has not ended.
    """
    return await polled(partial(reads.job.get, job_id), watch, Poll(wait, if_none_match))


@router.get(
    "/{job_id}/events",
    operation_id="followJob",
    summary="Follow a job",
    dependencies=[needs(Scope.JOBS_READ)],
    response_class=Response,
    responses=EVENT_STREAM | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def follow_job(job_id: JobId, reads: Reading, watch: Watching, last_event_id: LastEventId = 0) -> Response:
    """State changes and optimizer updates as they happen, as server-sent events."""
    followed, _ = await reads.job.get(job_id)
    return event_stream(followed, watch, last_event_id)


@router.get(
    "/{job_id}/logs",
    operation_id="readJobLog",
    summary="Read the log of a job",
    dependencies=[needs(Scope.JOBS_READ)],
    response_class=Response,
    responses=_LOG | declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def read_job_log(job_id: JobId, cases: Cases, tail: Tail = _DEFAULT_TAIL_BYTES) -> Response:
    """The end of what the run printed; nothing while it has not begun.

    Its files are on the host that runs it: another one answers 409, `not-on-this-host`, naming the slot.
    """
    text = cases.jobs.log(job_id, tail).decode(errors="replace")
    return Response(text, media_type="text/plain", headers={"X-Content-Type-Options": "nosniff"})


@router.get(
    "/{job_id}/checkpoints",
    operation_id="listJobCheckpoints",
    summary="List the checkpoints of a job",
    dependencies=[needs(Scope.JOBS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def list_job_checkpoints(job_id: JobId, cases: Cases) -> CheckpointList:
    """The checkpoints that the run has kept, from the oldest to the newest.

    Its files are on the host that runs it: another one answers 409, `not-on-this-host`, naming the slot.
    """
    return cases.jobs.checkpoints(job_id)


@router.post(
    "/{job_id}/cancel",
    operation_id="cancelJob",
    summary="Cancel a job",
    dependencies=[needs(Scope.JOBS_RUN)],
    responses=on_success(links=_OF_ONE) | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def cancel_job(job_id: JobId, caller: Calling, cases: Cases) -> Job:
    """End a job. One that has ended already stays as it is, so repeating this is harmless."""
    return cases.jobs.cancel(job_id, caller)


@router.post(
    "/{job_id}/resume",
    operation_id="resumeJob",
    summary="Resume a job",
    dependencies=[needs(Scope.JOBS_RUN)],
    status_code=HTTPStatus.ACCEPTED,
    responses=_RESUMED
    | declared(
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.TOO_MANY_REQUESTS,
    ),
)
def resume_job(job_id: JobId, caller: Calling, cases: Cases) -> Job:
    """Queue a job again that is FAILED or CANCELLED: it goes on from its newest checkpoint, in the same folder.

    Refused with 409 where it cannot: it has no checkpoint, its folder is on another host, nobody serves the slot it
    ran at. Where hosts share no `BATCHWRIGHT_RUNS_DIR`, another one with such a device may take it, and begins anew.
    """
    return cases.jobs.resume(job_id, caller)


@router.delete(
    "/{job_id}",
    operation_id="deleteJob",
    summary="Delete a job",
    dependencies=[needs(Scope.JOBS_RUN)],
    status_code=HTTPStatus.NO_CONTENT,
    responses=DELETED | declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def delete_job(job_id: JobId, caller: Calling, cases: Cases) -> None:
    """Delete a job that has ended, with its events, and its folder with log, checkpoints and weights.

    The folder stays where it is on another host. Cancel a job that has not ended first: it is refused with 409.
    """
    cases.jobs.delete(job_id, caller)
