"""Event streams: their content, resumption, and the low cost of idle followers."""

import asyncio
import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from batchwright.client import Client
from batchwright.client.documents.states import State
from batchwright.client.documents.work import Event, Tuning
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.api.etags import Tagged, tagged
from batchwright_service.api.events import streaming
from batchwright_service.api.events.change_feed import ChangeFeed
from batchwright_service.api.events.streaming import Follower
from batchwright_service.domain.callers import KEYLESS, Caller
from batchwright_service.errors import NotFoundError, StoreUnavailableError
from batchwright_service.fast_path.coalescing import CoalescedReads
from tests.support.factories import recommendation, tuning_request
from tests.support.service.asking import PATIENCE_SECONDS
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, Trainer, until_stopped


def test_a_stream_has_every_event_of_a_tuning(client: Client) -> None:
    """The stream holds every state and probe, ends by itself, and resumes after any event."""
    tuning = client.tunings.submit(tuning_request())
    events = list(client.tunings.events(tuning.id))
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    states = [event.state for event in events if event.state is not None]
    assert states == [State.QUEUED, State.RUNNING, State.SUCCEEDED]
    probes = [event.probe for event in events if event.probe is not None]
    assert probes == list(client.tunings.probes(tuning.id))
    assert list(client.tunings.events(tuning.id, after=3)) == events[3:]
    assert list(client.tunings.events(tuning.id, after=len(events))) == []


def test_the_stream_has_the_format_of_server_sent_events(service: Running, client: Client) -> None:
    """The media type, ids, kinds and data are those of server-sent events; 204 when no event can follow."""
    tuning = client.tunings.wait(client.tunings.submit(tuning_request()).id)
    url = f"/v1/tunings/{tuning.id}/events"
    response = service.http.get(url, headers={"Last-Event-ID": str(tuning.events - 1)})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.splitlines()
    assert lines[:3] == [": following", "retry: 1000", ""]
    assert lines[3:5] == [f"id: {tuning.events}", "event: state"]
    assert json.loads(lines[5].removeprefix("data: "))["state"] == "SUCCEEDED"
    assert service.http.get(url, headers={"Last-Event-ID": str(tuning.events)}).status_code == HTTPStatus.NO_CONTENT


def test_a_job_streams_its_updates(start_service: StartService) -> None:
    """A follower sees updates while the job runs, and its cancellation."""
    service = start_service(trainer=Trainer(hold_at=3))
    with service.client as client:
        job = client.jobs.submit(recommendation(), TrainingRequest(updates=5))
        seen = []
        for event in client.jobs.events(job.id):
            if event.progress is not None:
                seen.append(event.progress.update)
            if event.progress is not None and event.progress.update == 2:
                client.jobs.cancel(job.id)
            last = event.state
        assert (seen, last) == ([1, 2], State.CANCELLED)


def test_many_idle_followers_hold_no_threads(start_service: StartService) -> None:
    """Two hundred streams stay open at once while reads are answered, on no more threads than the pool has."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    with service.client as client:
        tuning = client.tunings.submit(tuning_request())
        assert started.wait(PATIENCE_SECONDS)
        threads = asyncio.run(_follow_at_once(service, tuning.id, 200))
        assert threads < 80
        client.tunings.cancel(tuning.id)


async def _follow_at_once(service: Running, tuning_id: str, followers: int) -> int:
    """Return the number of threads while all follow, after a read was served."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, limits=limits, timeout=PATIENCE_SECONDS) as http:
        streams = [http.stream("GET", f"/v1/tunings/{tuning_id}/events") for _ in range(followers)]
        responses = [await stream.__aenter__() for stream in streams]
        assert {response.status_code for response in responses} == {HTTPStatus.OK}
        assert (await http.get(f"/v1/tunings/{tuning_id}")).status_code == HTTPStatus.OK
        threads = threading.active_count()
        for stream in streams:
            await stream.__aexit__(None, None, None)
        return threads


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of the service."""
    return "asyncio"


async def _is_authenticated() -> Caller:
    """Return a caller whose key stays valid."""
    return KEYLESS


def _follower(read_events: Callable[[tuple[str, int]], list[Event]]) -> Follower:
    """Return a follower with a feed that knows no work."""
    reads: Any = SimpleNamespace(events=CoalescedReads(read_events))
    return Follower(ChangeFeed(lambda _: {}, tick_seconds=0.01), reads, _is_authenticated)


@pytest.mark.anyio
async def test_a_stream_of_deleted_work_ends() -> None:
    """No event can follow, so that the stream ends."""
    lines = [line async for line in streaming._lines("tun_1", _follower(lambda _: []), 3)]
    assert lines == [": following\nretry: 1000\n\n"]


@pytest.mark.anyio
async def test_a_stream_ends_without_an_error_when_the_database_fails() -> None:
    """The client reconnects after the last event that it received."""

    def away(_: tuple[str, int]) -> list[Event]:
        raise StoreUnavailableError("the database is away")

    assert len([line async for line in streaming._lines("tun_1", _follower(away), 0)]) == 1


@pytest.mark.anyio
async def test_a_wait_for_deleted_work_ends(client: Client) -> None:
    """The work is read again, and not found."""
    tuning = client.tunings.wait(client.tunings.submit(tuning_request()).id)
    queued = tuning.model_copy(update={"state": State.QUEUED})
    looks = [(queued, tagged(b"{}"))]

    async def read() -> tuple[Tuning, Tagged]:
        if looks:
            return looks.pop()
        raise NotFoundError("it was deleted")

    with pytest.raises(NotFoundError):
        await streaming.long_poll(read, _follower(lambda _: []), 60.0, None)
