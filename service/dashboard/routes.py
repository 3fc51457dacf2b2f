"""The pages' addresses. What is on them the browser asks the API for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from service.api.authentication import Authenticators
from service.api.middleware.security import PagePaths
from service.dashboard import new_tuning, sign_in
from service.dashboard.assets import Assets
from service.dashboard.error_pages import SIGN_IN, ProblemPages
from service.dashboard.pages import Pages
from service.dashboard.responses import page

PATHS = PagePaths(public=(SIGN_IN, "/static/"), forms=(SIGN_IN, sign_in.SIGN_OUT))
"""Anyone may read where one signs in, and the files of the pages, which hold no data."""

_COMPARED = 8
"""Recommendations that are compared at most."""


@dataclass(frozen=True)
class _Page:
    """An address and its template; the parts of the path in braces are known to the template by their names."""

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
    _Page("/keys", "keys.html"),
)

Endpoint = Callable[[Request], Awaitable[Response]]


def install(app: FastAPI, authenticators: Authenticators, version: str) -> None:
    """Add the pages, none of which is in the API's document; and show problems as pages to browsers.

    Raises:
        ConfigurationError: when a file that the pages need is not installed.
    """
    assets = Assets()
    pages = Pages(assets, version)
    for it in _PAGES:
        app.add_route(it.path, _endpoint(it, pages), methods=["GET"], include_in_schema=False)
    sign_in.install(app, authenticators, pages)
    new_tuning.install(app)
    app.add_route("/static/{version}/{name}", _static(assets), methods=["GET"], include_in_schema=False)
    app.add_middleware(ProblemPages, pages=pages)


def _endpoint(it: _Page, pages: Pages) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        compared = list(dict.fromkeys(request.query_params.getlist("id")))[:_COMPARED]
        context = {**request.path_params, "path": it.path, "recommendation_ids": compared}
        return page(pages.render(it.template, request.scope, context), request.headers)

    return endpoint


def _static(assets: Assets) -> Endpoint:
    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        found = assets.find(request.path_params["version"], name)
        if found is None:
            raise HTTPException(404, f"there is no file {name!r}")
        asset, current = found
        return await run_in_threadpool(asset.response, request.headers, for_good=current)

    return static
