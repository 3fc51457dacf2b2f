"""Signing in with an API key, and out."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs, quote

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from service.api.authentication import SESSION_COOKIE, Authenticators, is_local, session_token
from service.auth.sessions import SESSION_SECONDS
from service.dashboard.error_pages import SIGN_IN
from service.dashboard.pages import Pages
from service.dashboard.responses import page, redirect
from service.errors import NotAuthenticatedError

SIGN_OUT = "/sign-out"
_HOME = "/"
_LONGEST_PATH = 2000
_MOST_FIELDS = 10
_LOCAL_PATH = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*")
"""A path of ours: what browsers take for another host's (`//`, `/\\`, a control character between) is none."""

Endpoint = Callable[[Request], Awaitable[Response]]


def install(app: FastAPI, authenticators: Authenticators, pages: Pages) -> None:
    """Add the form, and what takes it; and what signs out."""
    door = _Door(authenticators, pages)
    app.add_route(SIGN_IN, door.form, methods=["GET"], include_in_schema=False)
    app.add_route(SIGN_IN, door.sign_in, methods=["POST"], include_in_schema=False)
    app.add_route(SIGN_OUT, door.sign_out, methods=["POST"], include_in_schema=False)


class _Door:
    """The three routes."""

    def __init__(self, authenticators: Authenticators, pages: Pages) -> None:
        self._authenticators = authenticators
        self._pages = pages

    async def form(self, request: Request) -> Response:
        """The form; where no key is needed, a way on; who is signed in goes on at once."""
        back = local_path(request.query_params.get("next", ""))
        if await self._is_signed_in(request):
            return _onward(back)
        is_open = await run_in_threadpool(self._authenticators.api_keys.is_open, local=is_local(request.scope))
        return self._shown(request, back, is_open=is_open)

    async def sign_in(self, request: Request) -> Response:
        """The page that was asked for, signed in; or the form again, with what is wrong."""
        fields = _fields(await request.body())
        back = local_path(fields.get("next", ""))
        try:
            token = await run_in_threadpool(self._authenticators.sessions.open, fields.get("key", "").strip())
        except NotAuthenticatedError as error:
            return self._shown(request, back, message=_sentence(error), challenge=error.challenge)
        await self._close(request)
        response = _onward(back)
        _set_cookie(request, response, token, SESSION_SECONDS)
        return response

    async def sign_out(self, request: Request) -> Response:
        """The form, signed out."""
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
        """End the session that the request came in, if any."""
        if (token := session_token(request.headers)) is not None:
            await run_in_threadpool(self._authenticators.sessions.close, token)

    def _shown(
        self, request: Request, back: str, *, is_open: bool = False, message: str = "", challenge: str = ""
    ) -> Response:
        context = {"message": message, "open_here": is_open, "next": back, "path": SIGN_IN}
        text = self._pages.render("sign_in.html", request.scope, context)
        refused = {"WWW-Authenticate": challenge} if challenge else None
        return page(text, request.headers, 401 if refused else 200, refused)


def local_path(path: str) -> str:
    """A path to go on to, of this service only; the overview for anything else."""
    aside = (SIGN_IN, SIGN_OUT)
    good = len(path) <= _LONGEST_PATH and _LOCAL_PATH.fullmatch(path) and not path.startswith(aside)
    return path if good else _HOME


def _onward(back: str) -> Response:
    return redirect(quote(back, safe="/%?&=+:,;@~!$*'()"))


def _fields(body: bytes) -> dict[str, str]:
    try:
        found = parse_qs(body.decode("ascii"), max_num_fields=_MOST_FIELDS)
    except ValueError:
        return {}
    return {name: values[0] for name, values in found.items()}


def _sentence(error: NotAuthenticatedError) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


def _set_cookie(request: Request, response: Response, token: str, seconds: int) -> None:
    """Only for this host, no script, no other site; over TLS only, where it came over TLS.

    The browser knows that better than a proxy that may not say so: the guard has compared the `Origin` with the host.
    """
    secure = request.url.scheme == "https" or request.headers.get("origin", "").lower().startswith("https://")
    response.set_cookie(
        SESSION_COOKIE, token, max_age=seconds, path="/", secure=secure, httponly=True, samesite="strict"
    )
