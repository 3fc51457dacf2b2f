"""Puts the routes together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from service.api.authentication import Doors
from service.api.events.change_feed import ChangeFeed
from service.api.middleware.security import Guard, PagePaths
from service.api.openapi import DESCRIPTION, TAGS, install_document
from service.api.problems import COMMON_STATUSES, declared, install_handlers
from service.api.reads.coalesced import Reads
from service.api.routes import api_keys, estimates, exports, jobs, operations, recommendations, tunings
from service.application import UseCases
from service.application.estimates import Estimates


@dataclass(frozen=True)
class Parts:
    """What the routes call."""

    cases: UseCases
    estimates: Estimates
    doors: Doors


@dataclass(frozen=True)
class AppOptions:
    """What an operator can set about the HTTP side."""

    version: str
    allowed_hosts: Sequence[str]
    max_body_bytes: int
    pages: PagePaths


def make_app(parts: Parts, options: AppOptions, on_start: Callable[[], None], on_stop: Callable[[], None]) -> FastAPI:
    """The application. ``on_start`` and ``on_stop`` may block; they run around its life."""
    feed = ChangeFeed(parts.cases.event_counts)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(on_start)
        await run_in_threadpool(app.openapi)  # which takes seconds: not while anyone waits
        yield
        feed.close()
        await run_in_threadpool(on_stop)

    app = FastAPI(
        title="Batchwright",
        version=options.version,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        contact={"name": "Batchwright"},
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_url=None,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=declared(*COMMON_STATUSES),
    )
    app.state.use_cases = parts.cases
    app.state.estimates = parts.estimates
    app.state.doors = parts.doors
    app.state.feed = feed
    app.state.reads = Reads(parts.cases)
    for module in (recommendations, tunings, jobs, exports, estimates, api_keys, operations):  # most asked first
        app.router.routes.extend(module.router.routes)  # `include_router` would match every request twice
    install_document(app)
    install_handlers(app)
    app.add_middleware(
        Guard,
        doors=parts.doors,
        allowed_hosts=options.allowed_hosts,
        max_body_bytes=options.max_body_bytes,
        pages=options.pages,
    )
    return app
