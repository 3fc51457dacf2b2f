"""A network that follows a script, and a clock that only the client moves: below both clients."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest

from batchwright.client import AsyncClient, Client
from batchwright.client.documents.states import State
from batchwright.client.resources.api import AsyncCalls
from batchwright.client.sync import run
from tests.support.factories import tuning_request

T = TypeVar("T")
Reply = httpx.Response | httpx.RequestError | Callable[[httpx.Request], httpx.Response]
Body = Callable[[AsyncCalls], Awaitable[T]]

RESET = httpx.ReadError("connection reset")
ROW: dict[str, Any] = {
    "id": "tun_1",
    "state": "RUNNING",
    "device": "cpu",
    "model": "mlp",
    "effective_batch_size": 100,
    "attempts": 1,
    "created_at": "2026-01-01T00:00:00Z",
    "updated_at": "2026-01-01T00:00:00Z",
    "events": 2,
    "fingerprint": "f",
    "probes": 0,
}
WHOLE = ROW | {"request": tuning_request().model_dump(mode="json")}


class Clock:
    """Time that passes only in the client's pauses, and when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        """A pause of the client."""
        self.pauses.append(seconds)
        self.now += seconds

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let the network of both clients take its time from here."""

        async def pause(seconds: float) -> None:
            self.pause(seconds)

        times = SimpleNamespace(monotonic=lambda: self.now, sleep=self.pause)
        patch.setattr("batchwright.client.transport.time", times)
        patch.setattr("batchwright.client.transport.asyncio", SimpleNamespace(sleep=pause))


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that comes in parts, and may break off."""

    def __init__(self, parts: Sequence[bytes], end: Exception | None = None) -> None:
        self._parts = parts
        self._end = end
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        if self._end is not None:
            raise self._end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part

    def close(self) -> None:
        """Remember it."""
        self.closed = True

    async def aclose(self) -> None:
        """Remember it."""
        self.closed = True


@dataclass
class Script:
    """Answers requests in order, the last answer for ever; keeps what was asked."""

    replies: Sequence[Reply]
    seen: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, or fail as the script says."""
        self.seen.append(request)
        reply = self.replies[min(len(self.seen), len(self.replies)) - 1]
        if isinstance(reply, httpx.RequestError):
            raise reply
        return _fresh(reply) if isinstance(reply, httpx.Response) else reply(request)


def _fresh(reply: httpx.Response) -> httpx.Response:
    """A response as nobody has read it yet; one that is streamed can be read only once."""
    if isinstance(reply.stream, Chunks):
        return reply
    return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)


class Driver:
    """Runs the same calls through the blocking or the asyncio client."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, script: Callable[[httpx.Request], httpx.Response], body: Body[T], **given: Any) -> T:
        """Return the result of ``body``, run with a client of this kind whose requests ``script`` serves."""
        transport = httpx.MockTransport(script)
        if self._kind == "blocking":
            with httpx.Client(transport=transport, base_url="http://test") as http:
                return run(_coroutine(body, Client(http=http, **given).calls))
        return asyncio.run(_over_asyncio(transport, body, given))

    def against(self, url: str, body: Body[T], **given: Any) -> T:
        """Return the result of ``body``, run with a client of this kind that calls a real service."""
        if self._kind == "blocking":
            with Client(url, **given) as client:
                return run(_coroutine(body, client.calls))
        return asyncio.run(_against(url, body, given))


async def _against(url: str, body: Body[T], given: dict[str, Any]) -> T:
    async with AsyncClient(url, **given) as client:
        return await body(client)


async def _over_asyncio(transport: httpx.MockTransport, body: Body[T], given: dict[str, Any]) -> T:
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await body(AsyncClient(http=http, **given))


async def _coroutine(body: Body[T], calls: AsyncCalls) -> T:
    return await body(calls)


def problem(status: int, code: str = "some-code", **headers: str) -> httpx.Response:
    """A refusal as the service words it."""
    document = {"type": f"urn:batchwright:problem:{code}", "title": "t", "status": status, "detail": "d", "code": code}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json=document, headers=names)


async def all_names(calls: AsyncCalls) -> list[str]:
    """The identifiers of every tuning."""
    return [row.id async for row in calls.tunings.list()]


def page(*ids: str, following: str | None = None) -> httpx.Response:
    """A page of tunings."""
    return httpx.Response(200, json={"items": [ROW | {"id": name} for name in ids], "next_cursor": following})


def tuning(state: State = State.RUNNING, **headers: str) -> httpx.Response:
    """A tuning."""
    return httpx.Response(200, json=WHOLE | {"state": state.value}, headers=headers)


def event_bytes(number: int, state: State) -> bytes:
    """An event of a stream."""
    event = {"id": number, "at": "2026-01-01T00:00:00Z", "kind": "state", "state": state.value}
    return f"id: {number}\nevent: state\ndata: {json.dumps(event)}\n\n".encode()


def stream(*parts: bytes, end: Exception | None = None) -> httpx.Response:
    """A stream of events that ends, or breaks off."""
    return streamed(Chunks(parts, end))


def streamed(body: Chunks) -> httpx.Response:
    """A stream of events with this body."""
    return httpx.Response(200, stream=body, headers={"Content-Type": "text/event-stream"})


@contextlib.contextmanager
def fake_time() -> Iterator[Clock]:
    """A clock for tests that cannot take a fixture."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        clock.install(patch)
        yield clock
