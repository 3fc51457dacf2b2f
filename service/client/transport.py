"""What the core needs of the world: requests, streams, a clock. Once over blocking sockets, once over asyncio.

The core is written once, as coroutines. Over ``BlockingNetwork`` these never wait: each call below blocks instead, so
that ``service.client.sync`` runs them to their end without an event loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from httpx_sse import EventSource, ServerSentEvent, SSEError

from service.client.errors import ClientError, ConnectionFailedError, UnexpectedAnswerError
from service.client.protocol import Call

_CONNECT_SECONDS = 10.0
"""A host that is there answers to this in milliseconds."""


@dataclass(frozen=True)
class Stream:
    """A response whose server-sent events are read as they arrive. One without success has been read to its end."""

    response: httpx.Response
    events: AsyncIterator[ServerSentEvent]


class Network(ABC):
    """Sends requests. Errors of httpx come out as the SDK's.

    Args:
        headers: sent with every request.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    @abstractmethod
    async def send(self, call: Call, timeout_seconds: float) -> httpx.Response:
        """The whole answer to a call; ``timeout_seconds`` bounds each silence.

        Raises:
            ConnectionFailedError: when the service cannot be reached, or is silent for too long.
            UnexpectedAnswerError: when what comes is no HTTP that can be read.
        """

    @abstractmethod
    def stream(self, call: Call, timeout_seconds: float) -> AbstractAsyncContextManager[Stream]:
        """The answer to a call while it comes, as ``send``; errors may come with any event."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait."""

    def now(self) -> float:
        """Seconds that only rise."""
        return time.monotonic()

    def _arguments(self, call: Call, timeout_seconds: float) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, _CONNECT_SECONDS))
        arguments = call.arguments()
        return {**arguments, "headers": {**arguments["headers"], **self._headers}, "timeout": timeout}


class BlockingNetwork(Network):
    """Over an ``httpx.Client``. Nothing here ever waits for an event loop."""

    def __init__(self, http: httpx.Client, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._http = http

    async def send(self, call: Call, timeout_seconds: float) -> httpx.Response:
        """As declared, blocking."""
        with translated():
            return self._http.request(**self._arguments(call, timeout_seconds))

    @asynccontextmanager
    async def stream(self, call: Call, timeout_seconds: float) -> AsyncIterator[Stream]:
        """As declared, blocking."""
        with translated(), self._http.stream(**self._arguments(call, timeout_seconds)) as response:
            if not response.is_success:
                response.read()
            yield Stream(response, _each(EventSource(response).iter_sse()))

    async def sleep(self, seconds: float) -> None:
        """As declared, blocking."""
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this


class AsyncNetwork(Network):
    """Over an ``httpx.AsyncClient``, on asyncio."""

    def __init__(self, http: httpx.AsyncClient, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._http = http

    async def send(self, call: Call, timeout_seconds: float) -> httpx.Response:
        """As declared."""
        with translated():
            return await self._http.request(**self._arguments(call, timeout_seconds))

    @asynccontextmanager
    async def stream(self, call: Call, timeout_seconds: float) -> AsyncIterator[Stream]:
        """As declared."""
        with translated():
            async with self._http.stream(**self._arguments(call, timeout_seconds)) as response:
                if not response.is_success:
                    await response.aread()
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    yield Stream(response, events)

    async def sleep(self, seconds: float) -> None:
        """As declared."""
        await asyncio.sleep(seconds)


@contextmanager
def translated() -> Iterator[None]:
    """The one seam where httpx's errors become ours."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL) as error:
        raise ClientError(f"the request cannot be sent: {error}; an address is like http://127.0.0.1:8000") from error
    except SSEError as error:  # a TransportError too, but nothing that another try would change
        raise UnexpectedAnswerError(f"the answer is no event stream: {error}") from error
    except httpx.TransportError as error:
        raise ConnectionFailedError(f"the service cannot be reached: {type(error).__name__}: {error}") from error
    except httpx.RequestError as error:
        raise UnexpectedAnswerError(f"the answer cannot be read: {type(error).__name__}: {error}") from error


async def _each(events: Iterable[ServerSentEvent]) -> AsyncIterator[ServerSentEvent]:
    for event in events:
        yield event
