"""Long polls and event streams over the change feed."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from fastapi import Response
from fastapi.responses import StreamingResponse

from batchwright.client.documents.work import Event, EventKind, Job, Tuning
from batchwright_service.api.authentication import Reauthenticate
from batchwright_service.api.etags import conditional
from batchwright_service.api.events.change_feed import ChangeFeed
from batchwright_service.api.reads.coalesced import Reads, TaggedWork
from batchwright_service.errors import NotAuthenticatedError, StoreUnavailableError, TooManyFollowersError

_log = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 15.0
_RECONNECT_MILLISECONDS = 1000
_STREAM_START = f": following\nretry: {_RECONNECT_MILLISECONDS}\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_PRIVATE = {"Cache-Control": "private, no-cache"}
RETRY_AFTER = {"Retry-After": "1"}
"""Delay, in seconds, before a caller polls work again that has not ended."""


@dataclass(frozen=True)
class Follower:
    """The objects that a request uses while it waits for changes."""

    feed: ChangeFeed
    reads: Reads
    reauthenticate: Reauthenticate


async def long_poll(
    read: Callable[[], Awaitable[TaggedWork]], follower: Follower, wait_seconds: float, if_none_match: str | None
) -> Response:
    """Respond with a tuning or job when it has ended, when its representation has changed, or when the time is up.

    ``if_none_match`` names the representation that the caller has. No thread is held while the request waits.

    Raises:
        NotAuthenticatedError: when the caller's key ends during the wait.
        NotFoundError: when the tuning or job does not exist or is deleted.
    """
    deadline = time.monotonic() + (wait_seconds if follower.feed.has_capacity() else 0.0)
    while True:
        current, written = await read()
        changed = if_none_match is not None and not written.matches_stable_part(if_none_match)
        if current.state.terminal or changed or time.monotonic() >= deadline or follower.feed.closed:
            headers = _PRIVATE if current.state.terminal else _PRIVATE | RETRY_AFTER
            return conditional(written, if_none_match, headers)
        await _wait_for_change(current, follower, deadline, any_event=if_none_match is not None)


async def _wait_for_change(current: Tuning | Job, follower: Follower, deadline: float, *, any_event: bool) -> None:
    """Wait until the work has ended, has ``any_event`` or is deleted, or the time is up.

    Only the new events are read, which all waiting requests share, because the document is large.
    """
    seen = current.events
    while (left := deadline - time.monotonic()) > 0 and not follower.feed.closed:
        changed = await follower.feed.wait(current.id, seen, left)
        await follower.reauthenticate()
        if not changed:
            return
        events = await follower.reads.events.get((current.id, seen))
        if any_event or not events or _is_final(events):
            return
        seen = events[-1].id


def event_stream(followed: Tuning | Job, follower: Follower, after: int) -> Response:
    """Stream the events after the id ``after``; respond 204 when none can follow, which ends an `EventSource`.

    Raises:
        TooManyFollowersError: when no connection is left for long requests.
    """
    if followed.state.terminal and after >= followed.events:
        return Response(status_code=204)
    if not follower.feed.has_capacity():
        raise TooManyFollowersError(
            "every connection is in use; the operator can raise BATCHWRIGHT_MAX_CONNECTIONS and the limit on open files"
        )
    return StreamingResponse(_lines(followed.id, follower, after), media_type="text/event-stream", headers=_HEADERS)


async def _lines(work_id: str, follower: Follower, after: int) -> AsyncIterator[str]:
    """Generate the stream. It ends early when the service stops or the database fails; the client then reconnects."""
    yield _STREAM_START
    try:
        was_notified = False
        while not follower.feed.closed and await _is_authenticated(follower.reauthenticate):
            events = await follower.reads.events.get((work_id, after))
            if events:
                was_notified, after = False, events[-1].id
                yield "".join(  # in one send: a disconnected client is noticed between sends
                    f"id: {event.id}\nevent: {EventKind(event.kind).value}\ndata: {event.model_dump_json()}\n\n"
                    for event in events
                )
                if _is_final(events) and not await follower.reads.events.get((work_id, after)):
                    return
            elif was_notified:  # without an event: the work was deleted
                return
            elif not (was_notified := await follower.feed.wait(work_id, after, _KEEP_ALIVE_SECONDS)):
                yield ": keep-alive\n\n"
    except StoreUnavailableError as error:
        _log.warning("the stream of %s ends, and its client has to reconnect: %s", work_id, error)


def _is_final(events: Sequence[Event]) -> bool:
    """Return whether the last state among these events is terminal; a job may be resumed after an earlier one."""
    last = next((event.state for event in reversed(events) if event.state is not None), None)
    return last is not None and last.terminal


async def _is_authenticated(reauthenticate: Reauthenticate) -> bool:
    """Return whether the follower's key is still valid. If not, the stream ends, and a new one is refused."""
    try:
        await reauthenticate()
    except NotAuthenticatedError:
        return False
    return True
