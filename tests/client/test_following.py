"""The SDK waits, follows, pages and reads again, over a network that follows a script."""

import asyncio
import json

import httpx
import pytest

from batchwright.client import (
    AsyncClient,
    Client,
    ConnectionFailedError,
    NotAuthenticatedError,
    TuningFailedError,
    UnexpectedResponseError,
    WaitTimeoutError,
)
from batchwright.client.documents.states import State
from batchwright.client.documents.work import Event, Tuning
from batchwright.client.resources.api import AsyncCalls
from tests.support.factories import tuning_request
from tests.support.service.scripted_network import (
    RESET,
    WHOLE,
    Chunks,
    Clock,
    Driver,
    Script,
    event_bytes,
    page,
    problem,
    stream,
    streamed,
    tuning,
)


async def followed(calls: AsyncCalls) -> list[int]:
    """The numbers of every event of a tuning."""
    return [event.id async for event in calls.tunings.events("tun_1")]


# --- waiting ---


def test_a_wait_survives_failures_and_bounds_each_silence(drive: Driver, clock: Clock) -> None:
    """Long polls of thirty seconds, a refused connection between them, and the time that each may take."""

    def slow(_request: httpx.Request) -> httpx.Response:
        clock.now += 30.0
        return tuning()

    script = Script([slow, httpx.ConnectError("refused"), slow, tuning(State.SUCCEEDED)])
    ended = drive(script, lambda calls: calls.tunings.wait("tun_1"), timeout_seconds=7.0)
    assert ended.state is State.SUCCEEDED
    assert {request.url.params["wait"] for request in script.seen} == {"30.0"}
    assert {request.extensions["timeout"]["read"] for request in script.seen} == {37.0}


def test_a_wait_polls_no_longer_than_its_timeout(drive: Driver, clock: Clock) -> None:
    """The last poll is cut short, then the error names the state; an unresponsive service takes little longer."""

    def slow(request: httpx.Request) -> httpx.Response:
        clock.now += float(request.url.params["wait"])
        return tuning()

    script = Script([slow])
    with pytest.raises(WaitTimeoutError, match="RUNNING after 50 s"):
        drive(script, lambda calls: calls.tunings.wait("tun_1", 50.0))
    assert [request.url.params["wait"] for request in script.seen] == ["30.0", "20.0"]
    assert [request.extensions["timeout"]["read"] for request in script.seen] == [55.0, 25.0]


def test_a_wait_for_an_unreachable_service_ends_in_time(drive: Driver, clock: Clock) -> None:
    """The caller's time bounds the tries, however large the budget."""
    began = clock.now
    with pytest.raises(ConnectionFailedError):
        drive(Script([RESET]), lambda calls: calls.tunings.wait("tun_1", 5.0), retry_seconds=1000.0)
    assert clock.now - began <= 5.0


def test_a_service_that_does_not_wait_is_polled_with_pauses(drive: Driver, clock: Clock) -> None:
    """A service that is shutting down responds to long polls at once."""
    drive(Script([tuning()] * 5 + [tuning(State.FAILED)]), lambda calls: calls.tunings.wait("tun_1"))
    assert clock.pauses == [1.0] * 5


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
def test_a_tuning_without_a_recommendation_raises_its_problem(drive: Driver, state: State) -> None:
    """`tune` raises it; a cancelled one has a problem too."""
    why = {"type": "urn:x", "title": "t", "detail": "it hung", "code": "timed-out"}
    stored = {"problem": why} if state is State.FAILED else {}
    answer = httpx.Response(200, json=WHOLE | {"state": state.value} | stored)
    with pytest.raises(TuningFailedError, match=f"tun_1 ended as {state}") as caught:
        drive(Script([tuning(), answer]), lambda calls: calls.tunings.tune(tuning_request()))
    assert caught.value.problem.code == ("timed-out" if state is State.FAILED else "cancelled")
    assert caught.value.tuning.id == "tun_1"


# --- streams ---


