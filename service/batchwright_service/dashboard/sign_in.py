"""Routes that sign in with an API key, and sign out."""

import re
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs, quote

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from batchwright_service.api.authentication import SESSION_COOKIE, Authenticators, address_of, is_local, session_token
from batchwright_service.auth.sessions import SESSION_SECONDS
from batchwright_service.dashboard.error_pages import SIGN_IN
from batchwright_service.dashboard.page_responses import page, redirect
from batchwright_service.dashboard.pages import Pages
from batchwright_service.errors import NotAuthenticatedError

SIGN_OUT = "/sign-out"
_HOME = "/"
_LONGEST_PATH = 2000
_MOST_FIELDS = 10
_LOCAL_PATH = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*")
"""A path of this service. Excludes paths that browsers take for another host (`//`, `/\\`, control characters)."""

Endpoint = Callable[[Request], Awaitable[Response]]


def install(app: FastAPI, authenticators: Authenticators, pages: Pages) -> None:
    """Add the sign-in form and the routes that sign in and out."""
    routes = _SignInRoutes(authenticators, pages)
    app.add_route(SIGN_IN, routes.form, methods=["GET"], include_in_schema=False)
    app.add_route(SIGN_IN, routes.sign_in, methods=["POST"], include_in_schema=False)
    app.add_route(SIGN_OUT, routes.sign_out, methods=["POST"], include_in_schema=False)


class _SignInRoutes:
    """The sign-in form, sign-in and sign-out."""

    def __init__(self, authenticators: Authenticators, pages: Pages) -> None:
        self._authenticators = authenticators
        self._pages = pages

    async def form(self, request: Request) -> Response:
        """Show the form, or a link if no key is needed. A signed-in caller is redirected at once."""
        back = local_path(request.query_params.get("next", ""))
        if await self._is_signed_in(request):
            return _redirect_to(back)
        is_open = await run_in_threadpool(self._authenticators.api_keys.is_open, local=is_local(request.scope))
        return self._form_page(request, back, is_open=is_open)

    async def sign_in(self, request: Request) -> Response:
        """Redirect to the requested page with a session, or show the form again with the error."""
        fields = _fields(await request.body())
        back = local_path(fields.get("next", ""))
        try:
            key, address = fields.get("key", "").strip(), address_of(request.scope)
            token = await run_in_threadpool(self._authenticators.sessions.open, key, address)
        except NotAuthenticatedError as error:
            text = str(error)
            message = f"{text[:1].upper()}{text[1:]}."
            return self._form_page(request, back, message=message, challenge=error.challenge)
        await self._close(request)
        response = _redirect_to(back)
        _set_cookie(request, response, token, SESSION_SECONDS)
        return response

    async def sign_out(self, request: Request) -> Response:
        """End the session and redirect to the form."""
        await self._close(request)
        response = redirect(SIGN_IN)
        _set_cookie(request, response, "", 0)
        return response

    async def _is_signed_in(self, request: Request) -> bool:
        token = session_token(request.headers)
        try:
            return token is not None and bool(
                await run_in_threadpool(self._authenticators.sessions.authenticate, token)
            )
        except NotAuthenticatedError:
            return False

    async def _close(self, request: Request) -> None:
        """End the session of the request, if any."""
        if (token := session_token(request.headers)) is not None:
            await run_in_threadpool(self._authenticators.sessions.close, token, address_of(request.scope))

    def _form_page(
        self, request: Request, back: str, *, is_open: bool = False, message: str = "", challenge: str = ""
    ) -> Response:
        context = {"message": message, "open_here": is_open, "next": back, "path": SIGN_IN}
        text = self._pages.render("sign_in.html", request.scope, context)
        refused = {"WWW-Authenticate": challenge} if challenge else None
        return page(text, request.headers, 401 if refused else 200, refused)


def local_path(path: str) -> str:
    """Return the path if it is a page of this service, else that of the overview."""
    excluded = (SIGN_IN, SIGN_OUT)
    is_local_page = len(path) <= _LONGEST_PATH and _LOCAL_PATH.fullmatch(path) and not path.startswith(excluded)
    return path if is_local_page else _HOME


def _redirect_to(back: str) -> Response:
    return redirect(quote(back, safe="/%?&=+:,;@~!$*'()"))


def _fields(body: bytes) -> dict[str, str]:
    try:
        found = parse_qs(body.decode("ascii"), max_num_fields=_MOST_FIELDS)
    except ValueError:
        return {}
    return {name: values[0] for name, values in found.items()}


def _set_cookie(request: Request, response: Response, token: str, seconds: int) -> None:
    """Set the session cookie: `HttpOnly`, `SameSite=Strict`, without a domain, and `Secure` if the request used TLS.

    The `Origin` counts too, since a proxy may not report TLS: the security middleware has compared it with the host.
    """
    secure = request.url.scheme == "https" or request.headers.get("origin", "").lower().startswith("https://")
    response.set_cookie(
        SESSION_COOKIE, token, max_age=seconds, path="/", secure=secure, httponly=True, samesite="strict"
    )
