"""Refuse foreign hosts and origins, unauthenticated callers, and bodies that are too large or not JSON."""

import hmac
import ipaddress
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchwright_service.api.authentication import (
    HEALTH_PATHS,
    METRICS_PATH,
    PUBLIC_PATHS,
    Authenticators,
    authenticate,
)
from batchwright_service.api.problems import problem_response
from batchwright_service.auth.sessions import csrf_token_of
from batchwright_service.errors import (
    BodyTooLargeError,
    CsrfTokenError,
    ForeignOriginError,
    HostNotAllowedError,
    InvalidInputError,
    MalformedJsonError,
    ServiceError,
    UnsupportedMediaTypeError,
)

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_NO_BODY: Message = {"type": "http.response.body", "body": b"", "more_body": False}
_MAX_PUBLIC_BODY_BYTES = 8192
"""Limit on the bodies of public paths, which anyone may send. A form with an API key and the longest path fits."""
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_JSON = "application/json"
_FORM = "application/x-www-form-urlencoded"
_MAX_FIELDS = 10
_SINGLE_HEADERS = (
    "content-length",
    "content-type",
    "idempotency-key",
    "last-event-id",
    "transfer-encoding",
    "x-csrf-token",
)

CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"


@dataclass(frozen=True)
class PagePaths:
    """Paths of pages that are treated differently from those of the API."""

    public: Sequence[str] = ()
    """Paths that need no authentication. A path that ends in `/` includes all paths below it."""
    forms: Sequence[str] = ()
    """Paths that take a form instead of JSON."""


class SecurityMiddleware:
    """An ASGI middleware that refuses requests before a route sees them.

    Args:
        app: the wrapped application.
        authenticators: authenticate the caller.
        allowed_hosts: host names of this service, without port.
        max_body_bytes: limit on request bodies, applied before they are parsed.
        pages: paths of the dashboard.
    """

    def __init__(
        self,
        app: ASGIApp,
        authenticators: Authenticators,
        allowed_hosts: Sequence[str],
        max_body_bytes: int,
        pages: PagePaths,
    ) -> None:
        self._app = app
        self._authenticators = authenticators
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
        headers = Headers(scope=scope)
        try:
            _check_single(headers)
            self._check_host(headers, scope["path"])
            safe = scope["method"] in _SAFE_METHODS
            if not safe:
                _check_origin(headers)
            public = scope["path"] in self._public or scope["path"].startswith(self._public_below)
            session = None if public else await self._identify(scope)
            if not safe:
                form = scope["path"] in self._forms
                most = min(_MAX_PUBLIC_BODY_BYTES, self._max_body_bytes) if public else self._max_body_bytes
                body, receive = await _checked_body(headers, receive, _FORM if form else _JSON, most)
                if session is not None:
                    _check_csrf(session, _field(body) if form else headers.get(CSRF_HEADER, ""))
        except ServiceError as error:
            refused = problem_response(error)
            if "transfer-encoding" in headers and "content-length" in headers:
                refused.headers["Connection"] = "close"  # RFC 9112, 6.3: where the body ends is not certain
            await refused(scope, receive, send)
            return
        private_send = send if session is None else _private(send)
        if scope["method"] == "HEAD":
            await self._respond_to_head(scope, receive, private_send)
        else:
            await self._app(scope, receive, private_send)

    async def _respond_to_head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond as to GET, without the body. A stream is cancelled after its start."""
        get_scope = {**scope, "method": "GET"}
        with anyio.CancelScope() as response_scope:

            async def send_head(message: Message) -> None:
                await send(message if message["type"] != "http.response.body" else _NO_BODY)
                if message["type"] == "http.response.body":
                    response_scope.cancel()

            await self._app(get_scope, receive, send_head)
        scope.update(
            (name, get_scope[name]) for name in get_scope.keys() - {"method"}
        )  # the matched route, for the metrics

    async def _identify(self, scope: Scope) -> str | None:
        """Authenticate the caller, and return the session token where there is one."""
        identity = await authenticate(self._authenticators, scope)
        state = scope.setdefault("state", {})
        state["caller"] = identity.caller
        if identity.session is not None:
            state["csrf_token"] = csrf_token_of(identity.session)
        return identity.session

    def _check_host(self, headers: Headers, path: str) -> None:
        """Refuse names of other hosts: by DNS rebinding a foreign page could read a service that requires no key.

        Orchestrators and scrapers use the address of a pod, which no operator can list. The health routes are therefore
        exempt, and so are metrics requested with a key, which no foreign page has.
        """
        given = headers.getlist("host")
        name = host_name(given[0]) if len(given) == 1 else ""
        is_exempt = path in HEALTH_PATHS or (path == METRICS_PATH and "authorization" in headers)
        if name in self._allowed_hosts or (name and is_exempt):
            return
        raise HostNotAllowedError(
            f"the host name {name!r} is not allowed; the operator can add it to BATCHWRIGHT_ALLOWED_HOSTS"
        )


async def _checked_body(headers: Headers, receive: Receive, expected: str, max_bytes: int) -> tuple[bytes, Receive]:
    """Read and check the body. Return the body, and a ``receive`` that replays it to the application."""
    _check_length(int(length) if (length := headers.get("content-length", "")).isdigit() else 0, max_bytes)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return b"", _replay(message, receive)
        body += message.get("body", b"")
        _check_length(len(body), max_bytes)
        more = message.get("more_body", False)
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and media_type != expected:
        raise UnsupportedMediaTypeError(
            f"the media type of the body is {media_type or 'undeclared'}; it must be {expected}"
        )
    whole = bytes(body)
    if expected == _JSON:
        check_structure(whole)
    return whole, _replay({"type": "http.request", "body": whole, "more_body": False}, receive)


def _check_single(headers: Headers) -> None:
    """Refuse headers of one value that are repeated: a proxy may take another of their values."""
    counts = Counter(headers.keys())
    repeated = sorted(name for name in _SINGLE_HEADERS if counts[name] > 1)
    if repeated:
        raise InvalidInputError(f"the header {repeated[0]} is sent {counts[repeated[0]]} times: send it once")
    if "transfer-encoding" in counts and "content-length" in counts:
        raise InvalidInputError("Content-Length and Transfer-Encoding exclude each other: send one of them")


def _check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise BodyTooLargeError(f"the body exceeds the limit of {max_bytes} bytes")


def _check_csrf(session: str, sent: str) -> None:
    """Refuse a forged request of a browser, which sends the cookie but cannot know the CSRF token."""
    if not hmac.compare_digest(csrf_token_of(session).encode(), sent.encode("utf-8", "surrogateescape")):
        raise CsrfTokenError(
            f"a request with a session cookie must send the page's CSRF token in {CSRF_HEADER}; reload the page, or "
            "send an API key"
        )


def _field(body: bytes) -> str:
    """Return the CSRF token in a form; empty if there is none."""
    try:
        return parse_qs(body.decode("ascii"), max_num_fields=_MAX_FIELDS).get(CSRF_FIELD, [""])[0]
    except ValueError:
        return ""


def _check_origin(headers: Headers) -> None:
    """Refuse changes from pages of other origins, which browsers declare in headers."""
    here = headers.get("host", "").lower()
    for origin in headers.getlist("origin"):
        if origin.lower() not in {f"http://{here}", f"https://{here}"}:
            raise ForeignOriginError(f"a page of {origin} may not change this service")
    if headers.get("sec-fetch-site") in _FOREIGN_SITES:
        raise ForeignOriginError("a page of another site may not change this service")


def _private(send: Send) -> Send:
    """Return a ``send`` that forbids shared caches to store the response, which a cookie alone does not do."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).setdefault("Cache-Control", "private, no-cache")
        await send(message)

    return sent


