"""Assemble the FastAPI application from its routes and middleware."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from batchwright_service.api.context import ApiContext
from batchwright_service.api.middleware.observability import ObservabilityMiddleware
from batchwright_service.api.middleware.security import PagePaths, SecurityMiddleware
from batchwright_service.api.openapi import DESCRIPTION, TAGS, install_document
from batchwright_service.api.problems import install_handlers
from batchwright_service.api.routes import (
    api_keys,
    audit,
    commands,
    estimates,
    exports,
    health,
    jobs,
    operations,
    recommendations,
    tunings,
    webhooks,
)
from batchwright_service.settings import Settings


def make_app(
    context: ApiContext, settings: Settings, pages: PagePaths, on_start: Callable[[], None], on_stop: Callable[[], None]
) -> FastAPI:
    """Build the application. ``on_start`` and ``on_stop`` run at its start and end, and may block."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(on_start)
        await run_in_threadpool(app.openapi)  # generating the document takes seconds: do so before the first request
        yield
        context.feed.close()
        await run_in_threadpool(on_stop)

    app = FastAPI(
        title="Batchwright",
        version=metadata.version("batchwright"),
        description=DESCRIPTION,
        openapi_tags=TAGS,
        contact={"name": "Batchwright"},
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        openapi_url=None,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.context = context
    for module in (
        recommendations,
        tunings,
        jobs,
        exports,
        estimates,
        commands,
        api_keys,
        audit,
        webhooks,
        operations,
        health,
    ):  # most frequently requested first
        app.router.routes.extend(module.router.routes)  # `include_router` would match every request twice
    install_document(app)
    install_handlers(app)
    app.add_middleware(
        SecurityMiddleware,
        authenticators=context.authenticators,
        allowed_hosts=settings.allowed_hosts,
        max_body_bytes=settings.max_body_bytes,
        pages=pages,
    )
    app.add_middleware(ObservabilityMiddleware, metrics=context.instruments.metrics, spans=context.instruments.spans)
    return app
