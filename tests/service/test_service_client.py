"""The SDK against a real service: both clients, every call, and submissions whose answers are lost."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Running, StartService
from scripted_network import Driver, Script, fake_time, page, problem
from typing_extensions import override

from factories import mlp_spec, recommendation, tuning_request
from scripted import ScriptedRunner, Trainer, until_stopped
from service.client import (
    ApiError,
    AsyncClient,
    Client,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    TuningFailedError,
)
from service.client.blocking import run
from service.client.calls import AsyncCalls
from service.domain import Event, EventKind
from service.executor.base import OnProgress, StopWithin, TrainingRun
from service.openapi import export_openapi
from service.states import State, WorkKind
from tuner.errors import WorkloadError
from tuner.estimates import EstimateRequest
from tuner.requests import TrainingRequest
from tuner.training.runs import RunPaths, TrainingResult

T = TypeVar("T")
Body = Callable[[AsyncCalls], Awaitable[T]]
Against = Callable[..., Any]
PATIENCE_SECONDS = 20.0
SIZES = count(1000)
"""Effective batch sizes that no other test asks for: each is a question of its own."""


@pytest.fixture(params=["blocking", "asyncio"])
def against(request: pytest.FixtureRequest) -> Against:
    """Runs calls against a service, through both clients, one after the other."""
    return {"blocking": _blocking, "asyncio": _on_asyncio}[request.param]


def _blocking(url: str, body: Body[T], **options: Any) -> T:
    async def called() -> T:
        return await body(client.calls)

    with Client(url, **options) as client:
        return run(called())


def _on_asyncio(url: str, body: Body[T], **options: Any) -> T:
    async def called() -> T:
        async with AsyncClient(url, **options) as client:
            return await body(client)

    return asyncio.run(called())


class Forwarding:
    """Hands requests on to a service, except that some are lost, and the answers of others."""

    def __init__(self, url: str, faults: list[str]) -> None:
        self.url = url
        self.faults = faults
        self.sent = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Lose the request, its answer, or nothing."""
        self.sent += 1
        fault = self.faults.pop(0) if self.faults else "none"
        if fault == "request lost":
            raise httpx.ConnectError("refused")
        if fault == "busy":
            return problem(503, "store-unavailable", Retry_After="1")
        kept = {name: request.headers[name] for name in ("Content-Type", "Idempotency-Key") if name in request.headers}
        url = self.url + request.url.raw_path.decode()
        answer = httpx.request(request.method, url, content=request.content, headers=kept, timeout=60.0)
        if fault == "answer lost":
            raise httpx.ReadError("connection reset")
        return httpx.Response(answer.status_code, headers={"Content-Type": "application/json"}, content=answer.content)


# --- tunings ---


def test_tuning_is_one_call(against: Against, shared_service: Running) -> None:
    """Submitted, waited for, answered; asked again, the stored answer comes back."""
    request = tuning_request(effective_batch_size=next(SIZES))

    async def tune_twice(calls: AsyncCalls) -> None:
        first = await calls.tunings.tune(request, timeout_seconds=PATIENCE_SECONDS)
        assert (first.feasible, first.micro_batch_size) == (True, 37)
        assert await calls.tunings.tune(request) == first
        assert await calls.recommendations.get(first.id) == first
        assert first.id in [row.id async for row in calls.recommendations.list(fingerprint=first.fingerprint)]

    against(shared_service.url, tune_twice)


def test_that_nothing_fits_is_an_answer(against: Against, start_service: StartService) -> None:
    """`tune` returns it; nothing is raised."""
    service = start_service(ScriptedRunner(0))
    answer = against(service.url, lambda calls: calls.tunings.tune(tuning_request()))
    assert not answer.feasible
    assert answer.infeasible_reason


def test_a_tuning_that_fails_is_an_error_with_the_services_problem(
    against: Against, start_service: StartService
) -> None:
    """Its code and words are those that the service stored."""
    runner = ScriptedRunner(37)
    runner.spec_error = WorkloadError("no loss terms")
    with pytest.raises(TuningFailedError, match="no loss terms") as caught:
        against(start_service(runner).url, lambda calls: calls.tunings.tune(tuning_request()))
    assert caught.value.problem.code == "workload-error"


