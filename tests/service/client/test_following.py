"""The SDK waits, follows, pages and reads again, over a network that follows a script."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from service.client import (
    AsyncClient,
    Client,
    ConnectionFailedError,
    NotAuthenticatedError,
    TuningFailedError,
    UnexpectedResponseError,
    WaitTimeoutError,
)
from service.client.resources.api import AsyncCalls
from service.domain.states import State
from service.domain.work import Event, Tuning
from tests.support.factories import tuning_request
from tests.support.service.scripted_network import (
    RESET,
    WHOLE,
    Chunks,
    Clock,
    Driver,
    Script,
    page,
    problem,
    stream,
    streamed,
    told,
    tuning,
)


async def followed(calls: AsyncCalls) -> list[int]:
    """The numbers of every event of a tuning."""
    return [event.id async for event in calls.tunings.events("tun_1")]


@pytest.fixture(params=["blocking", "asyncio"])
def drive(request: pytest.FixtureRequest) -> Driver:
    """Both clients, one after the other."""
    return Driver(request.param)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the clients."""
    clock = Clock()
    clock.install(monkeypatch)
    return clock


# --- waiting ---


def test_a_wait_outlives_failures_and_bounds_each_silence(drive: Driver, clock: Clock) -> None:
    """Long polls of thirty seconds, a refused connection between them, and the time that each may take."""

    def slow(_request: httpx.Request) -> httpx.Response:
        clock.now += 30.0
        return tuning()

    script = Script([slow, httpx.ConnectError("refused"), slow, tuning(State.SUCCEEDED)])
    ended = drive(script, lambda calls: calls.tunings.wait("tun_1"), timeout_seconds=7.0)
    assert ended.state is State.SUCCEEDED
    assert {request.url.params["wait"] for request in script.seen} == {"30.0"}
    assert {request.extensions["timeout"]["read"] for request in script.seen} == {37.0}


def test_a_wait_asks_no_longer_than_its_time(drive: Driver, clock: Clock) -> None:
    """The last poll is cut short, then the error names the state; a service that does not answer costs little more."""

    def slow(request: httpx.Request) -> httpx.Response:
        clock.now += float(request.url.params["wait"])
        return tuning()

    script = Script([slow])
    with pytest.raises(WaitTimeoutError, match="RUNNING after 50 s"):
        drive(script, lambda calls: calls.tunings.wait("tun_1", 50.0))
    assert [request.url.params["wait"] for request in script.seen] == ["30.0", "20.0"]
    assert [request.extensions["timeout"]["read"] for request in script.seen] == [55.0, 25.0]


def test_a_wait_for_a_service_that_is_away_ends_in_time(drive: Driver, clock: Clock) -> None:
    """The caller's time bounds the tries, however large the budget."""
    began = clock.now
    with pytest.raises(ConnectionFailedError):
        drive(Script([RESET]), lambda calls: calls.tunings.wait("tun_1", 5.0), retry_seconds=1000.0)
    assert clock.now - began <= 5.0


def test_a_service_that_does_not_wait_is_not_asked_without_pause(drive: Driver, clock: Clock) -> None:
    """One that is ending answers long polls at once."""
    drive(Script([tuning()] * 5 + [tuning(State.FAILED)]), lambda calls: calls.tunings.wait("tun_1"))
    assert clock.pauses == [1.0] * 5


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
def test_a_tuning_without_an_answer_is_an_error_with_its_problem(drive: Driver, state: State) -> None:
    """`tune` raises it; a cancelled one has a problem too."""
    why = {"type": "urn:x", "title": "t", "detail": "it hung", "code": "timed-out"}
    stored = {"problem": why} if state is State.FAILED else {}
    answer = httpx.Response(200, json=WHOLE | {"state": state.value} | stored)
    with pytest.raises(TuningFailedError, match=f"tun_1 ended as {state}") as caught:
        drive(Script([tuning(), answer]), lambda calls: calls.tunings.tune(tuning_request()))
    assert caught.value.problem.code == ("timed-out" if state is State.FAILED else "cancelled")
    assert caught.value.tuning.id == "tun_1"


# --- streams ---


