"""/v1/tunings."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import Body, Response

from service.api import examples
from service.api.authentication import Calling, needs
from service.api.context import Context
from service.api.dependencies import (
    DeviceFilter,
    FingerprintFilter,
    Limit,
    ModelFilter,
    Once,
    StateFilter,
    TuningCursor,
    TuningId,
    strictly,
)
from service.api.problems import declared
from service.api.reads.coalesced import Page
from service.api.responses import QUEUED_HEADERS, SUBMITTED_HEADERS, Responses, submitted
from service.api.routes.work import ITS_RECOMMENDATION, SUBMISSION_STATUSES, WorkRoutes
from service.domain.api_keys import Scope
from service.domain.states import WorkKind
from service.domain.work import ProbeList, Tuning, TuningPage, TuningSubmission
from service.store.models import WorkFilter, in_states


async def _page(  # noqa: PLR0913, PLR0917 - one parameter per filter
    state: StateFilter = None,
    device: DeviceFilter = None,
    model: ModelFilter = None,
    fingerprint: FingerprintFilter = None,
    limit: Limit = 50,
    cursor: TuningCursor = None,
) -> Page:
    return Page(limit, cursor, WorkFilter(in_states(state), device, model, fingerprint))


_WORK = WorkRoutes(
    kind=WorkKind.TUNING,
    document=Tuning,
    page=TuningPage,
    page_of=_page,
    read_scope=Scope.TUNINGS_READ,
    write_scope=Scope.TUNINGS_WRITE,
    item_links=("getTuning", "listProbes"),
    links=("getTuning", "listProbes", "followTuning", "cancelTuning", "deleteTuning"),
    example="TuningWithAnswer",
    news=("a probe", "probes"),
    deletion="""\
Delete a tuning that has ended, with its probes and events. Its recommendation stays.

The same question is probed again from then on. Cancel a tuning that has not ended first: it is refused with 409.""",
)
_SUBMITTED: Responses = {
    200: {
        "model": Tuning,
        "description": "The stored answer to the same question.",
        "headers": SUBMITTED_HEADERS,
        "links": _WORK.own_links | ITS_RECOMMENDATION,
        "content": examples.of("TuningWithAnswer"),
    },
    202: {
        "description": "Queued.",
        "headers": QUEUED_HEADERS,
        "links": _WORK.own_links,
        "content": examples.of("TuningQueued"),
    },
}

router = _WORK.router()


@router.post(
    "",
    operation_id="submitTuning",
    summary="Submit a tuning",
    dependencies=[needs(Scope.TUNINGS_WRITE)],
    status_code=HTTPStatus.ACCEPTED,
    response_model=Tuning,
    responses=_SUBMITTED | declared(*SUBMISSION_STATUSES),
)
def submit_tuning(
    submission: Annotated[
        TuningSubmission, strictly(TuningSubmission), Body(openapi_examples=examples.REQUESTS["TuningSubmission"])
    ],
    caller: Calling,
    context: Context,
    once: Once,
) -> Response:
    """Find the largest micro-batch that fits, and plan the effective batch around it.

    Answers 202 and queues it, or 200 with the tuning that answered the same question before, unless `fresh` is set.
    """
    answer = context.tunings.submit(submission, caller, once)
    return submitted(answer, f"/v1/tunings/{answer.work_id}")


_WORK.add_reading(router)


@router.get(
    "/{tuning_id}/probes",
    operation_id="listProbes",
    summary="Read the evidence of a tuning",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND),
)
def list_probes(tuning_id: TuningId, context: Context) -> ProbeList:
    """Every probe that was recorded, in order."""
    return context.tunings.probes(tuning_id)


_WORK.add_following(router)
_WORK.add_ending(router)