def test_a_tuning_is_followed_from_start_to_end(against: Against, shared_service: Running) -> None:
    """Every state and probe, and the same from any event on; nothing after the last."""

    async def follow(calls: AsyncCalls) -> None:
        tuning = await calls.tunings.submit(tuning_request(effective_batch_size=next(SIZES)))
        events = [event async for event in calls.tunings.events(tuning.id)]
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        assert events[-1].state is State.SUCCEEDED
        told = tuple(event.probe for event in events if event.kind is EventKind.PROBE)
        assert told == await calls.tunings.probes(tuning.id)
        assert [event async for event in calls.tunings.events(tuning.id, after=3)] == events[3:]
        assert [event async for event in calls.tunings.events(tuning.id, after=len(events))] == []

    against(shared_service.url, follow)


def test_work_that_waits_can_be_found_cancelled_and_deleted(against: Against, start_service: StartService) -> None:
    """Lists and the queue tell of it; only what has ended is deleted, and then it is gone."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))

    async def act(calls: AsyncCalls) -> None:
        running = await calls.tunings.submit(tuning_request())
        assert started.wait(PATIENCE_SECONDS)
        waiting = await calls.tunings.submit(tuning_request(effective_batch_size=7), priority=-3)
        assert [row.id async for row in calls.tunings.list(state=State.QUEUED)] == [waiting.id]
        assert [row.id async for row in calls.tunings.list(device="cpu", model="mlp")] == [waiting.id, running.id]
        (entry,) = await calls.queue.list(limit=5)
        assert (entry.id, entry.kind, entry.priority, entry.position) == (waiting.id, WorkKind.TUNING, -3, 1)
        (device,) = await calls.devices.list()
        assert device.held_by == running.id
        with pytest.raises(ConflictError, match="not-ended"):
            await calls.tunings.delete(running.id)
        for tuning in (waiting, running):
            await calls.tunings.cancel(tuning.id)
            assert (await calls.tunings.wait(tuning.id, PATIENCE_SECONDS)).state is State.CANCELLED
            await calls.tunings.delete(tuning.id)
            with pytest.raises(NotFoundError):
                await calls.tunings.get(tuning.id)

    against(service.url, act)


def test_what_is_read_again_unchanged_is_the_same_document(against: Against, shared_service: Running) -> None:
    """The service's tags and the SDK's copies agree."""

    async def read_twice(calls: AsyncCalls) -> None:
        tuning = await calls.tunings.submit(tuning_request(effective_batch_size=next(SIZES)))
        await calls.tunings.wait(tuning.id)
        first = await calls.tunings.get(tuning.id)
        assert await calls.tunings.get(tuning.id) is first
        assert first.recommendation_id is not None
        answer = await calls.recommendations.get(first.recommendation_id)
        assert await calls.recommendations.get(answer.id) is answer == first.recommendation

    against(shared_service.url, read_twice)


# --- jobs ---


class Writing(Trainer):
    """Leaves a log and a checkpoint."""

    @override
    def __call__(self, run: TrainingRun, on_progress: OnProgress, stop_within: StopWithin) -> TrainingResult:
        paths = RunPaths(run.directory)
        (paths.checkpoints / "update-00000003").mkdir(parents=True)
        paths.log.write_text("update 3 of 3\n")
        return super().__call__(run, on_progress, stop_within)


def test_a_job_is_configured_run_looked_into_and_deleted(against: Against, start_service: StartService) -> None:
    """Every call about jobs."""
    service = start_service(trainer=Writing())
    training = TrainingRequest(updates=3)

    async def act(calls: AsyncCalls) -> None:
        assert (await calls.jobs.configure(recommendation(), training)).device == "cpu"
        job = await calls.jobs.submit(recommendation(), training, priority=-1)
        made = [event.progress async for event in calls.jobs.events(job.id)]
        assert [progress.update for progress in made if progress is not None] == [1, 2, 3]
        ended = await calls.jobs.wait(job.id, PATIENCE_SECONDS)
        assert (ended.state, ended.priority) == (State.SUCCEEDED, -1)
        assert await calls.jobs.get(job.id) == ended
        assert [row.id async for row in calls.jobs.list(state=State.SUCCEEDED)] == [job.id]
        assert await calls.jobs.logs(job.id) == "update 3 of 3\n"
        assert await calls.jobs.logs(job.id, tail_bytes=7) == "3 of 3\n"
        assert [checkpoint.update for checkpoint in await calls.jobs.checkpoints(job.id)] == [3]
        assert (await calls.jobs.cancel(job.id)).state is State.SUCCEEDED
        await calls.jobs.delete(job.id)
        with pytest.raises(NotFoundError):
            await calls.jobs.get(job.id)

    against(service.url, act)


# --- answers that are lost ---


def test_a_key_names_one_submission(against: Against, shared_service: Running) -> None:
    """The same again under it is the same tuning; another request under it is refused."""
    one, other = (tuning_request(effective_batch_size=next(SIZES)) for _ in range(2))
    key = f"job-{next(SIZES)}"

    async def submit(calls: AsyncCalls) -> None:
        first = await calls.tunings.submit(one, fresh=True, idempotency_key=key)
        assert (await calls.tunings.submit(one, fresh=True, idempotency_key=key)).id == first.id
        with pytest.raises(InvalidRequestError) as caught:
            await calls.tunings.submit(other, fresh=True, idempotency_key=key)
        assert caught.value.code == "idempotency-key-reused"
        assert (await calls.tunings.submit(one, fresh=True)).id != first.id

    against(shared_service.url, submit)


@given(faults=st.lists(st.sampled_from(["request lost", "answer lost", "busy"]), max_size=5))
@settings(max_examples=12, deadline=None)
def test_a_submission_whose_answers_are_lost_is_made_once(shared_service: Running, faults: list[str]) -> None:
    """Whatever is lost on the way, in whatever order, one tuning is there in the end: the one that was returned."""
    network = Forwarding(shared_service.url, list(faults))
    request = tuning_request(effective_batch_size=next(SIZES))
    with fake_time():
        made = Driver("blocking")(network, lambda calls: calls.tunings.submit(request, fresh=True))
    assert network.sent == len(faults) + 1
    with shared_service.client as client:
        assert [row.id for row in client.tunings.list(fingerprint=made.fingerprint)] == [made.id]


def test_a_job_whose_answer_is_lost_is_made_once(start_service: StartService) -> None:
    """As a tuning, over asyncio."""
    service = start_service()
    network = Forwarding(service.url, ["answer lost", "answer lost"])
    with fake_time():
        made = Driver("asyncio")(network, lambda calls: calls.jobs.submit(recommendation(), TrainingRequest(updates=1)))
    with service.client as client:
        assert [row.id for row in client.jobs.list()] == [made.id]


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_wait_outlives_a_restart_of_the_service(start_service: StartService, kind: str) -> None:
    """It was stopped in the middle; the next one, elsewhere, goes on, and the same wait ends with the answer."""
    started = threading.Event()
    with_a_hold = start_service(ScriptedRunner(37, until_stopped(started)))
    network = Forwarding(with_a_hold.url, [])

    def restart() -> None:
        assert started.wait(PATIENCE_SECONDS)
        with_a_hold.system.coordinator.stop()
        network.url = start_service(ScriptedRunner(37)).url

    async def tune(calls: AsyncCalls) -> int | None:
        tuning = await calls.tunings.submit(tuning_request())
        restarting.start()
        network.faults.extend(["request lost", "busy"])
        return (await calls.tunings.wait(tuning.id, timeout_seconds=PATIENCE_SECONDS)).attempts

    restarting = threading.Thread(target=restart)
    assert Driver(kind)(network, tune) == 2
    restarting.join()


# --- sockets ---


@contextmanager
def scripted_server(*answers: bytes | None) -> Iterator[str]:
    """A server that gives each connection one of these answers and hangs up; none is a reset. It never reads on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    if answer is None:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    elif answer == SILENCE:
                        silent.append(connection.dup())
                    else:
                        connection.sendall(answer)

        silent: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE_SECONDS)
        for connection in silent:
            connection.close()