def test_a_stream_goes_on_where_it_broke_off(drive: Driver, clock: Clock) -> None:
    """Cut within an event, refused, ended early: each new one resumes after the last whole event."""
    second = told(2, State.RUNNING)
    script = Script(
        [
            stream(b": following\n\n", told(1, State.QUEUED), second[:20], end=RESET),
            problem(503, Retry_After="4"),
            stream(second),
            stream(b": following\n\n"),
            stream(told(3, State.SUCCEEDED), told(4, State.SUCCEEDED)),
        ]
    )
    assert drive(script, followed) == [1, 2, 3]
    assert [request.headers["Last-Event-ID"] for request in script.seen] == ["0", "1", "1", "2", "2"]
    assert clock.pauses[1] == 4.0


def test_events_make_pauses_short_again(drive: Driver, clock: Clock) -> None:
    """A connection that breaks after news is made anew as after the first failure."""
    failures = [RESET] * 4
    drive(Script([*failures, stream(told(1, State.QUEUED)), *failures, stream(told(2, State.FAILED))]), followed)
    assert max(clock.pauses[3:5]) > 2.0
    assert clock.pauses[4] <= 0.5


def test_a_stream_that_has_ended_is_over(drive: Driver) -> None:
    """204 says that nothing will come."""
    assert drive(Script([httpx.Response(204)]), followed) == []


def test_a_stream_that_is_refused_is_an_error(drive: Driver, clock: Clock) -> None:
    """Its problem is read although the answer was to be streamed."""

    def refuse(_request: httpx.Request) -> httpx.Response:
        refusal = problem(401, "not-authenticated")
        return httpx.Response(401, stream=Chunks([refusal.content[:9], refusal.content[9:]]))

    with pytest.raises(NotAuthenticatedError, match="not-authenticated"):
        drive(Script([stream(told(1, State.QUEUED)), refuse]), followed)
    assert len(clock.pauses) == 1


def test_a_stream_of_a_service_that_stays_away_is_given_up(drive: Driver, clock: Clock) -> None:
    """Within the budget, counted from its first failure."""
    began = clock.now
    with pytest.raises(ConnectionFailedError, match="refused"):
        drive(Script([stream(told(1, State.QUEUED)), httpx.ConnectError("refused")]), followed, retry_seconds=10.0)
    assert clock.now - began <= 10.0


def test_a_quiet_stream_has_its_whole_budget_each_time_it_breaks(drive: Driver, clock: Clock) -> None:
    """An hour of keep-alives is no failure, however often the connection breaks."""

    def quiet(_request: httpx.Request) -> httpx.Response:
        clock.now += 3600.0
        return stream(b": following\nretry: 1000\n\n", b": keep-alive\n\n", end=RESET)

    assert drive(Script([quiet] * 4 + [stream(told(1, State.SUCCEEDED))]), followed, retry_seconds=15.0) == [1]


def test_leaving_a_stream_closes_its_connection(drive: Driver) -> None:
    """Also when the loop over it is left early."""
    body = Chunks([told(1, State.QUEUED), told(2, State.RUNNING)])

    async def first(calls: AsyncCalls) -> Event:
        events = calls.tunings.events("tun_1")
        event = await anext(events)
        await events.aclose()
        return event

    assert drive(Script([streamed(body)]), first).id == 1
    assert body.closed


def test_the_blocking_stream_is_closed_by_leaving_its_loop() -> None:
    """A `for` that is left lets the connection go."""
    body = Chunks([told(1, State.QUEUED), told(2, State.RUNNING)])
    script = Script([streamed(body)])
    with httpx.Client(transport=httpx.MockTransport(script), base_url="http://test") as http:
        for event in Client(http=http).tunings.events("tun_1"):
            assert event.id == 1
            break
    assert body.closed


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_events_are_read_however_they_are_cut(drive: Driver, size: int, ends: bytes) -> None:
    """Byte by byte, with comments, fields and kinds that are not known, and characters that Python splits lines at."""
    message = "one\u2028two\x85three é"
    probe = {"id": 2, "at": "2026-01-01T00:00:00Z", "kind": "state", "state": "RUNNING", "new": message}
    later = f"id: 3\nevent: later\ndata: {json.dumps({'id': 3, 'what': message})}\n\n".encode()
    lines = json.dumps(probe, ensure_ascii=False).replace(", ", ",\ndata: ")
    spread = f"event: state\ndata:{lines}\nretry: 5\n\n".encode()
    cut_off = told(4, State.FAILED)[:-1]
    text = b": following\nretry: 1000\n\n" + told(1, State.QUEUED) + later + spread + cut_off
    text = text.replace(b"\n", ends)
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    script = Script([stream(*parts), httpx.Response(204)])

    async def read(calls: AsyncCalls) -> list[tuple[int, State | None]]:
        return [(event.id, event.state) async for event in calls.tunings.events("tun_1")]

    assert drive(script, read) == [(1, State.QUEUED), (2, State.RUNNING)]
    assert script.seen[-1].headers["Last-Event-ID"] == "2"


