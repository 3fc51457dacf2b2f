"""Authenticate the caller of a request, and check the scopes that its route requires."""

import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, cookie_parser
from starlette.types import Scope as AsgiScope

from batchwright.client.documents.api_keys import Scope
from batchwright_service.api.docs_page import DOCS_FILES
from batchwright_service.auth.api_keys import KeyAuthenticator
from batchwright_service.auth.sessions import Sessions
from batchwright_service.domain.callers import Caller
from batchwright_service.errors import NotAuthenticatedError, ScopeMissingError

_LONGEST_ADDRESS = 45
"""Characters of the longest IPv6 address."""
HEALTH_PATHS = frozenset({"/livez", "/readyz", "/readyz/database"})
"""Requested by orchestrators, under any name or address of this host."""
METRICS_PATH = "/metrics"
PUBLIC_PATHS = HEALTH_PATHS | {"/openapi.json", "/docs", *(f"/docs/{name}" for name in DOCS_FILES)}
"""Paths that need no authentication: the health checks and the API's description."""


class _DocumentedBearer(HTTPBearer):
    """Describe the authentication in the OpenAPI document. ``SecurityMiddleware`` has verified the key already."""

    async def __call__(self, request: HTTPConnection) -> HTTPAuthorizationCredentials | None:
        del request
        return None


SESSION_COOKIE = "batchwright_session"
"""The cookie that carries the session token of the dashboard."""

_SCHEME = _DocumentedBearer(
    scheme_name="apiKey",
    bearerFormat="bw_<id>_<secret>",
    description="An API key, created by `batchwright admin keys create`. Each operation names the scope it requires; "
    "`admin` includes all. A service that listens on loopback needs no key until the first one is created.",
    auto_error=False,
)

_Documented = Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]

# Dependencies are coroutines: a plain function would cost a hop to a thread each.

Reauthenticate = Callable[[], Awaitable[Caller]]
"""Authenticate the caller of a long request again; raises NotAuthenticatedError once the key is no longer valid."""


@dataclass(frozen=True)
class Authenticators:
    """The ways to authenticate: by API key or by session."""

    api_keys: KeyAuthenticator
    sessions: Sessions


@dataclass(frozen=True)
class Identity:
    """The caller of a request, and the session token where the caller is authenticated by session."""

    caller: Caller
    session: str | None = field(default=None, repr=False)


async def authenticate(authenticators: Authenticators, scope: AsgiScope) -> Identity:
    """Authenticate the sender of a request. An API key takes precedence over a session.

    An ended session is ignored where no authentication is required.

    Raises:
        NotAuthenticatedError: when a key or a session is required, and the request has no valid one.
        StoreUnavailableError: when the key or session cannot be looked up.
    """
    headers, local = Headers(scope=scope), is_local(scope)
    key = _key_in(headers)
    if key is None and (token := session_token(headers)) is not None:
        try:
            signed_in = authenticators.sessions.cached_caller(token)
            if signed_in is None:
                signed_in = await run_in_threadpool(authenticators.sessions.authenticate, token)
            return Identity(signed_in, token)
        except NotAuthenticatedError:
            if not await run_in_threadpool(authenticators.api_keys.is_open, local=local):
                raise
    caller = authenticators.api_keys.cached_caller(key, local=local)
    if caller is None:
        caller = await run_in_threadpool(authenticators.api_keys.authenticate, key, local=local)
    return Identity(caller)


def session_token(headers: Headers) -> str | None:
    """Return the session token in the cookies of a request, or None."""
    sent = ";".join(headers.getlist("cookie"))
    return cookie_parser(sent).get(SESSION_COOKIE) if SESSION_COOKIE in sent else None


def _key_in(headers: Headers) -> str | None:
    """Return the API key in a request's `Authorization` header, or None."""
    given = headers.getlist("authorization")
    if not given:
        return None
    scheme, _, key = given[0].strip().partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not key.strip():
        raise NotAuthenticatedError("send one API key: `Authorization: Bearer bw_...`", key_given=True)
    return key.strip()


def address_of(scope: AsgiScope) -> str | None:
    """Return the address of a request's connection; none for a Unix socket."""
    client = scope.get("client")
    return None if client is None or not client[0] else str(client[0])[:_LONGEST_ADDRESS]


def is_local(scope: AsgiScope) -> bool:
    """Return whether a request comes from this machine, by loopback or Unix socket, and not through a proxy."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


async def _caller(request: Request) -> Caller:
    """Return the caller that ``SecurityMiddleware`` has authenticated; fails where there is none."""
    caller: Caller = request.state.caller
    return replace(caller, address=address_of(request.scope))


CurrentCaller = Annotated[Caller, Depends(_caller)]


async def _check(request: Request, needed: SecurityScopes, _documented: _Documented) -> None:
    """Refuse a caller without the scopes."""
    caller: Caller = request.state.caller
    for scope in needed.scopes:
        if not caller.may(Scope(scope)):
            held = ", ".join(sorted(caller.scopes)) or "none"
            raise ScopeMissingError(f"this request requires the scope {scope}; API key {caller.key_id} has: {held}")


def requires_scope(scope: Scope) -> Any:  # noqa: ANN401 - the type that FastAPI's `Security` returns
    """Return a route dependency that requires ``scope``, and names the scope in the OpenAPI document."""
    return Security(_check, scopes=[scope.value])