SILENCE = b"silence"
GOOD = json.dumps({"items": []}).encode()
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(GOOD), GOOD)


@pytest.mark.parametrize("failure", [None, b"", b"nonsense\r\n\r\n", WHOLE[:-3], SILENCE])
def test_connections_that_fail_are_made_anew(against: Against, failure: bytes | None) -> None:
    """A reset, a hang-up, no HTTP, half an answer, and silence for longer than the time given: over real sockets."""
    with scripted_server(failure, failure, WHOLE) as url, fake_time() as clock:
        assert against(url, _all_tunings, timeout_seconds=0.3) == []
        assert len(clock.pauses) == 2


async def _all_tunings(calls: AsyncCalls) -> list[str]:
    return [row.id async for row in calls.tunings.list()]


# --- the client as a whole ---


def test_threads_may_share_a_client(shared_service: Running) -> None:
    """Calls, waits and streams of many threads do not mix."""

    def ask(size: int) -> tuple[int, int]:
        tuning = client.tunings.submit(tuning_request(effective_batch_size=size))
        *_, last = client.tunings.events(tuning.id)
        assert last.state is State.SUCCEEDED
        return size, client.tunings.wait(tuning.id).effective_batch_size

    sizes = [next(SIZES) for _ in range(12)]
    with shared_service.client as client, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, sizes)) == [(size, size) for size in sizes]


