"""The SDK against a real service: both clients, every call."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from typing_extensions import override

from batchwright.client import (
    ApiError,
    AsyncClient,
    Client,
    ConflictError,
    NotFoundError,
    TuningFailedError,
)
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import Event, EventKind
from batchwright.client.resources.api import AsyncCalls
from batchwright.errors import WorkloadError
from batchwright.exports.base import ExportOptions
from batchwright.schemas.estimates import EstimateRequest
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import TrainingResult
from batchwright.training.launching.run_directory import RunPaths
from batchwright_service.worker.executors.base import GraceSeconds, OnProgress, TrainingRun
from tests.support.factories import mlp_spec, recommendation, tuning_request
from tests.support.paths import OPENAPI
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, Trainer, until_stopped
from tests.support.service.scripted_network import Driver, Script, all_names, page, problem

Against = Callable[..., Any]
PATIENCE_SECONDS = 120.0
SIZES = count(1000)
"""Effective batch sizes that no other test asks for: each is a question of its own."""


@pytest.fixture(params=["blocking", "asyncio"])
def against(request: pytest.FixtureRequest) -> Against:
    """Runs calls against a service, through both clients, one after the other."""
    return Driver(request.param).against


# --- tunings ---


def test_tuning_is_one_call(against: Against, shared_service: Running) -> None:
    """SubmissionResponse, waited for, answered; asked again, the stored answer comes back."""
    request = tuning_request(effective_batch_size=next(SIZES))

    async def tune_twice(calls: AsyncCalls) -> None:
        first = await calls.tunings.tune(request, timeout_seconds=PATIENCE_SECONDS)
        assert (first.feasible, first.largest_micro_batch_size) == (True, 37)
        assert await calls.tunings.tune(request) == first
        assert await calls.recommendations.get(first.id) == first
        assert first.id in [row.id async for row in calls.recommendations.list(fingerprint=first.fingerprint)]

    against(shared_service.url, tune_twice)


def test_an_infeasible_recommendation_is_returned(against: Against, start_service: StartService) -> None:
    """`tune` returns the recommendation and raises nothing."""
    service = start_service(ScriptedRunner(0))
    answer = against(service.url, lambda calls: calls.tunings.tune(tuning_request()))
    assert not answer.feasible
    assert answer.infeasible_reason


def test_a_failed_tuning_raises_the_services_problem(against: Against, start_service: StartService) -> None:
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
        followed_probes = tuple(event.probe for event in events if event.kind is EventKind.PROBE)
        assert followed_probes == await calls.tunings.probes(tuning.id)
        assert [event async for event in calls.tunings.events(tuning.id, after=3)] == events[3:]
        assert [event async for event in calls.tunings.events(tuning.id, after=len(events))] == []

    against(shared_service.url, follow)


def test_waiting_work_can_be_listed_cancelled_and_deleted(against: Against, start_service: StartService) -> None:
    """Lists and the queue show the work; only ended work is deleted, and then it is not found."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))

    async def act(calls: AsyncCalls) -> None:
        running = await calls.tunings.submit(tuning_request())
        assert started.wait(PATIENCE_SECONDS)
        waiting = await calls.tunings.submit(tuning_request(effective_batch_size=7), priority=-3, name="later")
        assert [row.id async for row in calls.tunings.list(state=State.QUEUED)] == [waiting.id]
        assert [row.id async for row in calls.tunings.list(device="cpu", model="mlp")] == [waiting.id, running.id]
        (entry,) = await calls.queue.list(limit=5)
        assert (entry.id, entry.kind, entry.priority, entry.position) == (waiting.id, WorkKind.TUNING, -3, 1)
        assert (entry.name, entry.effective_batch_size) == ("later", 7)
        (device,) = await calls.devices.list()
        assert device.running_id == running.id
        with pytest.raises(ConflictError, match="not-ended"):
            await calls.tunings.delete(running.id)
        for tuning in (waiting, running):
            await calls.tunings.cancel(tuning.id)
            assert (await calls.tunings.wait(tuning.id, PATIENCE_SECONDS)).state is State.CANCELLED
            await calls.tunings.delete(tuning.id)
            with pytest.raises(NotFoundError):
                await calls.tunings.get(tuning.id)

    against(service.url, act)


def test_an_unchanged_document_is_read_from_the_cache(against: Against, shared_service: Running) -> None:
    """The service's entity tags and the SDK's ETag cache agree."""

    async def read_twice(calls: AsyncCalls) -> None:
        tuning = await calls.tunings.submit(tuning_request(effective_batch_size=next(SIZES)))
        await calls.tunings.wait(tuning.id)
        first = await calls.tunings.get(tuning.id)
        assert await calls.tunings.get(tuning.id) is first
        assert first.recommendation_id is not None
        answer = await calls.recommendations.get(first.recommendation_id)
        assert await calls.recommendations.get(answer.id) is answer == first.recommendation

    against(shared_service.url, read_twice)


