"""The routes of `/v1/recommendations`."""

from functools import partial
from http import HTTPStatus

from fastapi import Response

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.staleness import Staleness
from batchwright.client.documents.work import RecommendationPage, Tuning
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.api.authentication import CurrentCaller, requires_scope
from batchwright_service.api.context import WAKES_WORKERS, Context
from batchwright_service.api.dependencies import (
    DeviceOrNameFilter,
    Distinct,
    FingerprintFilter,
    Format,
    IdempotencyHeader,
    IfNoneMatch,
    Limit,
    ModelFilter,
    ObjectiveFilter,
    PrecisionFilter,
    RecommendationCursor,
    RecommendationId,
    RecommendationSearch,
    StaleFilter,
    Total,
)
from batchwright_service.api.etags import NOT_MODIFIED, TAG_HEADERS, conditional, tagged
from batchwright_service.api.problems import declared
from batchwright_service.api.reads.coalesced import RecommendationListQuery
from batchwright_service.api.reads.row_streams import ROW_CONTENT, RowFormat, stream_rows
from batchwright_service.api.responses import json_response, links, on_success, submitted
from batchwright_service.api.routes.tunings import SUBMITTED
from batchwright_service.api.routes.work import SUBMISSION_STATUSES
from batchwright_service.api.strict_route import strict_router
from batchwright_service.errors import NotFoundError
from batchwright_service.store.models import RecommendationFilter

router = strict_router("recommendations", "/v1/recommendations")

_UNCHANGING = {"Cache-Control": "private, max-age=3600, immutable", "Vary": "Authorization, Cookie"}
_JOB_LINK = {
    "submitJob": {
        "operationId": "submitJob",
        "description": "Takes the `id` of the recommendation as `recommendation_id`.",
    }
}


@router.get(
    "",
    summary="List recommendations",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
    response_model=RecommendationPage,
    responses=on_success(
        links=links("recommendation_id", "items/0/id", "getRecommendation"),
        content=ROW_CONTENT,
    )
    | declared(HTTPStatus.BAD_REQUEST),
)
async def list_recommendations(  # noqa: PLR0913, PLR0917 - one parameter per filter
    context: Context,
    search: RecommendationSearch,
    fingerprint: FingerprintFilter = None,
    device: DeviceOrNameFilter = None,
    model: ModelFilter = None,
    precision: PrecisionFilter = None,
    objective: ObjectiveFilter = None,
    stale: StaleFilter = None,
    limit: Limit = 50,
    cursor: RecommendationCursor = None,
    form: Format = RowFormat.JSON,
    *,
    distinct: Distinct = False,
    total: Total = False,
) -> Response:
    """List the recommendations that match every filter, newest first, in pages.

    Each is marked as stale when torch, the driver or the hardware of its device has changed since it was made.
    """
    filters = RecommendationFilter(
        fingerprint, model, device, precision, objective, search, distinct=distinct or search.sort == "uses"
    )
    if form is not RowFormat.JSON:
        rows = partial(context.tunings.recommendation_rows, filters, stale=stale)
        return await stream_rows(rows, cursor, form, "recommendations")
    query = RecommendationListQuery(limit, cursor, filters, stale, total)
    return json_response(await context.reads.recommendations.get(query))


@router.get(
    "/{recommendation_id}",
    summary="Read a recommendation",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
    response_model=Recommendation,
    responses=on_success(headers=TAG_HEADERS, links=_JOB_LINK) | NOT_MODIFIED | declared(HTTPStatus.NOT_FOUND),
)
async def get_recommendation(
    recommendation_id: RecommendationId, context: Context, if_none_match: IfNoneMatch = None
) -> Response:
    """Read a recommendation: decision, plan and evidence. It never changes."""
    text = await context.reads.recommendation.get(recommendation_id)
    if text is None:
        raise NotFoundError.of("recommendation", recommendation_id)
    return conditional(tagged(text.encode()), if_none_match, _UNCHANGING)


@router.get(
    "/{recommendation_id}/staleness",
    summary="Read whether a recommendation still holds",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
    responses=declared(HTTPStatus.NOT_FOUND),
)
def read_staleness(recommendation_id: RecommendationId, context: Context) -> Staleness:
    """Read what has changed on the device of a recommendation since it was made, as its worker reports now.

    The recommendation itself never changes.
    """
    return context.tunings.staleness(recommendation_id)


@router.post(
    "/{recommendation_id}/confirm",
    summary="Confirm a recommendation",
    dependencies=[requires_scope(Scope.TUNINGS_WRITE), WAKES_WORKERS],
    status_code=HTTPStatus.ACCEPTED,
    response_model=Tuning,
    responses=SUBMITTED | declared(*SUBMISSION_STATUSES),
)
def confirm_recommendation(
    recommendation_id: RecommendationId, caller: CurrentCaller, context: Context, idempotency: IdempotencyHeader
) -> Response:
    """Submit a tuning for the same request under the versions of today, which one probe may confirm.

    When the recommended size fits and takes as much memory as before, the recommendation is no longer stale. A plan of
    two sizes is run too. Otherwise the tuning searches, and its recommendation replaces the stale one. Responds 200
    when such a tuning has ended before.
    """
    response = context.tunings.confirm(recommendation_id, caller, idempotency)
    return submitted(response, f"/v1/tunings/{response.work_id}")
