"""What both clients do: calls with retries, long polls, streams that resume, pages. Opens no socket, reads no clock."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import TypeVar

import httpx

from service.client.errors import ClientError, ConnectionFailedError, NotFoundError, NotWaitedLongEnoughError
from service.client.etag_cache import EtagCache
from service.client.protocol import Call, DocumentT, event_in, parsed, problem_in
from service.client.retries import Patience, Retries
from service.client.transport import Network
from service.domain.states import State
from service.domain.work import Event, Job, Page, RowT, Tuning

_LONGEST_WAIT_SECONDS = 30.0
"""Of one long poll: below the idle limits of proxies, and below the service's own 60."""
_SHORTEST_WAIT_SECONDS = 1.0
"""Between polls of a service that does not wait, as one that is ending."""
_LATE_SECONDS = 5.0
"""How much later than its time a long poll may be answered when the caller's time is up."""
_SILENCE_SECONDS = 60.0
"""Of a stream: the service sends a keep-alive every 15."""

PAGE_SIZE = 50
"""Rows of a list that are fetched at a time."""

FollowedT = TypeVar("FollowedT", Tuning, Job)


class Core:
    """Makes calls over a network.

    Args:
        network: what sends them.
        retries: how those that may be are tried again.
        timeout_seconds: how long one answer may take, the time asked to wait for aside.
    """

    def __init__(self, network: Network, retries: Retries, timeout_seconds: float) -> None:
        self.network = network
        self._retries = retries
        self._timeout_seconds = timeout_seconds
        self._etags = EtagCache()

    async def call(self, kind: type[DocumentT], call: Call, extra_seconds: float = 0.0) -> DocumentT:
        """Make a call that answers with a ``kind``; ``extra_seconds`` is what it was asked to wait.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when it cannot be reached.
            UnexpectedAnswerError: when it answers something else.
        """
        return parsed(kind, await self.send(call, self._timeout_seconds + extra_seconds))

    async def read(self, kind: type[DocumentT], path: str) -> DocumentT:
        """What is at a path. What has not changed since it was last read here is not sent again.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when it cannot be reached.
            UnexpectedAnswerError: when it answers something else.
        """
        known = self._etags.find(kind, path)
        headers = {} if known is None else {"If-None-Match": known[0]}
        response = await self.send(Call("GET", path, headers=headers), self._timeout_seconds)
        if known is not None and response.status_code == HTTPStatus.NOT_MODIFIED:
            return known[1]
        document = parsed(kind, response)
        self._etags.keep(path, response.headers.get("ETag"), document)
        return document

    async def text(self, call: Call) -> str:
        """Make a call that answers with plain text.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when it cannot be reached.
        """
        return (await self.send(call, self._timeout_seconds)).text

    async def delete(self, path: str) -> None:
        """Have something deleted. A second try finds it gone: then the first one, whose answer was lost, did it.

        Raises:
            ApiError: when the service refuses, or nothing has this id.
            ConnectionFailedError: when it cannot be reached.
        """
        patience = Patience(self._retries)
        try:
            await self.send(Call("DELETE", path), self._timeout_seconds, patience)
        except NotFoundError:
            if not patience.failures:
                raise

    async def send(self, call: Call, timeout_seconds: float, patience: Patience | None = None) -> httpx.Response:
        """Make a call, again where that is harmless and may help.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when it cannot be reached.
        """
        patience = patience or Patience(self._retries)
        while True:
            try:
                return await self._once(call, timeout_seconds)
            except ClientError as error:
                pause = patience.pause_after(error, self.network.now()) if call.may_repeat else None
                if pause is None:
                    raise
            await self.network.sleep(pause)

    async def _once(self, call: Call, timeout_seconds: float) -> httpx.Response:
        response = await self.network.send(call, timeout_seconds)
        if (error := problem_in(response)) is not None:
            raise error
        return response

    async def until_ended(self, kind: type[FollowedT], path: str, timeout_seconds: float | None) -> FollowedT:
        """Long polls until it has ended. Survives restarts of the service.

        Raises:
            NotWaitedLongEnoughError: when it has not ended in time.
            ApiError: when the service refuses.
            ConnectionFailedError: when it cannot be reached.
        """
        began = self.network.now()
        until = None if timeout_seconds is None else began + timeout_seconds
        while True:
            asked = self.network.now()
            current = await self._poll(kind, path, until)
            if current.state.terminal:
                return current
            now = self.network.now()
            if until is not None and now >= until:
                raise NotWaitedLongEnoughError(f"{current.id} is {current.state} after {timeout_seconds:g} s")
            await self._not_before(asked + _SHORTEST_WAIT_SECONDS, until)

    async def _poll(self, kind: type[FollowedT], path: str, until: float | None) -> FollowedT:
        left = math.inf if until is None else max(0.0, until - self.network.now())
        seconds = min(left, _LONGEST_WAIT_SECONDS)
        call = Call("GET", path, {"wait": round(seconds, 3)})
        silence = min(seconds + self._timeout_seconds, left + _LATE_SECONDS)
        return parsed(kind, await self.send(call, silence, Patience(self._retries, until)))

    async def _not_before(self, time: float, until: float | None) -> None:
        left = (time if until is None else min(time, until)) - self.network.now()
        if left > 0:
            await self.network.sleep(left)

    async def rows(self, kind: type[Page[RowT]], call: Call) -> AsyncGenerator[RowT, None]:
        """The rows of a list, each page fetched when it is needed.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when it cannot be reached.
        """
        cursor: str | None = None
        while True:
            part = replace(call, query={**call.query, "cursor": cursor})
            page = parsed(kind, await self.send(part, self._timeout_seconds))
            for row in page.items:
                yield row
            if (cursor := page.next_cursor) is None:
                return

    async def events(self, path: str, after: int) -> AsyncGenerator[Event, None]:
        """Events to the last, connected anew where a connection breaks off.

        Raises:
            ApiError: when the service refuses.
            ConnectionFailedError: when it stays away.
        """
        patience = Patience(self._retries)
        ended = False
        while True:
            error: ClientError
            try:
                async with aclosing(self._one_stream(path, after, patience)) as stream:
                    async for event in stream:
                        after = event.id
                        yield event
                        ended = ended if event.state is None else event.state.terminal
                        if event.state is State.SUCCEEDED:
                            return  # after another end a job may have been resumed: the service ends the stream
            except _NothingMoreError:
                return
            except ClientError as caught:
                error = caught
            else:
                error = ConnectionFailedError("the stream of events ended before the last")
            if ended:
                return
            pause = patience.pause_after(error, self.network.now())
            if pause is None:
                raise error
            await self.network.sleep(pause)

    async def _one_stream(self, path: str, after: int, patience: Patience) -> AsyncGenerator[Event, None]:
        call = Call("GET", path, headers={"Accept": "text/event-stream", "Last-Event-ID": str(after)})
        async with self.network.stream(call, _SILENCE_SECONDS) as stream:
            if stream.response.status_code == HTTPStatus.NO_CONTENT:
                raise _NothingMoreError
            if (error := problem_in(stream.response)) is not None:
                raise error
            async for received in stream.events:
                patience.heard()
                if (event := event_in(received)) is not None:
                    patience.reset()
                    yield event


class _NothingMoreError(Exception):
    """The service says that no more events will come."""


class Resource:
    """A group of calls."""

    def __init__(self, core: Core) -> None:
        self._core = core
