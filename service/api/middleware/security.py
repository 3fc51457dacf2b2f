"""What is refused before a route sees it: foreign names and origins, strangers, bodies too large or not JSON."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.authentication import HEALTH_PATHS, METRICS_PATH, PUBLIC_PATHS, Doors, identify
from service.api.middleware.host_names import host_name
from service.api.middleware.json_bounds import check_structure
from service.api.problems import problem_response
from service.auth.sessions import csrf_token_of
from service.errors import (
    BodyTooLargeError,
    CsrfTokenError,
    ForeignOriginError,
    HostNotAllowedError,
    ServiceError,
    UnsupportedMediaTypeError,
)

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_NO_BODY: Message = {"type": "http.response.body", "body": b"", "more_body": False}
_MOST_PUBLIC_BODY_BYTES = 8192
"""Cap on the bodies of public paths, which anyone may send: a form with an API key and the longest path fits."""
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_JSON = "application/json"
_FORM = "application/x-www-form-urlencoded"
_MOST_FIELDS = 10

CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"


@dataclass(frozen=True)
class PagePaths:
    """The paths of pages that are not like those of the API."""

    public: Sequence[str] = ()
    """Who is not known may ask for these; one that ends in `/` names all below it."""
    forms: Sequence[str] = ()
    """These take a form instead of JSON."""


class Guard:
    """An ASGI middleware.

    Args:
        app: what it guards.
        doors: what tells who calls.
        allowed_hosts: names the service answers to, without port.
        max_body_bytes: cap on request bodies, applied before anything is parsed.
        pages: the paths for people.
    """

    def __init__(
        self, app: ASGIApp, doors: Doors, allowed_hosts: Sequence[str], max_body_bytes: int, pages: PagePaths
    ) -> None:
        self._app = app
        self._doors = doors
        self._allowed_hosts = frozenset(
            host_name(name) or host_name(f"[{name}]") or name.lower() for name in allowed_hosts
        )
        self._max_body_bytes = max_body_bytes
        self._public = PUBLIC_PATHS.union(pages.public)
        self._public_below = tuple(path for path in pages.public if path.endswith("/"))
        self._forms = frozenset(pages.forms)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_host(headers, scope["path"])
            safe = scope["method"] in _SAFE_METHODS
            if not safe:
                _check_origin(headers)
            public = self._is_public(scope["path"])
            session = None if public else await self._identify(scope)
            if not safe:
                form = scope["path"] in self._forms
                most = min(_MOST_PUBLIC_BODY_BYTES, self._max_body_bytes) if public else self._max_body_bytes
                body, receive = await _checked_body(headers, receive, _FORM if form else _JSON, most)
                if session is not None:
                    _check_csrf(session, _field(body) if form else headers.get(CSRF_HEADER, ""))
        except ServiceError as error:
            await problem_response(error)(scope, receive, send)
            return
        kept = send if session is None else _private(send)
        if scope["method"] == "HEAD":
            await self._answer_head(scope, receive, kept)
        else:
            await self._app(scope, receive, kept)

    async def _answer_head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What GET would be answered with, without the body: of a stream that goes on, only its beginning is made."""
        asked = {**scope, "method": "GET"}
        with anyio.CancelScope() as answering:

            async def send_head(message: Message) -> None:
                await send(message if message["type"] != "http.response.body" else _NO_BODY)
                if message["type"] == "http.response.body":
                    answering.cancel()

            await self._app(asked, receive, send_head)
        scope.update((name, asked[name]) for name in asked.keys() - {"method"})  # which route it was

    async def _identify(self, scope: Scope) -> str | None:
        """Find out who calls; the token of their session, if that tells."""
        identity = await identify(self._doors, scope)
        state = scope.setdefault("state", {})
        state["caller"] = identity.caller
        if identity.session is not None:
            state["csrf_token"] = csrf_token_of(identity.session)
        return identity.session

    def _is_public(self, path: str) -> bool:
        return path in self._public or path.startswith(self._public_below)

    def _check_host(self, headers: Headers, path: str) -> None:
        """Refuse names that are not ours: by DNS rebinding a page of another site reads what needs no key here.

        Orchestrators and scrapers address a pod by its address, which no operator can list: health routes tell the same
        to anyone. The metrics are read with a key, which no page of another site has.
        """
        given = headers.getlist("host")
        name = host_name(given[0]) if len(given) == 1 else ""
        if name in self._allowed_hosts or (name and (path in HEALTH_PATHS or _shows_key(headers, path))):
            return
        raise HostNotAllowedError(
            f"this service does not answer to the name {name!r}; the operator adds names to BATCHWRIGHT_ALLOWED_HOSTS"
        )


def _shows_key(headers: Headers, path: str) -> bool:
    """Return whether the metrics are asked for with an API key, which is verified next: a wrong one is refused."""
    return path == METRICS_PATH and "authorization" in headers


async def _checked_body(headers: Headers, receive: Receive, expected: str, most_bytes: int) -> tuple[bytes, Receive]:
    """Read the body within the cap, and hand it on."""
    _check_length(int(length) if (length := headers.get("content-length", "")).isdigit() else 0, most_bytes)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return b"", _replay(message, receive)
        body += message.get("body", b"")
        _check_length(len(body), most_bytes)
        more = message.get("more_body", False)
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and media_type != expected:
        raise UnsupportedMediaTypeError(f"the body is {media_type or 'undeclared'}; it must be {expected}")
    whole = bytes(body)
    if expected == _JSON:
        check_structure(whole)
    return whole, _replay({"type": "http.request", "body": whole, "more_body": False}, receive)


def _check_length(length: int, most_bytes: int) -> None:
    if length > most_bytes:
        raise BodyTooLargeError(f"the body is above the cap of {most_bytes} bytes")


def _check_csrf(session: str, shown: str) -> None:
    """Refuse what a browser was made to send: a cookie comes along by itself, and this does not."""
    if not hmac.compare_digest(csrf_token_of(session).encode(), shown.encode("utf-8", "surrogateescape")):
        raise CsrfTokenError(
            f"who is signed in by a cookie shows the page's token in {CSRF_HEADER}: load the page again, or send an "
            "API key"
        )


def _field(body: bytes) -> str:
    """The token in a form."""
    try:
        return parse_qs(body.decode("ascii"), max_num_fields=_MOST_FIELDS).get(CSRF_FIELD, [""])[0]
    except ValueError:
        return ""


def _check_origin(headers: Headers) -> None:
    """A browser says where a request comes from; programs say nothing."""
    here = headers.get("host", "").lower()
    for origin in headers.getlist("origin"):
        if origin.lower() not in {f"http://{here}", f"https://{here}"}:
            raise ForeignOriginError(f"a page of {origin} may not make changes here")
    if headers.get("sec-fetch-site") in _FOREIGN_SITES:
        raise ForeignOriginError("a page of another site may not make changes here")


def _private(send: Send) -> Send:
    """A ``send`` that lets no shared cache keep the answer: of itself a cookie, unlike a key, does not forbid it."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).setdefault("Cache-Control", "private, no-cache")
        await send(message)

    return sent


def _replay(first: Message, receive: Receive) -> Receive:
    """A ``receive`` that begins with a message already taken."""
    pending = [first]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
