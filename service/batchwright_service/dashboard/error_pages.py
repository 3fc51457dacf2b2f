"""Error pages: a problem document becomes an HTML page where a browser requested one."""

from html import escape
from http import HTTPStatus
from urllib.parse import quote

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright.client.documents.problems import Problem
from batchwright_service.api.problems import PROBLEM_MEDIA_TYPE
from batchwright_service.dashboard.page_responses import page, redirect
from batchwright_service.dashboard.pages import Pages
from batchwright_service.problem_mapping import make_problem

SIGN_IN = "/sign-in"
_CONTINUE = """\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}"><title>Batchwright</title></head>
<body><p><a href="{0}">Continue</a></p></body>
</html>
"""
"""Opens the sign-in page from this site, which sends signed-in visitors on. A browser that follows another site's link
sends no cookie that is `SameSite=Strict`, not even after a redirect."""
_API = "/v1/"
_FORWARDED_HEADERS = frozenset({b"retry-after", b"allow", b"x-request-id"})


class ProblemPages:
    """An ASGI middleware, outside of everything that may respond with a problem.

    Requests for a page without a session are redirected to the sign-in page.
    """

    def __init__(self, app: ASGIApp, pages: Pages) -> None:
        self._app = app
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Where a browser requested a page, replace a problem document by a page."""
        may_be_page = scope["type"] == "http" and not scope["path"].startswith(_API)
        if not may_be_page or "text/html" not in Headers(scope=scope).get("accept", ""):
            await self._app(scope, receive, send)
            return
        buffer = _ProblemBuffer(send)
        await self._app(scope, receive, buffer.send)
        if buffer.start is not None:
            response = self._page(scope, _problem_in(buffer))
            forwarded = [item for item in buffer.start["headers"] if item[0] in _FORWARDED_HEADERS]
            response.raw_headers.extend(forwarded)
            await response(scope, receive, send)

    def _page(self, scope: Scope, problem: Problem) -> Response:
        status = problem.status or HTTPStatus.INTERNAL_SERVER_ERROR
        if status == HTTPStatus.UNAUTHORIZED:
            address = _sign_in_address(scope)
            headers = Headers(scope=scope)
            navigates = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
            is_cross_site = headers.get("sec-fetch-site") in {
                "cross-site",
                "same-site",
            }  # sends no cookie
            if scope["method"] == "GET" and navigates and is_cross_site:
                return page(_CONTINUE.format(escape(address)), headers)
            return redirect(address)
        text = self._pages.render("problem.html", scope, {"problem": problem, "status": int(status)})
        return page(text, Headers(scope=scope), status)


class _ProblemBuffer:
    """Passes a response on, unless it is a problem, which is buffered."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.start: Message | None = None
        self.body = bytearray()

    async def send(self, message: Message) -> None:
        """Take a message of the response."""
        begins, headers = message["type"] == "http.response.start", Headers(raw=list(message.get("headers", ())))
        if begins and headers.get("content-type") == PROBLEM_MEDIA_TYPE:
            self.start = message
        elif self.start is not None and message["type"] == "http.response.body":
            self.body += message.get("body", b"")
        else:
            await self._send(message)


def _problem_in(buffer: _ProblemBuffer) -> Problem:
    """Return the problem of a response. A response to HEAD has no body: its problem is made from the status."""
    if buffer.body or buffer.start is None:
        return Problem.model_validate_json(bytes(buffer.body))
    status = HTTPStatus(buffer.start["status"])
    return make_problem(status, status.phrase.lower().replace(" ", "-"), status.phrase, status.description)


def _sign_in_address(scope: Scope) -> str:
    """Return the address of the sign-in page, with the page to return to."""
    path, query = quote(scope["path"]), scope.get("query_string", b"").decode("latin-1")
    back = path if scope["method"] in {"GET", "HEAD"} else "/"
    target = f"{back}?{query}" if query and back == path else back
    return SIGN_IN if target == "/" else f"{SIGN_IN}?next={quote(target, safe='/')}"
