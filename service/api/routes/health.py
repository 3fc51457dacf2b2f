"""/readyz and /metrics: what those ask who watch the service."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Response

from service.api.authentication import METRICS_PATH, needs
from service.api.context import Context
from service.api.problems import COMMON_STATUSES, declared
from service.api.strict_route import StrictRoute
from service.domain.api_keys import Scope
from service.domain.workers import Health
from service.observability.metrics import MEDIA_TYPE

router = APIRouter(tags=["operations"], responses=declared(*COMMON_STATUSES), route_class=StrictRoute)

_EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The measurements of this process, and the queue, in Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


@router.get("/readyz", operation_id="checkReadiness", summary="Whether work can be done")
async def readyz(context: Context) -> Health:
    """Writes to the database, looks whether a worker was heard of lately, and whether work that waits is being taken.

    Answers 503 with every reason when not. Work that waits behind other work, however long, is no reason.
    """
    return await to_thread.run_sync(context.readiness.check, limiter=context.readiness.threads)


@router.get(
    METRICS_PATH,
    operation_id="readMetrics",
    summary="Read the metrics",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_class=Response,
    responses=_EXPOSITION | declared(HTTPStatus.UNAUTHORIZED),
)
def read_metrics(context: Context) -> Response:
    """What Prometheus reads. Workers that run apart serve theirs on a port of their own (`--metrics-port`)."""
    return Response(context.instruments.metrics.exposition(), headers={"Content-Type": MEDIA_TYPE})
