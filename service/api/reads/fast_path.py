"""Routes that are asked so often that reading their parameters counts.

The framework resolves parameters and dependencies in about the time of everything else together. A route of the class
here may have a shortcut, which answers the requests of the usual shape itself and leaves every other one, the invalid
ones included, to the framework. The document knows only the endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request, Response

from service.api.authentication import check_scope
from service.api.strict_route import Handler, StrictRoute
from service.domain.api_keys import Scope

Answer = Callable[[Request], Awaitable[Response | None]]
"""Answers a request, or leaves it to the framework."""

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])

_ATTRIBUTE = "shortcut"
_PAGE = re.compile(rb"(?:limit=([1-9]\d{0,2}))?(?:(?:^|&)cursor=([a-z][0-9a-f]{32}))?")
_MOST_ROWS = 200
_DEFAULT_ROWS = 50


def shortcut(scope: Scope, answer: Answer) -> Callable[[EndpointT], EndpointT]:
    """Give an endpoint a shortcut, for callers that have ``scope``."""

    def mark(endpoint: EndpointT) -> EndpointT:
        setattr(endpoint, _ATTRIBUTE, (scope, answer))
        return endpoint

    return mark


class ShortcutRoute(StrictRoute):
    """A route that takes its endpoint's shortcut where there is one."""

    def strict_handler(self) -> Handler:
        """The shortcut, and the framework's handler for the requests that the shortcut leaves."""
        usual = super().strict_handler()
        found: tuple[Scope, Answer] | None = getattr(self.endpoint, _ATTRIBUTE, None)
        if found is None:
            return usual
        scope, answer = found

        async def handle(request: Request) -> Response:
            check_scope(request, scope)
            response = await answer(request)
            return await usual(request) if response is None else response

        return handle


def plain_page(request: Request) -> tuple[int, str | None] | None:
    """Limit and cursor of a list without filters; none for anything else that may be asked of it."""
    found = _PAGE.fullmatch(request.scope["query_string"])
    limit = int(found[1] or _DEFAULT_ROWS) if found else 0
    if found is None or limit > _MOST_ROWS:
        return None
    return limit, found[2].decode() if found[2] else None