def test_many_followers_leave_calls_their_connections(start_service: StartService) -> None:
    """More streams than httpx opens connections by default, and calls beside them."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))

    async def follow() -> None:
        async with AsyncClient(service.url, retry_seconds=0.0) as client:
            tuning = await client.tunings.submit(tuning_request())
            streams = [client.tunings.events(tuning.id) for _ in range(110)]
            first = await asyncio.gather(*(anext(stream) for stream in streams))
            assert {event.state for event in first} == {State.QUEUED}
            await client.tunings.cancel(tuning.id)
            last = await asyncio.gather(*(_last_state(stream) for stream in streams))
            assert set(last) == {State.CANCELLED}

    asyncio.run(follow())


async def _last_state(events: AsyncGenerator[Event, None]) -> State | None:
    return [event.state async for event in events][-1]


async def _every_call(calls: AsyncCalls) -> list[Awaitable[object]]:
    """One of each."""
    tunings, jobs, name = calls.tunings, calls.jobs, "x"
    return [
        calls.livez(),
        calls.readyz(),
        tunings.submit(tuning_request()),
        tunings.get(name),
        tunings.wait(name),
        tunings.tune(tuning_request()),
        tunings.probes(name),
        anext(tunings.events(name)),
        tunings.cancel(name),
        tunings.delete(name),
        anext(tunings.list()),
        calls.recommendations.get(name),
        anext(calls.recommendations.list()),
        jobs.submit(name),
        jobs.configure(name),
        jobs.get(name),
        jobs.wait(name),
        anext(jobs.events(name)),
        jobs.logs(name),
        jobs.checkpoints(name),
        jobs.cancel(name),
        jobs.delete(name),
        anext(jobs.list()),
        calls.devices.list(),
        calls.queue.list(),
        calls.estimates.create(EstimateRequest(spec=mlp_spec(), effective_batch_size=8, gpus=("T4",))),
        calls.gpus.list(),
    ]


def test_every_operation_of_the_service_has_a_call() -> None:
    """Whatever the document names below /v1, and the two health checks."""
    script = Script([problem(418)])

    async def call_all(calls: AsyncCalls) -> int:
        made = await _every_call(calls)
        for call in made:
            with pytest.raises(ApiError):
                await call
        return len(made)

    assert Driver("blocking")(script, call_all) == len(script.seen)
    asked = [(request.method.lower(), request.url.path) for request in script.seen]
    paths = json.loads(export_openapi())["paths"]
    told = [
        (method, path)
        for path, item in paths.items()
        for method in item
        if method in {"get", "post", "delete"} and (path.startswith("/v1/") or path in {"/livez", "/readyz"})
    ]
    assert len(told) > 20
    missing = [it for it in told if not any(it[0] == verb and _matches(it[1], path) for verb, path in asked)]
    assert missing == []


def _matches(template: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), path) is not None


def test_both_clients_have_the_same_calls() -> None:
    """What one group offers on asyncio, the other offers blocking."""
    client = Client()
    for name, group in vars(client.calls).items():
        if name.startswith("_"):
            continue
        offered = {call for call in dir(group) if not call.startswith("_")}
        assert {call for call in dir(getattr(client, name)) if not call.startswith("_")} - {"calls"} == offered
    assert {"livez", "readyz", "call"} <= set(dir(client))
    client.close()


def test_a_newer_service_may_say_more() -> None:
    """A response may have more fields than this SDK knows."""
    answer = httpx.Response(200, json={"status": "ok", "checks": {}, "new": 1})
    assert Driver("blocking")(Script([answer]), lambda calls: calls.livez()).status == "ok"
    more = page("a").json() | {"new": [1]}
    more["items"][0]["newer"] = 7
    assert Driver("asyncio")(Script([httpx.Response(200, json=more)]), _all_tunings) == ["a"]
