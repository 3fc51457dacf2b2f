"""Who a request comes from, and what its route asks of them."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, cookie_parser
from starlette.types import Scope as AsgiScope

from service.api.docs_page import DOCS_FILES
from service.auth.api_keys import Access
from service.auth.sessions import Sessions
from service.domain.api_keys import Caller, Scope
from service.errors import NotAuthenticatedError, ScopeMissingError

HEALTH_PATHS = frozenset({"/livez", "/readyz"})
"""Asked by orchestrators, under whatever name or address they know this host by."""
METRICS_PATH = "/metrics"
PUBLIC_PATHS = HEALTH_PATHS | {"/openapi.json", "/docs", *(f"/docs/{name}" for name in DOCS_FILES)}
"""What anyone may read: whether the service works, and its description. Everything else needs a caller."""


class _DescribedOnly(HTTPBearer):
    """Only there for the document: the guard has verified the key before any route sees the request."""

    async def __call__(self, request: HTTPConnection) -> HTTPAuthorizationCredentials | None:
        del request
        return None


SESSION_COOKIE = "batchwright_session"
"""Carries the token of who signed in on the pages."""

_SCHEME = _DescribedOnly(
    scheme_name="apiKey",
    bearerFormat="bw_<id>_<secret>",
    description="An API key, made by `batchwright keys create`. Each operation names the scope it needs; `admin` has "
    "all. A service that listens on loopback needs none while no key was ever made.",
    auto_error=False,
)

_Described = Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]

# Dependencies are coroutines: a plain function would cost a hop to a thread each.

Standing = Callable[[], Awaitable[Caller]]
"""Who the caller of a request that lasts is by now; raises NotAuthenticatedError once the key is no longer good."""


@dataclass(frozen=True)
class Doors:
    """The ways in: with an API key, or signed in."""

    access: Access
    sessions: Sessions


@dataclass(frozen=True)
class Identity:
    """Who sent a request, and the token of the session it was sent in, if that is how they are known."""

    caller: Caller
    session: str | None = field(default=None, repr=False)


async def identify(doors: Doors, scope: AsgiScope) -> Identity:
    """Who sent this request. A key comes first; a session that is over counts as none where none is needed.

    Raises:
        NotAuthenticatedError: when that needs a key or a session, and there is no good one.
        StoreUnavailableError: when it cannot be looked up.
    """
    headers, local = Headers(scope=scope), is_local(scope)
    key = _key_in(headers)
    if key is None and (token := session_in(headers)) is not None:
        try:
            signed_in = doors.sessions.remembered(token)
            if signed_in is None:
                signed_in = await run_in_threadpool(doors.sessions.admit, token)
            return Identity(signed_in, token)
        except NotAuthenticatedError:
            if not await run_in_threadpool(doors.access.is_open, local=local):
                raise
    caller = doors.access.remembered(key, local=local)
    if caller is None:
        caller = await run_in_threadpool(doors.access.admit, key, local=local)
    return Identity(caller)


def session_in(headers: Headers) -> str | None:
    """The token of a session that a browser sends along."""
    sent = ";".join(headers.getlist("cookie"))
    return cookie_parser(sent).get(SESSION_COOKIE) if SESSION_COOKIE in sent else None


def _key_in(headers: Headers) -> str | None:
    """The key that a request carries.

    Raises:
        NotAuthenticatedError: when it authenticates in another way than with one key.
    """
    given = headers.getlist("authorization")
    if not given:
        return None
    scheme, _, key = given[0].strip().partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not key.strip():
        raise NotAuthenticatedError("send one API key: `Authorization: Bearer bw_...`", key_given=True)
    return key.strip()


def is_local(scope: AsgiScope) -> bool:
    """Whether it comes from this machine: over loopback, not handed on by a proxy that says so, or a Unix socket."""
    client = scope.get("client")
    return client is None or _is_loopback(client[0])


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


async def _caller(request: Request) -> Caller:
    """Put there by the guard; its absence is a fault, and fails."""
    caller: Caller = request.state.caller
    return caller


Calling = Annotated[Caller, Depends(_caller)]


def check_scope(request: Request, scope: Scope) -> None:
    """Refuse a caller who has not the scope.

    Raises:
        ScopeMissingError: naming it, and those that the caller has.
    """
    caller: Caller = request.state.caller
    if not caller.may(scope):
        held = ", ".join(sorted(caller.scopes)) or "none"
        raise ScopeMissingError(f"this needs the scope {scope}; API key {caller.key_id} has: {held}")


async def _check(request: Request, needed: SecurityScopes, _described: _Described) -> None:
    for scope in needed.scopes:
        check_scope(request, Scope(scope))


def needs(scope: Scope) -> Any:  # noqa: ANN401 - what FastAPI's `Security` gives
    """A route's dependency: the caller must have ``scope``. The document tells of it."""
    return Security(_check, scopes=[scope.value])
