"""/v1/tunings."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from service.api import examples
from service.api.authentication import Calling, needs
from service.api.dependencies import (
    Cases,
    DeviceFilter,
    FingerprintFilter,
    IfNoneMatch,
    LastEventId,
    Limit,
    ModelFilter,
    Once,
    Reading,
    StateFilter,
    TuningCursor,
    TuningId,
    Wait,
    Watching,
    strictly,
)
from service.api.etags import NOT_MODIFIED, TAG_HEADERS
from service.api.events.streaming import Poll, event_stream, polled
from service.api.problems import ALWAYS, RETRY_AFTER_HEADER, declared
from service.api.reads.coalesced import Page, Reads
from service.api.reads.fast_path import FastRoute, fast_path, plain_page
from service.api.responses import (
    DELETED,
    EVENT_STREAM,
    QUEUED_HEADERS,
    SUBMITTED_HEADERS,
    Responses,
    json_response,
    links,
    on_success,
    submitted,
)
from service.domain.api_keys import Scope
from service.domain.work import ProbeList, Tuning, TuningPage, TuningSubmission
from service.store.models import EVERYTHING, WorkFilter, in_states

router = APIRouter(prefix="/v1/tunings", tags=["tunings"], responses=ALWAYS, route_class=FastRoute)

_OF_ONE = links("tuning_id", "id", "getTuning", "listProbes", "followTuning", "cancelTuning", "deleteTuning")
_ITS_ANSWER = links("recommendation_id", "recommendation_id", "getRecommendation")

_SUBMITTED: Responses = {
    200: {
        "model": Tuning,
        "description": "The stored answer to the same question.",
        "headers": SUBMITTED_HEADERS,
        "links": _OF_ONE | _ITS_ANSWER,
        "content": examples.of("TuningWithAnswer"),
    },
    202: {
        "description": "Queued.",
        "headers": QUEUED_HEADERS,
        "links": _OF_ONE,
        "content": examples.of("TuningQueued"),
    },
}


@router.post(
    "",
    operation_id="submitTuning",
    summary="Submit a tuning",
    dependencies=[needs(Scope.TUNINGS_WRITE)],
    status_code=HTTPStatus.ACCEPTED,
    response_model=Tuning,
    responses=_SUBMITTED
    | declared(
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.CONFLICT,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.TOO_MANY_REQUESTS,
    ),
)
def submit_tuning(
    submission: Annotated[
        TuningSubmission, strictly(TuningSubmission), Body(openapi_examples=examples.REQUESTS["TuningSubmission"])
    ],
    caller: Calling,
    cases: Cases,
    once: Once,
) -> Response:
    """Find the largest micro-batch that fits, and plan the effective batch around it.

    Answers 202 and queues it, or 200 with the tuning that answered the same question before, unless `fresh` is set.
    """
    answer = cases.tunings.submit(submission, caller, once)
    return submitted(answer, f"/v1/tunings/{answer.work_id}")


async def _page_at_once(request: Request, reads: Reads) -> Response | None:
    asked = plain_page(request)
    return None if asked is None else json_response(await reads.tunings.get(Page(*asked, EVERYTHING)))


@router.get(
    "",
    operation_id="listTunings",
    summary="List tunings",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_model=TuningPage,
    responses=on_success(
        links=links("tuning_id", "items/0/id", "getTuning", "listProbes"),
        content=examples.of("TuningPage"),
    )
    | declared(HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY),
)
@fast_path(Scope.TUNINGS_READ, _page_at_once)
async def list_tunings(  # noqa: PLR0913, PLR0917 - one parameter per filter
    reads: Reading,
    state: StateFilter = None,
    device: DeviceFilter = None,
    model: ModelFilter = None,
    fingerprint: FingerprintFilter = None,
    limit: Limit = 50,
    cursor: TuningCursor = None,
) -> Response:
    """Tunings that match every filter, newest first, a page at a time."""
    return json_response(
        await reads.tunings.get(Page(limit, cursor, WorkFilter(in_states(state), device, model, fingerprint)))
    )


@router.get(
    "/{tuning_id}",
    operation_id="getTuning",
    summary="Read a tuning",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_model=Tuning,
    responses=on_success(
        headers=TAG_HEADERS | RETRY_AFTER_HEADER,
        links=_OF_ONE | _ITS_ANSWER,
        content=examples.of("TuningWithAnswer"),
    )
    | NOT_MODIFIED
    | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def get_tuning(
    tuning_id: TuningId, reads: Reading, watch: Watching, wait: Wait = 0.0, if_none_match: IfNoneMatch = None
) -> Response:
    """One tuning. With `wait`, the answer comes when it has ended, or after that many seconds.

    With `wait` and `If-None-Match` it comes as soon as the tuning is not what that names any more: a state or a probe
    is new. `Retry-After` is there while it has not ended.
    """
    return await polled(partial(reads.tuning.get, tuning_id), watch, Poll(wait, if_none_match))


@router.get(
    "/{tuning_id}/probes",
    operation_id="listProbes",
    summary="Read the evidence of a tuning",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def list_probes(tuning_id: TuningId, cases: Cases) -> ProbeList:
    """Every probe that was recorded, in order."""
    return cases.tunings.probes(tuning_id)


@router.get(
    "/{tuning_id}/events",
    operation_id="followTuning",
    summary="Follow a tuning",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_class=Response,
    responses=EVENT_STREAM | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def follow_tuning(
    tuning_id: TuningId, reads: Reading, watch: Watching, last_event_id: LastEventId = 0
) -> Response:
    """State changes and probes as they happen, as server-sent events."""
    followed, _ = await reads.tuning.get(tuning_id)
    return event_stream(followed, watch, last_event_id)


@router.post(
    "/{tuning_id}/cancel",
    operation_id="cancelTuning",
    summary="Cancel a tuning",
    dependencies=[needs(Scope.TUNINGS_WRITE)],
    responses=on_success(links=_OF_ONE) | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def cancel_tuning(tuning_id: TuningId, caller: Calling, cases: Cases) -> Tuning:
    """End a tuning. One that has ended already stays as it is, so repeating this is harmless."""
    return cases.tunings.cancel(tuning_id, caller)


@router.delete(
    "/{tuning_id}",
    operation_id="deleteTuning",
    summary="Delete a tuning",
    dependencies=[needs(Scope.TUNINGS_WRITE)],
    status_code=HTTPStatus.NO_CONTENT,
    responses=DELETED | declared(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def delete_tuning(tuning_id: TuningId, caller: Calling, cases: Cases) -> None:
    """Delete a tuning that has ended, with its probes and events. Its recommendation stays.

    The same question is probed again from then on. Cancel a tuning that has not ended first: it is refused with 409.
    """
    cases.tunings.delete(tuning_id, caller)
