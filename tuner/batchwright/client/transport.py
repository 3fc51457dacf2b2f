"""Requests, streams and a clock for the core: over blocking sockets and over asyncio.

The core is written once, as coroutines. With ``BlockingTransport`` a coroutine is never suspended, because each call
below blocks, so that ``batchwright.client.sync`` runs it to its end without an event loop.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from httpx_sse import EventSource, ServerSentEvent, SSEError

from batchwright.client.errors import ClientError, ConnectionFailedError, UnexpectedResponseError
from batchwright.client.http_messages import Call

_CONNECT_SECONDS = 10.0
"""A reachable host accepts a connection within milliseconds."""


@dataclass(frozen=True)
class Stream:
    """A response whose server-sent events are read as they arrive. An unsuccessful one has been read to its end."""

    response: httpx.Response
    events: AsyncIterator[ServerSentEvent]


class Transport(ABC):
    """Sends requests, each with some headers, and translates the errors of httpx."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    @abstractmethod
    async def send(self, call: Call, timeout_seconds: float) -> httpx.Response:
        """Return the whole response to a call; ``timeout_seconds`` bounds each silence.

        Raises:
            ConnectionFailedError: when the service cannot be reached, or is silent for too long.
            UnexpectedResponseError: when the response is not valid HTTP.
        """

    @abstractmethod
    def stream(self, call: Call, timeout_seconds: float) -> AbstractAsyncContextManager[Stream]:
        """Open the response to a call as a stream, with the errors of ``send``, also while events are read."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait for this long."""

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()

    def _arguments(self, call: Call, timeout_seconds: float) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, _CONNECT_SECONDS))
        arguments = call.arguments()
        return {**arguments, "headers": {**arguments["headers"], **self._headers}, "timeout": timeout}


class BlockingTransport(Transport):
    """Transport over an ``httpx.Client``. No coroutine is ever suspended."""

    def __init__(self, http: httpx.Client, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._http = http

    async def send(self, call: Call, timeout_seconds: float) -> httpx.Response:
        """Send, blocking."""
        with translate_errors():
            return self._http.request(**self._arguments(call, timeout_seconds))

    @asynccontextmanager
    async def stream(self, call: Call, timeout_seconds: float) -> AsyncIterator[Stream]:
        """Open a stream, blocking."""
        with translate_errors(), self._http.stream(**self._arguments(call, timeout_seconds)) as response:
            if not response.is_success:
                response.read()
            yield Stream(response, _as_async(EventSource(response).iter_sse()))

    async def sleep(self, seconds: float) -> None:
        """Block for this long."""
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this


class AsyncTransport(Transport):
    """Transport over an ``httpx.AsyncClient``, on asyncio."""

    def __init__(self, http: httpx.AsyncClient, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._http = http

    async def send(self, call: Call, timeout_seconds: float) -> httpx.Response:
        """Send, on asyncio."""
        with translate_errors():
            return await self._http.request(**self._arguments(call, timeout_seconds))

    @asynccontextmanager
    async def stream(self, call: Call, timeout_seconds: float) -> AsyncIterator[Stream]:
        """Open a stream, on asyncio."""
        with translate_errors():
            async with self._http.stream(**self._arguments(call, timeout_seconds)) as response:
                if not response.is_success:
                    await response.aread()
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    yield Stream(response, events)

    async def sleep(self, seconds: float) -> None:
        """Wait on asyncio for this long."""
        await asyncio.sleep(seconds)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate the errors of httpx into those of the SDK; the only place that does."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL) as error:
        raise ClientError(f"the request cannot be sent: {error}; an address is like http://127.0.0.1:8000") from error
    except SSEError as error:  # a TransportError too, but a retry would not help
        raise UnexpectedResponseError(f"the response is not an event stream: {error}") from error
    except httpx.TransportError as error:
        raise ConnectionFailedError(f"the service cannot be reached: {type(error).__name__}: {error}") from error
    except httpx.RequestError as error:
        raise UnexpectedResponseError(f"the response cannot be read: {type(error).__name__}: {error}") from error
    except RuntimeError as error:
        if "has been closed" not in str(error):
            raise
        raise ClientError("the client has been closed: make another one") from error


async def _as_async(events: Iterable[ServerSentEvent]) -> AsyncIterator[ServerSentEvent]:
    for event in events:
        yield event