def test_every_recommendation_has_the_librarys_methods(against: Against, shared_service: Running) -> None:
    """However it is read, it exports as the service does, and has the plot and the view of a notebook."""
    request = tuning_request(effective_batch_size=next(SIZES))

    async def read(calls: AsyncCalls) -> None:
        tuned = await calls.tunings.tune(request, timeout_seconds=PATIENCE_SECONDS)
        stored = await calls.tunings.submit(request)
        waited, got = await calls.tunings.wait(stored.id), await calls.tunings.get(stored.id)
        job = await calls.jobs.submit(tuned.id, TrainingRequest(updates=1))
        ended = await calls.jobs.wait(job.id, PATIENCE_SECONDS)
        by_the_service = await calls.recommendations.export(tuned.id, "slurm", options=ExportOptions(script="own.py"))
        found = [tuned, await calls.recommendations.get(tuned.id), job.recommendation, ended.recommendation]
        for each in (*found, stored.recommendation, waited.recommendation, got.recommendation):
            assert each is not None
            assert each.to_slurm(script="own.py") == by_the_service
            assert each.export("deepspeed", allow_inexact=True).format == "deepspeed"
            assert each.plot().data
            assert "micro-batch" in each._repr_html_()

    against(shared_service.url, read)


# --- jobs ---


class Writing(Trainer):
    """Leaves a log and a checkpoint."""

    @override
    def __call__(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        paths = RunPaths(run.directory)
        (paths.checkpoints / "update-00000003").mkdir(parents=True)
        paths.log.write_text("update 3 of 3\n")
        return super().__call__(run, on_progress, grace_seconds)


def test_a_job_is_configured_run_inspected_and_deleted(against: Against, start_service: StartService) -> None:
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


def test_many_streams_do_not_block_calls(start_service: StartService) -> None:
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
        tunings.set_priority(name, 0),
        tunings.delete(name),
        tunings.cancel_all([name]),
        tunings.delete_all([name]),
        anext(tunings.list()),
        calls.recommendations.get(name),
        calls.recommendations.staleness(name),
        calls.recommendations.confirm(name),
        calls.recommendations.export(name, name),
        calls.recommendations.exported_file(name, name, name),
        calls.recommendations.formats(),
        anext(calls.recommendations.list()),
        jobs.submit(name),
        jobs.configure(name),
        jobs.get(name),
        jobs.wait(name),
        anext(jobs.events(name)),
        jobs.logs(name),
        jobs.checkpoints(name),
        jobs.cancel(name),
        jobs.set_priority(name, 0),
        jobs.resume(name),
        jobs.delete(name),
        jobs.cancel_all([name]),
        jobs.delete_all([name]),
        anext(jobs.list()),
        calls.devices.list(),
        calls.queue.list(),
        calls.estimates.create(EstimateRequest(spec=mlp_spec(), effective_batch_size=8, gpus=("T4",))),
        calls.gpus.list(),
        calls.commands.list(),
        calls.keys.create(name, ["tunings:read"]),
        calls.keys.list(),
        calls.keys.revoke(name),
        anext(calls.audit.list()),
        calls.webhooks.create("https://hooks.example.org"),
        calls.webhooks.list(),
        calls.webhooks.rotate(name),
        calls.webhooks.delete(name),
        calls.webhooks.test(name),
        anext(calls.webhooks.deliveries(name)),
        calls.webhooks.resend(name, name),
        calls.summary(),
        calls.occupancy(),
        calls.fleet(),
    ]


def test_every_operation_of_the_service_has_a_call() -> None:
    """The SDK has a call for each operation below /v1, and for the two health checks."""
    script = Script([problem(418)])

    async def call_all(calls: AsyncCalls) -> int:
        made = await _every_call(calls)
        for call in made:
            with pytest.raises(ApiError):
                await call
        return len(made)

    assert Driver("blocking")(script, call_all) == len(script.seen)
    sent = [(request.method.lower(), request.url.path) for request in script.seen]
    paths = json.loads(OPENAPI.read_text())["paths"]
    documented = [
        (method, path)
        for path, item in paths.items()
        for method in item
        if method in {"get", "post", "delete"} and (path.startswith("/v1/") or path in {"/livez", "/readyz"})
    ]
    assert len(documented) > 20
    missing = [
        operation
        for operation in documented
        if not any(operation[0] == verb and _matches(operation[1], path) for verb, path in sent)
    ]
    assert missing == []


def _matches(template: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), path) is not None


def test_both_clients_have_the_same_calls() -> None:
    """Each group has the same calls on asyncio and blocking."""
    client = Client()
    for name, group in vars(client.calls).items():
        if name.startswith("_"):
            continue
        offered = {call for call in dir(group) if not call.startswith("_")}
        assert {call for call in dir(getattr(client, name)) if not call.startswith("_")} - {"calls"} == offered
    assert {"livez", "readyz", "call"} <= set(dir(client))
    client.close()


def test_a_dictionary_with_a_name_is_refused(shared_service: Running) -> None:
    """The name is an argument of the call. In a dictionary it would be lost."""
    document: Any = {**tuning_request().model_dump(mode="json"), "name": "nightly"}
    with Client(shared_service.url) as client, pytest.raises(ValidationError, match="name"):
        client.tunings.submit(document)


def test_unknown_fields_of_a_newer_service_are_ignored() -> None:
    """A response may have more fields than this SDK knows."""
    answer = httpx.Response(200, json={"status": "ok", "checks": {}, "new": 1})
    assert Driver("blocking")(Script([answer]), lambda calls: calls.livez()).status == "ok"
    more = page("a").json() | {"new": [1]}
    more["items"][0]["newer"] = 7
    assert Driver("asyncio")(Script([httpx.Response(200, json=more)]), all_names) == ["a"]
