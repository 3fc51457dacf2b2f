"""The routes of `/v1/tunings`."""

from http import HTTPStatus
from typing import Annotated

from fastapi import Response

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import WorkKind
from batchwright.client.documents.work import ProbeList, Tuning, TuningPage, TuningSubmission
from batchwright_service.api.authentication import CurrentCaller, requires_scope
from batchwright_service.api.context import WAKES_WORKERS, Context
from batchwright_service.api.dependencies import (
    IdempotencyHeader,
    Limit,
    Total,
    TuningCursor,
    TuningId,
    WorkFilters,
    strict_body,
)
from batchwright_service.api.problems import declared
from batchwright_service.api.reads.coalesced import WorkListQuery
from batchwright_service.api.responses import QUEUED_HEADERS, SUBMITTED_HEADERS, Responses, submitted
from batchwright_service.api.routes.work import RECOMMENDATION_LINK, SUBMISSION_STATUSES, WorkRoutes


async def _page(
    filters: WorkFilters, limit: Limit = 50, cursor: TuningCursor = None, *, total: Total = False
) -> WorkListQuery:
    return WorkListQuery(limit, cursor, filters, total)


_WORK = WorkRoutes(
    kind=WorkKind.TUNING,
    document=Tuning,
    page=TuningPage,
    list_query=_page,
    read_scope=Scope.TUNINGS_READ,
    write_scope=Scope.TUNINGS_WRITE,
    item_links=("getTuning", "listProbes"),
    links=("getTuning", "listProbes", "followTuning", "cancelTuning", "deleteTuning"),
    event_nouns=("probe", "probes"),
    deletion="""\
Delete a tuning that has ended, with its probes and events. Its recommendation stays.

A later submission of the same request is probed again. A tuning that has not ended is refused with 409: cancel it
first.""",
)
SUBMITTED: Responses = {
    200: {
        "model": Tuning,
        "description": "A tuning that was served a stored recommendation.",
        "headers": SUBMITTED_HEADERS,
        "links": _WORK.own_links | RECOMMENDATION_LINK,
    },
    202: {
        "description": "Queued.",
        "headers": QUEUED_HEADERS,
        "links": _WORK.own_links,
    },
}

router = _WORK.router()


@router.post(
    "",
    summary="Submit a tuning",
    dependencies=[requires_scope(Scope.TUNINGS_WRITE), WAKES_WORKERS],
    status_code=HTTPStatus.ACCEPTED,
    response_model=Tuning,
    responses=SUBMITTED | declared(*SUBMISSION_STATUSES),
)
def submit_tuning(
    submission: Annotated[TuningSubmission, strict_body(TuningSubmission)],
    caller: CurrentCaller,
    context: Context,
    idempotency: IdempotencyHeader,
) -> Response:
    """Find the largest micro-batch that fits, and plan the effective batch size from it.

    Responds 202 and queues the tuning. Responds 200 if an earlier tuning of the same request has a recommendation,
    unless `fresh` is set.
    """
    response = context.tunings.submit(submission, caller, idempotency)
    return submitted(response, f"/v1/tunings/{response.work_id}")


_WORK.add_reading(router)
_WORK.add_bulk(router)


@router.get(
    "/{tuning_id}/probes",
    summary="Read the evidence of a tuning",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND),
)
def list_probes(tuning_id: TuningId, context: Context) -> ProbeList:
    """List the recorded probes of a tuning, in order."""
    return context.tunings.probes(tuning_id)


_WORK.add_following(router)
_WORK.add_ending(router)
