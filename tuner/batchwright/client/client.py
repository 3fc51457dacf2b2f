"""The clients: one that blocks and one for asyncio, over the same calls."""

import math
import os
import re
from typing import Self

import httpx

from batchwright.client import sync
from batchwright.client.core import Core
from batchwright.client.errors import ClientError
from batchwright.client.resources.api import AsyncCalls
from batchwright.client.sync import Blocking
from batchwright.client.transport import AsyncTransport, BlockingTransport, Transport

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "BATCHWRIGHT_URL"
API_KEY_VARIABLE = "BATCHWRIGHT_API_KEY"

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)
"""Unlimited connections: each event stream occupies one, and must not block calls."""

_HEADER_VALUE = re.compile(r"[\x21-\x7e]+")
_LAST_PORT = 65_535


class AsyncClient(AsyncCalls):
    """A client of one service, on asyncio. Close it, or use it as a context manager.

    Args:
        base_url: where the service listens; the environment variable BATCHWRIGHT_URL when left out, else
            http://127.0.0.1:8000.
        api_key: the caller's API key; the environment variable BATCHWRIGHT_API_KEY when left out.
        timeout_seconds: how long the service may be silent before and within a response, not counting the time of a
            long poll; a connection has 10 s at most.
        retry_seconds: how long, from its first failure, a call that may be repeated is retried after lost connections,
            timeouts, 429, 502, 503 and 504; 0 for never.
        http: an `httpx.AsyncClient` to use instead, for example with a proxy; its owner closes it.

    Raises:
        ClientError: when the key, the address or a duration is malformed.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 60.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        headers = _authorization(api_key)
        self._owns_http = http is None
        self._http = httpx.AsyncClient(base_url=_address(base_url), limits=_LIMITS) if http is None else http
        super().__init__(_core(AsyncTransport(self._http, headers), timeout_seconds, retry_seconds))

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        if self._owns_http:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.aclose()


class Client(Blocking[AsyncCalls]):
    """A blocking client of one service, safe to share between threads. Close it, or use it as a context manager.

    The arguments and errors are those of ``AsyncClient``; ``http`` is an `httpx.Client`.
    """

    occupancy = sync.blocking(AsyncCalls.occupancy)
    summary = sync.blocking(AsyncCalls.summary)
    fleet = sync.blocking(AsyncCalls.fleet)
    livez = sync.blocking(AsyncCalls.livez)
    readyz = sync.blocking(AsyncCalls.readyz)
    call = sync.blocking(AsyncCalls.call)

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 60.0,
        http: httpx.Client | None = None,
    ) -> None:
        headers = _authorization(api_key)
        self._owns_http = http is None
        self._http = httpx.Client(base_url=_address(base_url), limits=_LIMITS) if http is None else http
        super().__init__(AsyncCalls(_core(BlockingTransport(self._http, headers), timeout_seconds, retry_seconds)))
        self.tunings = sync.Tunings(self.calls.tunings)
        self.recommendations = sync.Recommendations(self.calls.recommendations)
        self.jobs = sync.Jobs(self.calls.jobs)
        self.devices = sync.Devices(self.calls.devices)
        self.queue = sync.Queues(self.calls.queue)
        self.estimates = sync.Estimates(self.calls.estimates)
        self.gpus = sync.Gpus(self.calls.gpus)
        self.commands = sync.Commands(self.calls.commands)
        self.keys = sync.Keys(self.calls.keys)
        self.audit = sync.Audit(self.calls.audit)
        self.webhooks = sync.Webhooks(self.calls.webhooks)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._owns_http:
            self._http.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()


def _authorization(api_key: str | None) -> dict[str, str]:
    """Return the header with the given key, else with that of the environment. An error never shows the key."""
    given = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if not isinstance(given, str):
        raise ClientError(f"`api_key` must be a text, not {type(given).__name__}")
    key = given.strip()
    if not key:
        return {}
    if not _HEADER_VALUE.fullmatch(key):
        raise ClientError(f"the API key ({API_KEY_VARIABLE} or `api_key`) holds spaces or characters beyond ASCII")
    return {"Authorization": f"Bearer {key}"}


def _core(transport: Transport, timeout_seconds: float, retry_seconds: float) -> Core:
    """Build the core of a client, if the durations are numbers of seconds, and not too short."""
    for name, value, shortest in (("timeout_seconds", timeout_seconds, 1e-3), ("retry_seconds", retry_seconds, 0.0)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not shortest <= value < math.inf:
            raise ClientError(f"`{name}` must be a number of seconds of at least {shortest:g}, not {value!r}")
    return Core(transport, retry_seconds, timeout_seconds)


def _address(base_url: str | None) -> httpx.URL:
    """Parse the address of the service, or that of the environment."""
    base_url = (os.environ.get(URL_VARIABLE) or DEFAULT_URL) if base_url is None else base_url
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ClientError(f"the address {base_url!r} is malformed: {error}") from None
    if url.scheme not in {"http", "https"} or not url.host or "%20" in url.host:
        raise ClientError(f"the address {base_url!r} needs a scheme and a host, as in {DEFAULT_URL}")
    if url.port is not None and url.port > _LAST_PORT:
        raise ClientError(f"the address {base_url!r} has a port above {_LAST_PORT}")
    return url
