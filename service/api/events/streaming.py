"""Long polls and event streams over the feed of changes."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from fastapi import Response
from fastapi.responses import StreamingResponse

from service.api.authentication import Standing
from service.api.etags import conditional
from service.api.events.change_feed import ChangeFeed
from service.api.reads.coalesced import Reads, Written
from service.domain.work import Event, EventKind, Job, Tuning
from service.errors import NotAuthenticatedError, StoreUnavailableError, TooManyFollowersError

_log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Watch:
    """What a request that lasts looks at."""

    feed: ChangeFeed
    reads: Reads
    standing: Standing


async def polled(read: Callable[[], Awaitable[Written]], watch: Watch, poll: Poll) -> Response:
    """The tuning or job once it has ended, or is not what the caller knows, or as it is when the time is up.

    Holds no thread meanwhile.

    Raises:
        NotAuthenticatedError: when the caller's key ends meanwhile.
        NotFoundError: when there is none, or not any more.
    """
    deadline = time.monotonic() + (poll.wait_seconds if watch.feed.has_room() else 0.0)
    while True:
        current, written = await read()
        news = poll.if_none_match is not None and not written.is_essentially_known(poll.if_none_match)
        if current.state.terminal or news or time.monotonic() >= deadline or watch.feed.closed:
            headers = _OWN if current.state.terminal else _OWN | RETRY_AFTER
            return conditional(written, poll.if_none_match, headers)
        await _change(current, watch, deadline, any_event=poll.if_none_match is not None)


async def _change(current: Tuning | Job, watch: Watch, deadline: float, *, any_event: bool) -> None:
    """Until it has ended, or has ``any_event``, or is gone, or the time is up.

    Only new events are looked at, which all who wait share: the document is large.
    """
    seen = current.events
    while (left := deadline - time.monotonic()) > 0 and not watch.feed.closed:
        changed = await watch.feed.wait(current.id, seen, left)
        await watch.standing()
        if not changed:
            return
        events = await watch.reads.events.get((current.id, seen))
        if any_event or not events or _ends(events):
            return
        seen = events[-1].id


def event_stream(followed: Tuning | Job, watch: Watch, after: int) -> Response:
    """The events after the id ``after`` as they come; 204 when there will be none, which ends an `EventSource`.

    Raises:
        TooManyFollowersError: when no connection is left for requests that last.
    """
    if followed.state.terminal and after >= followed.events:
        return Response(status_code=204)
    if not watch.feed.has_room():
        raise TooManyFollowersError(
            "every connection is in use; the operator allows more with BATCHWRIGHT_MAX_CONNECTIONS, and a higher limit "
            "of open files"
        )
    return StreamingResponse(_lines(followed.id, watch, after), media_type="text/event-stream", headers=_HEADERS)


async def _lines(work_id: str, watch: Watch, after: int) -> AsyncIterator[str]:
    """Ends early, for the follower to come again, when the service does or the database cannot be read."""
    yield _OPENING
    try:
        news = False
        while not watch.feed.closed and await _stands(watch.standing):
            events = await watch.reads.events.get((work_id, after))
            if events:
                news, after = False, events[-1].id
                yield "".join(map(_line, events))  # at once: a follower who left is noticed between sends
                if _ends(events) and not await watch.reads.events.get((work_id, after)):
                    return
            elif news:  # and no event: it was deleted
                return
            elif not (news := await watch.feed.wait(work_id, after, _KEEP_ALIVE_SECONDS)):
                yield ": keep-alive\n\n"
    except StoreUnavailableError as error:
        _log.warning("a follower of %s has to come again: %s", work_id, error)


def _ends(events: Sequence[Event]) -> bool:
    """Whether the last state among these is an end: a job may have been resumed after an earlier one."""
    last = next((event.state for event in reversed(events) if event.state is not None), None)
    return last is not None and last.terminal


async def _stands(standing: Standing) -> bool:
    """Whether the follower's key is still good; else the stream ends, and a new one is refused."""
    try:
        await standing()
    except NotAuthenticatedError:
        return False
    return True


def _line(event: Event) -> str:
    return f"id: {event.id}\nevent: {EventKind(event.kind).value}\ndata: {event.model_dump_json()}\n\n"
