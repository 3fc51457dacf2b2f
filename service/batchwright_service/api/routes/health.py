"""The health routes: `/livez`, `/readyz`, `/readyz/database` and `/metrics`."""

from http import HTTPStatus
from typing import Any

from anyio import to_thread
from fastapi import Response

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.workers import Health
from batchwright_service.api.authentication import METRICS_PATH, requires_scope
from batchwright_service.api.context import Context
from batchwright_service.api.problems import COMMON_STATUSES, declared
from batchwright_service.api.strict_route import strict_router
from batchwright_service.observability.metrics import MEDIA_TYPE

router = strict_router("operations", responses=declared(*COMMON_STATUSES))

_EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The metrics of this process and of the queue, in Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


@router.get("/livez", summary="Check liveness")
async def check_liveness() -> Health:
    """Respond as long as the process does. Nothing else is checked."""
    return Health(status="ok")


@router.get("/readyz", summary="Check readiness")
async def check_readiness(context: Context) -> Health:
    """Check that the database can be written, that a worker is alive, and that queued work is being taken.

    Responds 503 with every reason otherwise. Work that waits behind other work, however long, is not a reason.
    """
    check = context.readiness.check
    return await to_thread.run_sync(check, limiter=check.threads)


@router.get("/readyz/database", summary="Check the database")
async def check_database(context: Context) -> Health:
    """Check that the database can be written. The readiness probe of an API that runs apart from its workers.

    Such an API takes work while no worker is alive, so that a probe of `/readyz` would take every replica away.
    """
    check = context.readiness.database
    return await to_thread.run_sync(check, limiter=check.threads)


@router.get(
    METRICS_PATH,
    summary="Read the metrics",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
    response_class=Response,
    responses=_EXPOSITION | declared(HTTPStatus.UNAUTHORIZED),
)
def read_metrics(context: Context) -> Response:
    """Read the metrics for Prometheus. Separate worker processes serve theirs on another port (`--metrics-port`)."""
    return Response(context.instruments.metrics.exposition(), headers={"Content-Type": MEDIA_TYPE})
