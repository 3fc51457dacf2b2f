"""Long polls and event streams over the feed of changes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from service.api.authentication import Standing
from service.api.conditional import Tagged, conditional, tagged
from service.api.feed import ChangeFeed
from service.domain import Event, EventKind, Job, Tuning
from service.errors import NotAuthenticatedError
from service.use_cases import UseCases

_KEEP_ALIVE_SECONDS = 15.0
_RECONNECT_MILLISECONDS = 1000
_OPENING = f": following\nretry: {_RECONNECT_MILLISECONDS}\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_OWN = {"Cache-Control": "private, no-cache"}
RETRY_AFTER = {"Retry-After": "1"}
"""When to look again at what has not ended."""


@dataclass(frozen=True)
class Poll:
    """How long to wait for a change, and what the caller knows: the `ETag` of a representation."""

    wait_seconds: float
    if_none_match: str | None


async def polled(read: Callable[[], Tuning | Job], feed: ChangeFeed, poll: Poll, standing: Standing) -> Response:
    """The tuning or job once it has ended, or is not what the caller knows, or as it is when the time is up.

    Holds no thread meanwhile.

    Raises:
        NotAuthenticatedError: when the caller's key ends meanwhile.
    """
    deadline = time.monotonic() + poll.wait_seconds
    while True:
        current, written = await run_in_threadpool(_written, read)
        left = deadline - time.monotonic()
        news = poll.if_none_match is not None and not written.is_known(poll.if_none_match)
        if current.state.terminal or news or left <= 0 or feed.closed:
            headers = _OWN if current.state.terminal else _OWN | RETRY_AFTER
            return conditional(written, poll.if_none_match, headers)
        await feed.wait(current.id, current.events, left)
        await standing()


def _written(read: Callable[[], Tuning | Job]) -> tuple[Tuning | Job, Tagged]:
    current = read()
    return current, tagged(current.model_dump_json().encode())


def event_stream(followed: Tuning | Job, cases: UseCases, feed: ChangeFeed, standing: Standing, after: int) -> Response:
    """The events after the id ``after`` as they come; 204 when there will be none, which ends an `EventSource`."""
    if followed.state.terminal and after >= followed.events:
        return Response(status_code=204)
    stream = _lines(followed.id, cases, feed, standing, after)
    return StreamingResponse(stream, media_type="text/event-stream", headers=_HEADERS)


async def _lines(work_id: str, cases: UseCases, feed: ChangeFeed, standing: Standing, after: int) -> AsyncIterator[str]:
    yield _OPENING
    while not feed.closed and await _stands(standing):
        events = await run_in_threadpool(cases.events, work_id, after)
        if events:
            after = events[-1].id
            yield "".join(_line(event) for event in events)  # at once: a follower who left is noticed between sends
            if any(event.state is not None and event.state.terminal for event in events):
                return
        elif not await feed.wait(work_id, after, _KEEP_ALIVE_SECONDS):
            yield ": keep-alive\n\n"


async def _stands(standing: Standing) -> bool:
    """Whether the follower's key is still good; else the stream ends, and a new one is refused."""
    try:
        await standing()
    except NotAuthenticatedError:
        return False
    return True


def _line(event: Event) -> str:
    return f"id: {event.id}\nevent: {EventKind(event.kind).value}\ndata: {event.model_dump_json()}\n\n"
