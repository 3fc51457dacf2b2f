"""The core of both clients: calls with retries, long polls, resumed streams, pages. Opens no socket, reads no clock."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import TypeVar

import httpx
from cachetools import LRUCache
from pydantic import BaseModel

from batchwright.client.documents.bulk import BulkAction, BulkResponse, BulkResult, BulkSubmission
from batchwright.client.documents.states import State
from batchwright.client.documents.work import Event, Page, RowT
from batchwright.client.errors import ClientError, ConnectionFailedError, NotFoundError, WaitTimeoutError
from batchwright.client.http_messages import Call, DocumentT, error_in, parse_document, parse_event
from batchwright.client.sdk_documents import Job, Tuning
from batchwright.client.transport import Transport

_LONGEST_WAIT_SECONDS = 30.0
"""Longest long poll: below the idle limits of proxies, and below the service's own 60."""
_SHORTEST_WAIT_SECONDS = 1.0
"""Shortest time between polls of a service that does not wait, such as one that is shutting down."""
_LATE_SECONDS = 5.0
"""Tolerated delay of a long poll's response once the caller's time is up."""
_SILENCE_SECONDS = 60.0
"""Longest silence of a stream: the service sends a keep-alive every 15 s."""

PAGE_SIZE = 50
"""Rows fetched with each page of a list."""

FollowedT = TypeVar("FollowedT", Tuning, Job)


class Core:
    """Makes calls over a transport, with the errors of ``Resource``.

    ``timeout_seconds`` is how long the service may be silent, not counting the time of a long poll.
    """

    def __init__(self, transport: Transport, retry_seconds: float, timeout_seconds: float) -> None:
        self.transport = transport
        self._retry_seconds = retry_seconds
        self._timeout_seconds = timeout_seconds
        self._etags = EtagCache()

    async def call(self, kind: type[DocumentT], call: Call, extra_seconds: float = 0.0) -> DocumentT:
        """Make a call whose response is a ``kind``; ``extra_seconds`` is the time the service was asked to wait."""
        return parse_document(kind, await self.send(call, self._timeout_seconds + extra_seconds))

    async def read(self, kind: type[DocumentT], path: str) -> DocumentT:
        """Return the document at a path, which the service does not send again if it has not changed since."""
        cached = self._etags.find(kind, path)
        headers = {} if cached is None else {"If-None-Match": cached[0]}
        response = await self.send(Call("GET", path, headers=headers), self._timeout_seconds)
        if cached is not None and response.status_code == HTTPStatus.NOT_MODIFIED:
            return cached[1]
        document = parse_document(kind, response)
        self._etags.store(path, response.headers.get("ETag"), document)
        return document

    async def text(self, call: Call) -> str:
        """Make a call whose response is plain text."""
        return (await self.send(call, self._timeout_seconds)).text

    async def delete(self, path: str) -> None:
        """Delete the resource at a path. A retry that finds nothing succeeds: the lost response was of a deletion.

        Raises:
            NotFoundError: when there is nothing with this id.
        """
        budget = RetryBudget(self._retry_seconds)
        try:
            await self.send(Call("DELETE", path), self._timeout_seconds, budget)
        except NotFoundError:
            if not budget.failures:
                raise

    async def change_all(self, path: str, submission: BulkSubmission) -> tuple[BulkResult, ...]:
        """Cancel or delete several pieces of work, and return the result for each.

        What a retry does not find was deleted: the lost response was of its deletion.
        """
        budget = RetryBudget(self._retry_seconds)
        call = Call("POST", path, body=submission, repeatable=True)
        found = parse_document(BulkResponse, await self.send(call, self._timeout_seconds, budget)).items
        if not budget.failures or submission.action is not BulkAction.DELETE:
            return found
        deleted = {"status": HTTPStatus.NO_CONTENT, "problem": None}
        return tuple(
            result.model_copy(update=deleted) if result.status == HTTPStatus.NOT_FOUND else result for result in found
        )

    async def send(self, call: Call, timeout_seconds: float, budget: RetryBudget | None = None) -> httpx.Response:
        """Make a call, with retries if it is repeatable and the error is transient."""
        budget = budget or RetryBudget(self._retry_seconds)
        while True:
            try:
                return await self._once(call, timeout_seconds)
            except ClientError as error:
                pause = budget.pause_after(error, self.transport.now()) if call.may_repeat else None
                if pause is None:
                    raise
            await self.transport.sleep(pause)

    async def _once(self, call: Call, timeout_seconds: float) -> httpx.Response:
        response = await self.transport.send(call, timeout_seconds)
        if (error := error_in(response)) is not None:
            raise error
        return response

    async def until_ended(self, kind: type[FollowedT], path: str, timeout_seconds: float | None) -> FollowedT:
        """Return the work once it has ended, by long polls. Survives restarts of the service.

        Raises:
            WaitTimeoutError: when the work has not ended in time.
        """
        until = None if timeout_seconds is None else self.transport.now() + timeout_seconds
        while True:
            polled_at = self.transport.now()
            current = await self._poll(kind, path, until)
            if current.state.terminal:
                return current
            now = self.transport.now()
            if until is not None and now >= until:
                raise WaitTimeoutError(f"{current.id} is {current.state} after {timeout_seconds:g} s")
            await self._sleep_until(polled_at + _SHORTEST_WAIT_SECONDS, until)

    async def _poll(self, kind: type[FollowedT], path: str, until: float | None) -> FollowedT:
        left = math.inf if until is None else max(0.0, until - self.transport.now())
        seconds = min(left, _LONGEST_WAIT_SECONDS)
        call = Call("GET", path, {"wait": round(seconds, 3)})
        timeout_seconds = min(seconds + self._timeout_seconds, left + _LATE_SECONDS)
        return parse_document(kind, await self.send(call, timeout_seconds, RetryBudget(self._retry_seconds, until)))

    async def _sleep_until(self, time: float, until: float | None) -> None:
        left = (time if until is None else min(time, until)) - self.transport.now()
        if left > 0:
            await self.transport.sleep(left)

    async def rows(self, kind: type[Page[RowT]], call: Call) -> AsyncGenerator[RowT, None]:
        """Iterate over the rows of a list; each page is fetched when it is needed."""
        cursor: str | None = None
        while True:
            page_call = replace(call, query={**call.query, "cursor": cursor})
            page = parse_document(kind, await self.send(page_call, self._timeout_seconds))
            for row in page.items:
                yield row
            if (cursor := page.next_cursor) is None:
                return

    async def events(self, path: str, after: int) -> AsyncGenerator[Event, None]:
        """Iterate over the events to the last; a broken connection is resumed."""
        budget = RetryBudget(self._retry_seconds)
        ended = False
        while True:
            error: ClientError
            try:
                async with aclosing(self._one_stream(path, after, budget)) as stream:
                    async for event in stream:
                        after = event.id
                        yield event
                        ended = ended if event.state is None else event.state.terminal
                        if event.state is State.SUCCEEDED:
                            return  # after another end a job may be resumed: then the service ends the stream
            except _NoMoreEventsError:
                return
            except ClientError as caught:
                error = caught
            else:
                error = ConnectionFailedError("the stream of events ended before the last")
            if ended:
                return
            pause = budget.pause_after(error, self.transport.now())
            if pause is None:
                raise error
            await self.transport.sleep(pause)

    async def _one_stream(self, path: str, after: int, budget: RetryBudget) -> AsyncGenerator[Event, None]:
        call = Call("GET", path, headers={"Accept": "text/event-stream", "Last-Event-ID": str(after)})
        async with self.transport.stream(call, _SILENCE_SECONDS) as stream:
            if stream.response.status_code == HTTPStatus.NO_CONTENT:
                raise _NoMoreEventsError
            if (error := error_in(stream.response)) is not None:
                raise error
            async for received in stream.events:
                budget.record_contact()
                if (event := parse_event(received)) is not None:
                    budget.reset()
                    yield event