def _replay(first: Message, receive: Receive) -> Receive:
    """Return a ``receive`` that begins with a message that was received before."""
    pending = [first]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


_MAX_LENGTH = 255 + len(":65535")
"""The longest valid name with a port."""
_HOST = re.compile(
    r"(?:\[(?P<address>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]*))(?::(?P<port>[0-9]{0,5}))?"
)
_LAST_PORT = 65_535


def host_name(header: str) -> str:
    """Return the name or address in a Host header, in lower case, without port and brackets; empty if it is invalid.

    Userinfo (`name@host`), percent escapes, spaces and other parts of URLs are invalid in a Host header.
    """
    found = _HOST.fullmatch(header) if len(header) <= _MAX_LENGTH else None
    if found is None or int(found["port"] or 0) > _LAST_PORT:
        return ""
    if not found["address"]:
        return found["name"].lower()
    try:
        return str(ipaddress.IPv6Address(found["address"]))
    except ValueError:
        return ""


MAX_VALUES = 10_000
"""Maximum number of members of objects and elements of arrays in one body.

Validating as many faults takes about 0.2 s. The largest bodies in use, a model's configuration with the names of a
thousand classes, have some thousands.
"""
MAX_DEPTH = 64
"""Maximum depth of nesting; the deepest document of the service has about ten levels."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)
"""A string, or the rest of the body where a string does not end. The match takes linear time in any text."""
_BRACKET = re.compile(rb"[\[\]{}]")


def check_structure(body: bytes) -> None:
    """Refuse a body with too many values, or nested too deeply. The check takes some milliseconds for 1 MiB.

    Raises:
        BodyTooLargeError: names the limit.
        MalformedJsonError: when the body contains a NUL byte, as UTF-16 and UTF-32 do, where the counts would be wrong.
    """
    if b"\0" in body:
        raise MalformedJsonError("the body contains a NUL byte; send JSON as UTF-8, with control characters escaped")
    if body.count(b",") + _opened(body) <= MAX_DEPTH:
        return
    bare = _STRING.sub(b"", body)
    if bare.count(b",") + _opened(bare) > MAX_VALUES:
        raise BodyTooLargeError(f"the body has more than {MAX_VALUES} values; send fewer")
    if _depth(bare) > MAX_DEPTH:
        raise BodyTooLargeError(f"the body is nested more than {MAX_DEPTH} levels deep")


def _opened(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _depth(bare: bytes) -> int:
    """Return the depth of nesting in JSON whose strings were removed."""
    level = deepest = 0
    for bracket in _BRACKET.findall(bare):
        level += 1 if bracket in b"[{" else -1
        deepest = max(deepest, level)
    return deepest