def test_a_broken_stream_resumes_after_its_last_event(drive: Driver, clock: Clock) -> None:
    """Cut within an event, refused, ended early: each new one resumes after the last whole event."""
    second = event_bytes(2, State.RUNNING)
    script = Script(
        [
            stream(b": following\n\n", event_bytes(1, State.QUEUED), second[:20], end=RESET),
            problem(503, Retry_After="4"),
            stream(second),
            stream(b": following\n\n"),
            stream(event_bytes(3, State.SUCCEEDED), event_bytes(4, State.SUCCEEDED)),
        ]
    )
    assert drive(script, followed) == [1, 2, 3]
    assert [request.headers["Last-Event-ID"] for request in script.seen] == ["0", "1", "1", "2", "2"]
    assert clock.pauses[1] == 4.0


def test_events_reset_the_pauses(drive: Driver, clock: Clock) -> None:
    """A connection that breaks after news is made anew as after the first failure."""
    failures = [RESET] * 4
    drive(
        Script([*failures, stream(event_bytes(1, State.QUEUED)), *failures, stream(event_bytes(2, State.FAILED))]),
        followed,
    )
    assert max(clock.pauses[3:5]) > 2.0
    assert clock.pauses[4] <= 0.5


def test_a_stream_that_has_ended_has_no_events(drive: Driver) -> None:
    """After 204 no more events come."""
    assert drive(Script([httpx.Response(204)]), followed) == []


def test_a_refused_stream_is_an_error(drive: Driver, clock: Clock) -> None:
    """The problem is read from the streamed response."""

    def refuse(_request: httpx.Request) -> httpx.Response:
        refusal = problem(401, "not-authenticated")
        return httpx.Response(401, stream=Chunks([refusal.content[:9], refusal.content[9:]]))

    with pytest.raises(NotAuthenticatedError, match="not-authenticated"):
        drive(Script([stream(event_bytes(1, State.QUEUED)), refuse]), followed)
    assert len(clock.pauses) == 1


def test_a_stream_of_an_unreachable_service_ends_within_the_budget(drive: Driver, clock: Clock) -> None:
    """Within the budget, counted from its first failure."""
    began = clock.now
    with pytest.raises(ConnectionFailedError, match="refused"):
        drive(
            Script([stream(event_bytes(1, State.QUEUED)), httpx.ConnectError("refused")]), followed, retry_seconds=10.0
        )
    assert clock.now - began <= 10.0


def test_a_keep_alive_restores_the_budget(drive: Driver, clock: Clock) -> None:
    """An hour of keep-alives is no failure, however often the connection breaks."""

    def quiet(_request: httpx.Request) -> httpx.Response:
        clock.now += 3600.0
        return stream(b": following\nretry: 1000\n\n", b": keep-alive\n\n", end=RESET)

    assert drive(Script([quiet] * 4 + [stream(event_bytes(1, State.SUCCEEDED))]), followed, retry_seconds=15.0) == [1]


def test_leaving_a_stream_closes_its_connection(drive: Driver) -> None:
    """Also when the loop over it is left early."""
    body = Chunks([event_bytes(1, State.QUEUED), event_bytes(2, State.RUNNING)])

    async def first(calls: AsyncCalls) -> Event:
        events = calls.tunings.events("tun_1")
        event = await anext(events)
        await events.aclose()
        return event

    assert drive(Script([streamed(body)]), first).id == 1
    assert body.closed


def test_leaving_a_blocking_stream_closes_its_connection() -> None:
    """A `for` that is left lets the connection go."""
    body = Chunks([event_bytes(1, State.QUEUED), event_bytes(2, State.RUNNING)])
    script = Script([streamed(body)])
    with httpx.Client(transport=httpx.MockTransport(script), base_url="http://test") as http:
        for event in Client(http=http).tunings.events("tun_1"):
            assert event.id == 1
            break
    assert body.closed


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_events_are_parsed_from_any_chunks(drive: Driver, size: int, ends: bytes) -> None:
    """Byte by byte, with comments, fields and kinds that are not known, and characters that Python splits lines at."""
    message = "one\u2028two\x85three é"
    probe = {"id": 2, "at": "2026-01-01T00:00:00Z", "kind": "state", "state": "RUNNING", "new": message}
    later = f"id: 3\nevent: later\ndata: {json.dumps({'id': 3, 'what': message})}\n\n".encode()
    lines = json.dumps(probe, ensure_ascii=False).replace(", ", ",\ndata: ")
    spread = f"event: state\ndata:{lines}\nretry: 5\n\n".encode()
    cut_off = event_bytes(4, State.FAILED)[:-1]
    text = b": following\nretry: 1000\n\n" + event_bytes(1, State.QUEUED) + later + spread + cut_off
    text = text.replace(b"\n", ends)
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    script = Script([stream(*parts), httpx.Response(204)])

    async def read(calls: AsyncCalls) -> list[tuple[int, State | None]]:
        return [(event.id, event.state) async for event in calls.tunings.events("tun_1")]

    assert drive(script, read) == [(1, State.QUEUED), (2, State.RUNNING)]
    assert script.seen[-1].headers["Last-Event-ID"] == "2"