class _NoMoreEventsError(Exception):
    """The service has no more events."""


class Resource:
    """A group of calls to the API.

    Every call raises ``ApiError`` when the service refuses it, ``ConnectionFailedError`` when the service cannot be
    reached within the retry budget, and ``UnexpectedResponseError`` for a response that this service does not send.
    Their docstrings name the errors of their own.
    """

    def __init__(self, core: Core) -> None:
        self._core = core


_MAX_DOCUMENTS = 32
"""A tuning with its evidence takes a few hundred kilobytes at most."""


class EtagCache:
    """Documents by path, each with its entity tag; the least recently used are evicted first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: LRUCache[str, tuple[str, BaseModel]] = LRUCache(_MAX_DOCUMENTS)

    def find(self, kind: type[DocumentT], path: str) -> tuple[str, DocumentT] | None:
        """Return the tag and the document last read from a path, or None if it is not cached."""
        with self._lock:
            tag, document = self._documents.get(path, ("", None))
        return (tag, document) if isinstance(document, kind) else None

    def store(self, path: str, tag: str | None, document: BaseModel) -> None:
        """Cache a document. One without a tag cannot be revalidated and is not cached."""
        with self._lock:
            self._documents.pop(path, None)
            if tag is not None:
                self._documents[path] = tag, document


_FIRST_PAUSE_SECONDS = 0.5
"""Pause before the second try. The pause doubles from try to try, less a random part of up to a half."""
_LONGEST_PAUSE_SECONDS = 10.0
"""Longest pause, unless the service asks for a longer one."""


class RetryBudget:
    """The remaining retry budget of one call or stream: lost connections, timeouts, 429, 502, 503 and 504 are retried.

    Args:
        seconds: how long a call is retried, from its first failure; 0 for never. A `Retry-After` beyond ends the call.
        until: the time after which there are no more tries in any case.

    Attributes:
        failures: failed tries since the last reset.
    """

    def __init__(self, seconds: float, until: float | None = None) -> None:
        self._seconds = seconds
        self._until = until
        self._deadline: float | None = None
        self.failures = 0

    def record_contact(self) -> None:
        """Restore the whole budget, because the service responded. The pauses keep their length."""
        self._deadline = None

    def reset(self) -> None:
        """Restore the whole budget and the first pause."""
        self._deadline, self.failures = None, 0

    def pause_after(self, error: ClientError, now: float) -> float | None:
        """Return the seconds to wait before the next try, or None if the call must not be retried."""
        if not error.is_transient:
            return None
        if self._deadline is None:
            deadline = now + self._seconds
            self._deadline = deadline if self._until is None else min(deadline, self._until)
        doubled = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self.failures, 30), _LONGEST_PAUSE_SECONDS)
        pause = max(error.retry_after_seconds or 0.0, doubled * random.uniform(0.5, 1.0))
        self.failures += 1
        return pause if now + pause < self._deadline else None
