"""Shows problems to people: what the API says as a document becomes a page where a browser asked for one."""

from __future__ import annotations

from html import escape
from http import HTTPStatus
from urllib.parse import quote

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import PROBLEM_MEDIA_TYPE
from service.dashboard.pages import Pages
from service.dashboard.responses import page, redirect
from service.domain.problems import Problem
from service.problem_mapping import make_problem

SIGN_IN = "/sign-in"
_GO_ON = """\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}"><title>Batchwright</title></head>
<body><p><a href="{0}">Go on</a></p></body>
</html>
"""
"""Leads to where one signs in, from this site: along a link of another, and its redirects, browsers send no cookie that
is `SameSite=Strict`. Who is signed in is led on from there."""
_API = "/v1/"
_KEPT = frozenset({b"retry-after", b"allow", b"x-request-id"})


class ProblemPages:
    """An ASGI middleware, meant to be outside of everything that may answer with a problem.

    Who is not signed in and asks for a page is led to where one can.
    """

    def __init__(self, app: ASGIApp, pages: Pages) -> None:
        self._app = app
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; where it comes from a browser, look at the answer."""
        if scope["type"] != "http" or not _is_for_a_person(scope):
            await self._app(scope, receive, send)
            return
        held = _Held(send)
        await self._app(scope, receive, held.send)
        if held.start is not None:
            response = self._shown(scope, _problem_in(held))
            kept = [item for item in held.start["headers"] if item[0] in _KEPT]
            response.raw_headers.extend(kept)
            await response(scope, receive, send)

    def _shown(self, scope: Scope, problem: Problem) -> Response:
        status = problem.status or HTTPStatus.INTERNAL_SERVER_ERROR
        if status == HTTPStatus.UNAUTHORIZED:
            address = _sign_in_first(scope)
            if _is_from_elsewhere(scope):
                return page(_GO_ON.format(escape(address)), Headers(scope=scope))
            return redirect(address)
        text = self._pages.render("problem.html", scope, {"problem": problem, "status": int(status)})
        return page(text, Headers(scope=scope), status)


class _Held:
    """Passes an answer on, unless it is a problem: that is kept."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.start: Message | None = None
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        """Take a message of the answer."""
        if message["type"] == "http.response.start" and _is_problem(message):
            self.start = message
        elif self.start is not None and message["type"] == "http.response.body":
            self.body += message.get("body", b"")
        else:
            await self._send(message)


def _problem_in(held: _Held) -> Problem:
    """The problem of an answer; of one to HEAD, which has no body, as much as its status tells."""
    if held.body or held.start is None:
        return Problem.model_validate_json(bytes(held.body))
    status = HTTPStatus(held.start["status"])
    return make_problem(status, status.phrase.lower().replace(" ", "-"), status.phrase, status.description)


def _is_problem(start: Message) -> bool:
    return Headers(raw=list(start.get("headers", ()))).get("content-type") == PROBLEM_MEDIA_TYPE


def _is_for_a_person(scope: Scope) -> bool:
    """Whether a browser asks for a page. The API itself always answers with documents."""
    return not scope["path"].startswith(_API) and "text/html" in Headers(scope=scope).get("accept", "")


def _is_from_elsewhere(scope: Scope) -> bool:
    """Whether a browser follows a link of another site: who it comes from may be signed in nevertheless."""
    headers = Headers(scope=scope)
    followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return scope["method"] == "GET" and followed and headers.get("sec-fetch-site") in {"cross-site", "same-site"}


def _sign_in_first(scope: Scope) -> str:
    """Where to sign in, and to come back from."""
    path, query = quote(scope["path"]), scope.get("query_string", b"").decode("latin-1")
    back = path if scope["method"] in {"GET", "HEAD"} else "/"
    asked = f"{back}?{query}" if query and back == path else back
    return SIGN_IN if asked == "/" else f"{SIGN_IN}?next={quote(asked, safe='/')}"
