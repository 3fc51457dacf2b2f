"""The routes of `/v1/estimates` and `/v1/gpus`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated

from anyio import to_thread
from fastapi import Request, Response

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.work import GpuList
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright_service.api.authentication import requires_scope
from batchwright_service.api.context import Context
from batchwright_service.api.dependencies import IfNoneMatch, strict_body
from batchwright_service.api.etags import NOT_MODIFIED, TAG_HEADERS, StaticContent
from batchwright_service.api.events.change_feed import ChangeFeed
from batchwright_service.api.problems import BODY_STATUSES, declared
from batchwright_service.api.responses import on_success
from batchwright_service.api.strict_route import strict_router
from batchwright_service.application.estimates import EstimateCases

_GPUS = StaticContent(lambda: EstimateCases.gpus().model_dump_json().encode())
_GPU_HEADERS = {"Cache-Control": "private, no-cache", "Vary": "Accept-Encoding, Authorization, Cookie"}

router = strict_router("estimates", "/v1")


@router.post(
    "/estimates",
    summary="Estimate what fits on GPUs",
    dependencies=[requires_scope(Scope.TUNINGS_WRITE)],
    responses=declared(*BODY_STATUSES, HTTPStatus.GATEWAY_TIMEOUT),
)
async def create_estimate(
    submission: Annotated[EstimateRequest, strict_body(EstimateRequest)],
    context: Context,
    request: Request,
) -> Estimate:
    """Estimate the memory of a workload on GPUs, with an interval and the plan. Nothing is measured, no GPU is needed.

    The response takes seconds; repeated requests are served from a cache. Few estimates are made at once: others wait
    for ten seconds, then fail with `estimates-busy` and `Retry-After`. Closing the connection cancels the estimate.
    """
    estimates = context.estimates
    async with _while_connected(request, context.feed) as should_stop:
        return await to_thread.run_sync(estimates.estimate, submission, should_stop, limiter=estimates.threads)


@router.get(
    "/gpus",
    summary="List the known GPUs",
    dependencies=[requires_scope(Scope.TUNINGS_READ)],
    response_model=GpuList,
    responses=on_success(headers=TAG_HEADERS) | NOT_MODIFIED,
)
async def list_gpus(request: Request, _if_none_match: IfNoneMatch = None) -> Response:
    """List the GPUs that an estimate can name, with their memory and the source of every figure.

    The list changes with the version of the service alone. It is compressed for clients that accept gzip.
    """
    return _GPUS.response(request.headers, _GPU_HEADERS)


@asynccontextmanager
async def _while_connected(request: Request, feed: ChangeFeed) -> AsyncIterator[Callable[[], bool]]:
    """Yield a function that returns whether the client has disconnected or the service is stopping."""
    disconnected = threading.Event()
    watcher = asyncio.create_task(_wait_for_disconnect(request, disconnected))
    try:
        yield lambda: disconnected.is_set() or feed.closed
    finally:
        watcher.cancel()


async def _wait_for_disconnect(request: Request, disconnected: threading.Event) -> None:
    """Wait for the end of the connection. The body has been read, so that no other message can follow."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    disconnected.set()
