"""/readyz and /metrics: what those ask who watch the service; and the watching of every request."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, Request, Response

from service.api.authentication import METRICS_PATH, needs
from service.api.middleware.observability import Observed
from service.api.problems import declared
from service.api.strict_route import StrictRoute
from service.application.readiness import Readiness
from service.domain.api_keys import Scope
from service.domain.workers import Health
from service.observability.instruments import Instruments
from service.observability.metrics import MEDIA_TYPE, Metrics

router = APIRouter(tags=["operations"], route_class=StrictRoute)

_EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The measurements of this process, and the queue, in Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


@dataclass(frozen=True)
class Watch:
    """What the routes of this module ask."""

    metrics: Metrics
    readiness: Readiness
    turn: CapacityLimiter
    """Of looking at readiness: who waits for it holds no thread of the other routes."""


def install(app: FastAPI, instruments: Instruments, readiness: Readiness) -> None:
    """Add the routes, and observe every request from outside of all that ``app`` does."""
    app.state.watch = Watch(instruments.metrics, readiness, CapacityLimiter(1))
    app.include_router(router)
    app.add_middleware(Observed, metrics=instruments.metrics, spans=instruments.spans)


async def _watch(request: Request) -> Watch:
    watch: Watch = request.app.state.watch
    return watch


Watching = Annotated[Watch, Depends(_watch)]


@router.get("/readyz", operation_id="checkReadiness", summary="Whether work can be done")
async def readyz(watch: Watching) -> Health:
    """Writes to the database, looks whether a worker was heard of lately, and whether work that waits is being taken.

    Answers 503 with every reason when not. Work that waits behind other work, however long, is no reason.
    """
    return await to_thread.run_sync(watch.readiness.check, limiter=watch.turn)


@router.get(
    METRICS_PATH,
    operation_id="readMetrics",
    summary="Read the metrics",
    dependencies=[needs(Scope.TUNINGS_READ)],
    response_class=Response,
    responses=_EXPOSITION | declared(HTTPStatus.UNAUTHORIZED),
)
def read_metrics(watch: Watching) -> Response:
    """What Prometheus reads. Workers that run apart serve theirs on a port of their own (`--metrics-port`)."""
    return Response(watch.metrics.exposition(), headers={"Content-Type": MEDIA_TYPE})