def test_a_malformed_event_is_an_error_of_the_sdk(drive: Driver, clock: Clock) -> None:
    """The stream is not requested again."""
    with pytest.raises(UnexpectedResponseError, match="nonsense"):
        drive(Script([stream(b"data: nonsense\n\n")]), followed)
    assert clock.pauses == []


def test_a_response_that_is_no_stream_is_an_error_of_the_sdk(drive: Driver, clock: Clock) -> None:
    """A proxy's page is not requested again."""
    with pytest.raises(UnexpectedResponseError, match="text/html"):
        drive(Script([httpx.Response(200, html="<p>Sign in</p>")]), followed)
    assert clock.pauses == []


# --- lists, and what is known already ---


def test_pages_are_fetched_as_they_are_needed(drive: Driver) -> None:
    """The second page is requested with the cursor of the first when its rows are needed."""
    script = Script([page("a", "b", following="c1"), page("c")])

    async def read(calls: AsyncCalls) -> list[tuple[str, int]]:
        rows = calls.tunings.list(state=State.QUEUED, model="mlp", page_size=2)
        return [(row.id, len(script.seen)) async for row in rows]

    assert drive(script, read) == [("a", 1), ("b", 1), ("c", 2)]
    assert [dict(request.url.params) for request in script.seen] == [
        {"state": "QUEUED", "model": "mlp", "limit": "2"},
        {"state": "QUEUED", "model": "mlp", "limit": "2", "cursor": "c1"},
    ]


def test_an_unchanged_document_is_not_sent_again(drive: Driver) -> None:
    """The entity tag is sent; 304 returns the cached document, another tag a new one."""
    script = Script([tuning(ETag='"1"'), httpx.Response(304), tuning(State.FAILED, ETag='"2"'), httpx.Response(304)])

    async def read(calls: AsyncCalls) -> list[Tuning]:
        return [await calls.tunings.get("tun_1") for _ in range(4)]

    first, again, changed, same = drive(script, read)
    assert first is again
    assert changed is same
    assert (first.state, changed.state) == (State.RUNNING, State.FAILED)
    assert [request.headers.get("If-None-Match") for request in script.seen] == [None, '"1"', '"1"', '"2"']


def test_the_least_recently_read_document_is_evicted(drive: Driver) -> None:
    """It is requested again in full."""
    script = Script([lambda request: tuning(ETag=f'"{request.url.path}"')])

    async def read(calls: AsyncCalls) -> None:
        for number in [*range(32), 0, 32, 1, 0]:
            await calls.tunings.get(f"tun_{number}")

    drive(script, read)
    assert [request.headers.get("If-None-Match") for request in script.seen[-2:]] == [None, '"/v1/tunings/tun_0"']


# --- both clients ---


def test_the_blocking_client_works_where_an_event_loop_runs() -> None:
    """The blocking client neither needs nor disturbs an event loop."""

    async def inside() -> list[str]:
        with httpx.Client(transport=httpx.MockTransport(Script([page("a")])), base_url="http://test") as http:
            return [row.id for row in Client(http=http).tunings.list()]

    assert asyncio.run(inside()) == ["a"]


def test_an_async_call_can_be_cancelled_while_it_pauses() -> None:
    """A cancelled task ends at once, and sends nothing more."""
    requested = asyncio.Event()

    def refuse(_request: httpx.Request) -> httpx.Response:
        requested.set()
        return problem(503, Retry_After="30")

    script = Script([refuse])

    async def give_up() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(script), base_url="http://test") as http:
            task = asyncio.create_task(AsyncClient(http=http).tunings.get("tun_1"))
            await requested.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())
    assert len(script.seen) == 1
