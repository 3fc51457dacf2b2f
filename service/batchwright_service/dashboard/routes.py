"""The routes of the pages, which hold no data: the browser reads the data from the API."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from batchwright_service.api.authentication import Authenticators
from batchwright_service.api.middleware.security import PagePaths
from batchwright_service.dashboard import new_tuning, sign_in
from batchwright_service.dashboard.assets import Assets
from batchwright_service.dashboard.error_pages import SIGN_IN, ProblemPages
from batchwright_service.dashboard.page_responses import SECURITY_HEADERS, page
from batchwright_service.dashboard.pages import Pages

PATHS = PagePaths(public=(SIGN_IN, "/static/"), forms=(SIGN_IN, sign_in.SIGN_OUT))
"""The sign-in page and the static files are public, and hold no data."""

_MAX_COMPARED = 8
"""Most recommendations on the page that compares them."""


@dataclass(frozen=True)
class _Page:
    """A route and its template; path parameters are variables of the template."""

    path: str
    template: str


_PAGES = (
    _Page("/", "overview.html"),
    _Page("/tunings", "tunings.html"),
    _Page("/tunings/new", "new_tuning.html"),
    _Page("/tunings/{tuning_id}", "tuning.html"),
    _Page("/recommendations", "recommendations.html"),
    _Page("/recommendations/compare", "compare.html"),
    _Page("/recommendations/{recommendation_id}", "recommendation.html"),
    _Page("/jobs", "jobs.html"),
    _Page("/jobs/{job_id}", "job.html"),
    _Page("/devices/{slot:path}", "device.html"),
    _Page("/keys", "keys.html"),
    _Page("/webhooks", "webhooks.html"),
    _Page("/webhooks/{webhook_id}", "webhook.html"),
    _Page("/audit", "audit.html"),
)

Endpoint = Callable[[Request], Awaitable[Response]]


def install(app: FastAPI, authenticators: Authenticators) -> None:
    """Add the pages, which are not in the API's document, and show problems to browsers as pages.

    Raises:
        ConfigurationError: when a file that the pages need is not installed.
    """
    assets = Assets()
    pages = Pages(assets, app.version)
    for page_route in _PAGES:
        app.add_route(page_route.path, _endpoint(page_route, pages), methods=["GET"], include_in_schema=False)
    sign_in.install(app, authenticators, pages)
    new_tuning.install(app)
    app.add_route("/static/{version}/{name}", _static(assets), methods=["GET"], include_in_schema=False)
    app.add_middleware(ProblemPages, pages=pages)


def _endpoint(page_route: _Page, pages: Pages) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        compared = list(dict.fromkeys(request.query_params.getlist("id")))[:_MAX_COMPARED]
        context = {**request.path_params, "path": page_route.path, "recommendation_ids": compared}
        return page(pages.render(page_route.template, request.scope, context), request.headers)

    return endpoint


def _static(assets: Assets) -> Endpoint:
    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        found = assets.find(request.path_params["version"], name)
        if found is None:
            raise HTTPException(404, f"there is no static file {name!r}")
        asset, current = found
        caching = {"Cache-Control": "public, max-age=31536000, immutable" if current else "no-cache"}
        return await run_in_threadpool(asset.response, request.headers, SECURITY_HEADERS | caching)

    return static
