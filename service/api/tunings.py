"""/v1/tunings and /v1/recommendations."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from starlette.concurrency import run_in_threadpool

from service.api.authentication import Calling, Lasting, needs
from service.api.dependencies import (
    Cases,
    Cursor,
    DeviceFilter,
    Feed,
    FingerprintFilter,
    LastEventId,
    Limit,
    ModelFilter,
    RecommendationId,
    TuningId,
    Wait,
)
from service.api.following import event_stream, until_ended
from service.api.problems import declared
from service.domain import ProbeList, RecommendationPage, Tuning, TuningPage, TuningSubmission
from service.keys import Scope
from service.store.base import RecommendationFilter
from tuner.results import Recommendation

router = APIRouter(prefix="/v1", tags=["tunings"])

EXAMPLE: dict[str, Any] = {
    "spec": {
        "model": {"kind": "reference", "architecture": {"name": "gpt", "layers": 4, "heads": 4, "width": 256}},
        "batch": {"sequence_length": 256},
        "precision": "fp32",
        "data": {"kind": "synthetic"},
    },
    "effective_batch_size": 256,
    "device": "cpu",
    "memory_limit_bytes": 1073741824,
}

EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events. `id` is the event's number, `event` its kind, `data` an `Event` as JSON. "
        "The stream ends after the event of the last state.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    204: {"description": "It has ended, and there is nothing after `Last-Event-ID`."},
}


_SUBMITTED: dict[int | str, dict[str, Any]] = {
    200: {"model": Tuning, "description": "The stored answer to the same question."},
    202: {"description": "Queued.", "headers": {"Location": {"schema": {"type": "string"}}}},
}


@router.post(
    "/tunings",
    operation_id="submitTuning",
    summary="Submit a tuning",
    dependencies=[needs(Scope.TUNINGS_WRITE)],
    status_code=HTTPStatus.ACCEPTED,
    responses=_SUBMITTED
    | declared(
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.TOO_MANY_REQUESTS,
    ),
)
def submit_tuning(
    submission: Annotated[TuningSubmission, Body(openapi_examples={"gpt": {"value": EXAMPLE}})],
    caller: Calling,
    cases: Cases,
    response: Response,
) -> Tuning:
    """Find the largest micro-batch that fits, and plan the effective batch around it.

    Answers 202 and queues it, or 200 with the tuning that answered the same question before, unless `fresh` is set.
    """
    tuning, queued = cases.submit_tuning(submission, caller)
    response.status_code = HTTPStatus.ACCEPTED if queued else HTTPStatus.OK
    response.headers["Location"] = f"/v1/tunings/{tuning.id}"
    return tuning


@router.get(
    "/tunings",
    operation_id="listTunings",
    summary="List tunings",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def list_tunings(cases: Cases, limit: Limit = 50, cursor: Cursor = None) -> TuningPage:
    """Tunings, newest first, a page at a time."""
    return cases.tunings(limit, cursor)


@router.get(
    "/tunings/{tuning_id}",
    operation_id="getTuning",
    summary="Read a tuning",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def get_tuning(tuning_id: TuningId, cases: Cases, feed: Feed, standing: Lasting, wait: Wait = 0.0) -> Tuning:
    """One tuning. With `wait`, the answer comes when it has ended, or after that many seconds."""
    return await until_ended(partial(cases.tuning, tuning_id), feed, wait, standing)


@router.get(
    "/tunings/{tuning_id}/probes",
    operation_id="listProbes",
    summary="Read the evidence of a tuning",
    dependencies=[needs(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def list_probes(tuning_id: TuningId, cases: Cases) -> ProbeList:
    """Every probe that was recorded, in order."""
    return cases.probes(tuning_id)


@router.get(
    "/tunings/{tuning_id}/events",
    operation_id="followTuning",
    summary="Follow a tuning",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_class=Response,
    responses=EVENT_STREAM | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def follow_tuning(
    tuning_id: TuningId, cases: Cases, feed: Feed, standing: Lasting, last_event_id: LastEventId = 0
) -> Response:
    """State changes and probes as they happen, as server-sent events."""
    followed = await run_in_threadpool(cases.tuning, tuning_id)
    return event_stream(followed, cases, feed, standing, last_event_id)


@router.post(
    "/tunings/{tuning_id}/cancel",
    operation_id="cancelTuning",
    summary="Cancel a tuning",
    dependencies=[needs(Scope.TUNINGS_WRITE)],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def cancel_tuning(tuning_id: TuningId, caller: Calling, cases: Cases) -> Tuning:
    """End a tuning. One that has ended already stays as it is, so repeating this is harmless."""
    return cases.cancel_tuning(tuning_id, caller)


@router.get(
    "/recommendations",
    operation_id="listRecommendations",
    summary="Search recommendations",
    dependencies=[needs(Scope.TUNINGS_READ)],
    tags=["recommendations"],
    responses=declared(HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def list_recommendations(  # noqa: PLR0913, PLR0917 - one parameter per filter
    cases: Cases,
    fingerprint: FingerprintFilter = None,
    device: DeviceFilter = None,
    model: ModelFilter = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> RecommendationPage:
    """Recommendations, newest first, a page at a time."""
    wanted = RecommendationFilter(fingerprint=fingerprint, model=model, device=device)
    return cases.recommendations(wanted, limit, cursor)


@router.get(
    "/recommendations/{recommendation_id}",
    operation_id="getRecommendation",
    summary="Read a recommendation",
    dependencies=[needs(Scope.TUNINGS_READ)],
    tags=["recommendations"],
    responses=declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def get_recommendation(recommendation_id: RecommendationId, cases: Cases) -> Recommendation:
    """One recommendation: decision, plan and evidence."""
    return cases.recommendation(recommendation_id)
