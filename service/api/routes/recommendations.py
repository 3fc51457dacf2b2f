"""/v1/recommendations."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from service.api import examples
from service.api.authentication import needs
from service.api.context import ApiContext, Context, context_of
from service.api.dependencies import (
    LONGEST_TAGS,
    DeviceOrNameFilter,
    FingerprintFilter,
    IfNoneMatch,
    Limit,
    ModelFilter,
    ObjectiveFilter,
    PrecisionFilter,
    RecommendationCursor,
    RecommendationId,
)
from service.api.etags import NOT_MODIFIED, TAG_HEADERS, conditional, tagged
from service.api.problems import ALWAYS, declared
from service.api.reads.coalesced import AnswersPage
from service.api.reads.fast_path import FastRoute, fast_path
from service.api.responses import json_response, links, on_success
from service.domain.api_keys import Scope
from service.domain.work import RecommendationPage
from service.errors import NotFoundError
from service.store.models import RecommendationFilter
from tuner.schemas.recommendation import Recommendation

router = APIRouter(prefix="/v1/recommendations", tags=["recommendations"], responses=ALWAYS, route_class=FastRoute)

_UNCHANGING = {"Cache-Control": "private, max-age=3600, immutable", "Vary": "Authorization, Cookie"}
_ITS_JOB = {"submitJob": {"operationId": "submitJob", "description": "Takes its `id` as `recommendation_id`."}}


@router.get(
    "",
    operation_id="listRecommendations",
    summary="Search recommendations",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_model=RecommendationPage,
    responses=on_success(
        links=links("recommendation_id", "items/0/id", "getRecommendation"),
        content=examples.of("RecommendationPage"),
    )
    | declared(HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def list_recommendations(  # noqa: PLR0913, PLR0917 - one parameter per filter
    context: Context,
    fingerprint: FingerprintFilter = None,
    device: DeviceOrNameFilter = None,
    model: ModelFilter = None,
    precision: PrecisionFilter = None,
    objective: ObjectiveFilter = None,
    limit: Limit = 50,
    cursor: RecommendationCursor = None,
) -> Response:
    """Recommendations that match every filter, newest first, a page at a time."""
    wanted = RecommendationFilter(fingerprint, model, device, precision, objective)
    return json_response(await context.reads.recommendations.get(AnswersPage(limit, cursor, wanted)))


async def _answer(context: ApiContext, recommendation_id: str, if_none_match: str | None) -> Response:
    text = await context.reads.recommendation.get(recommendation_id)
    if text is None:
        raise NotFoundError.of("recommendation", recommendation_id)
    return conditional(tagged(text.encode()), if_none_match, _UNCHANGING)


def is_plain(known: str | None) -> bool:
    """Tell whether the fast path takes a header."""
    return known is None or len(known) <= LONGEST_TAGS


async def _at_once(request: Request) -> Response | None:
    known = request.headers.get("if-none-match")
    return (
        await _answer(context_of(request), request.path_params["recommendation_id"], known) if is_plain(known) else None
    )


@router.get(
    "/{recommendation_id}",
    operation_id="getRecommendation",
    summary="Read a recommendation",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_model=Recommendation,
    responses=on_success(
        headers=TAG_HEADERS,
        links=_ITS_JOB,
        content=examples.of("Recommendation"),
    )
    | NOT_MODIFIED
    | declared(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
@fast_path(Scope.TUNINGS_READ, _at_once)
async def get_recommendation(
    recommendation_id: RecommendationId, context: Context, if_none_match: IfNoneMatch = None
) -> Response:
    """One recommendation: decision, plan and evidence. It never changes."""
    return await _answer(context, recommendation_id, if_none_match)
