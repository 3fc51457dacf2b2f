"""/v1/estimates and /v1/gpus."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Body, Request

from service.api import examples
from service.api.authentication import needs
from service.api.context import Context
from service.api.dependencies import strictly
from service.api.events.change_feed import ChangeFeed
from service.api.problems import ALWAYS, declared
from service.api.strict_route import StrictRoute
from service.domain.api_keys import Scope
from service.domain.work import GpuList
from tuner.schemas.estimates import Estimate, EstimateRequest

router = APIRouter(prefix="/v1", tags=["estimates"], responses=ALWAYS, route_class=StrictRoute)


@router.post(
    "/estimates",
    operation_id="createEstimate",
    summary="Estimate what fits on GPUs",
    dependencies=[needs(Scope.TUNINGS_WRITE)],
    responses=declared(
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.GATEWAY_TIMEOUT,
    ),
)
async def create_estimate(
    submission: Annotated[
        EstimateRequest, strictly(EstimateRequest), Body(openapi_examples=examples.REQUESTS["EstimateRequest"])
    ],
    context: Context,
    request: Request,
) -> Estimate:
    """What a workload takes on GPUs that need not be here, with an interval and the plan. Nothing is measured.

    Answers when it is done, in seconds; a question asked before is answered from memory. Few are made at once: others
    wait for ten seconds, then are answered with `estimates-busy` and `Retry-After`. Closing the connection ends it.
    """
    estimates = context.estimates
    async with _while_connected(request, context.feed) as should_stop:
        return await to_thread.run_sync(estimates.estimate, submission, should_stop, limiter=estimates.threads)


@router.get(
    "/gpus", operation_id="listGpus", summary="List the GPUs of the catalogue", dependencies=[needs(Scope.TUNINGS_READ)]
)
async def list_gpus(context: Context) -> GpuList:
    """The GPUs that an estimate can name, with their memory and the source of every figure."""
    return context.estimates.gpus()


@asynccontextmanager
async def _while_connected(request: Request, feed: ChangeFeed) -> AsyncIterator[Callable[[], bool]]:
    """Tells whether to stop: the client is gone, or the service ends."""
    gone = threading.Event()
    watcher = asyncio.create_task(_watch(request, gone))
    try:
        yield lambda: gone.is_set() or feed.closed
    finally:
        watcher.cancel()


async def _watch(request: Request, gone: threading.Event) -> None:
    """Wait for the end of the connection: the body has been read, so that nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.set()