def test_an_event_that_is_none_is_an_error_of_ours(drive: Driver, clock: Clock) -> None:
    """It is not asked for again and again."""
    with pytest.raises(UnexpectedResponseError, match="nonsense"):
        drive(Script([stream(b"data: nonsense\n\n")]), followed)
    assert clock.pauses == []


def test_a_stream_that_is_none_is_an_error_of_ours(drive: Driver, clock: Clock) -> None:
    """A proxy's page is not asked for again and again."""
    with pytest.raises(UnexpectedResponseError, match="text/html"):
        drive(Script([httpx.Response(200, html="<p>Sign in</p>")]), followed)
    assert clock.pauses == []


# --- lists, and what is known already ---


def test_pages_are_fetched_as_they_are_needed(drive: Driver) -> None:
    """The second page is asked for with the first one's cursor, once its rows are wanted."""
    script = Script([page("a", "b", following="c1"), page("c")])

    async def read(calls: AsyncCalls) -> list[tuple[str, int]]:
        rows = calls.tunings.list(state=State.QUEUED, model="mlp", page_size=2)
        return [(row.id, len(script.seen)) async for row in rows]

    assert drive(script, read) == [("a", 1), ("b", 1), ("c", 2)]
    assert [dict(request.url.params) for request in script.seen] == [
        {"state": "QUEUED", "model": "mlp", "limit": "2"},
        {"state": "QUEUED", "model": "mlp", "limit": "2", "cursor": "c1"},
    ]


def test_what_has_not_changed_is_not_sent_again(drive: Driver) -> None:
    """The tag of what was read goes along; 304 means the document that is known, another tag a new one."""
    script = Script([tuning(ETag='"1"'), httpx.Response(304), tuning(State.FAILED, ETag='"2"'), httpx.Response(304)])

    async def read(calls: AsyncCalls) -> list[Tuning]:
        return [await calls.tunings.get("tun_1") for _ in range(4)]

    first, again, changed, same = drive(script, read)
    assert first is again
    assert changed is same
    assert (first.state, changed.state) == (State.RUNNING, State.FAILED)
    assert [request.headers.get("If-None-Match") for request in script.seen] == [None, '"1"', '"1"', '"2"']


def test_only_some_documents_are_kept(drive: Driver) -> None:
    """The one that was not read for the longest is asked for anew."""
    script = Script([lambda request: tuning(ETag=f'"{request.url.path}"')])

    async def read(calls: AsyncCalls) -> None:
        for number in [*range(32), 0, 32, 1, 0]:
            await calls.tunings.get(f"tun_{number}")

    drive(script, read)
    assert [request.headers.get("If-None-Match") for request in script.seen[-2:]] == [None, '"/v1/tunings/tun_0"']


# --- both clients ---


def test_the_blocking_client_works_where_an_event_loop_runs() -> None:
    """It needs none, and minds none."""

    async def inside() -> list[str]:
        with httpx.Client(transport=httpx.MockTransport(Script([page("a")])), base_url="http://test") as http:
            return [row.id for row in Client(http=http).tunings.list()]

    assert asyncio.run(inside()) == ["a"]


def test_an_async_call_can_be_cancelled_while_it_pauses() -> None:
    """A cancelled task ends at once, and sends nothing more."""
    asked = asyncio.Event()

    def refuse(_request: httpx.Request) -> httpx.Response:
        asked.set()
        return problem(503, Retry_After="30")

    script = Script([refuse])

    async def give_up() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(script), base_url="http://test") as http:
            task = asyncio.create_task(AsyncClient(http=http).tunings.get("tun_1"))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(give_up())
    assert len(script.seen) == 1
