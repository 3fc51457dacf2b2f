"""Estimates over HTTP: real ones of small models, and what bounds them, with real processes."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from batchwright.client import ApiError, Client
from batchwright.client.documents.problems import Problem
from batchwright.errors import EstimateCancelledError, EstimateError
from batchwright.hardware.gpu_table import GPUS
from batchwright.schemas.estimates import Estimate, EstimateRequest, GpuEstimate, Verdict
from batchwright.schemas.workload import WorkloadSpec
from batchwright_service.application.estimates import EstimateCases, EstimateLimits, ShouldStop
from batchwright_service.application.rules.policy import Policy
from batchwright_service.bootstrap import app_of
from batchwright_service.errors import EstimatesBusyError, InvalidInputError, TargetNotAllowedError
from tests.support.command import is_running
from tests.support.factories import mlp_spec, python_spec
from tests.support.service.running import Running, StartService, listening

PATIENCE_SECONDS = 120.0
TARGET = "tests.support.misbehaving:build"


def estimate_request(spec: WorkloadSpec | None = None, *gpus: str, **changes: Any) -> EstimateRequest:
    """A question about a small MLP."""
    return EstimateRequest(spec=spec or mlp_spec(), gpus=gpus or ("H100-80GB",), **changes)


def until(happens: Callable[[], bool]) -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happens():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


class Hanging:
    """A workload that hangs while it is traced, and notes its process and one that it started."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self.spec = python_spec(TARGET, way="leaves-a-child-and-hangs", argument=str(journal))

    def processes(self) -> list[int]:
        """The processes, once they run."""
        until(lambda: self._journal.exists() and self._journal.read_text().endswith("\n"))
        return [int(word) for word in self._journal.read_text().split()]


@pytest.fixture
def hanging(tmp_path: Path) -> Hanging:
    """A workload that hangs."""
    return Hanging(tmp_path / "processes.txt")


@contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Work that goes on beside the test."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


# --- answers ---


@pytest.fixture(scope="module")
def client(shared_service: Running) -> Iterator[Client]:
    """A client of the shared service."""
    with shared_service.client as opened:
        yield opened


@pytest.mark.thorough
def test_an_estimate_says_what_fits_and_that_it_is_one(client: Client) -> None:
    """In the order asked, under the catalogue's names, with the plan, and marked as not measured."""
    found = client.estimates.create(
        estimate_request(None, "NVIDIA A10G", "16GiB", micro_batch_size=8, effective_batch_size=100)
    )
    assert (found.measured, [gpu.gpu for gpu in found.gpus]) == (False, ["A10G", "16GiB"])
    for gpu in found.gpus:
        assert gpu.plan is not None
        assert gpu.peak is not None
        assert sum(gpu.plan.micro_batch_sizes[0]) == 100
        assert (gpu.peak.micro_batch_size, gpu.peak.verdict) == (8, Verdict.FITS)


def test_the_catalogue_is_listed(client: Client) -> None:
    """Every GPU that can be named, with its sources."""
    assert client.gpus.list() == GPUS


# --- refusals ---


def refused(client: Client, request: EstimateRequest) -> Problem:
    """The problem with which an estimate is refused."""
    with pytest.raises(ApiError) as caught:
        client.estimates.create(request)
    return caught.value.problem


def test_every_unknown_gpu_is_named(client: Client) -> None:
    """By its place in the request, with what there is."""
    problem = refused(client, estimate_request(None, "H200", "H1000", "A100"))
    assert (problem.status, problem.code) == (422, "invalid-request")
    assert [fault.field for fault in problem.errors] == ["gpus.1", "gpus.2"]
    assert "A100-40GB, A100-80GB" in problem.errors[1].message


def test_a_share_that_is_too_small_is_named(shared_service: Running) -> None:
    """The checks of the document are problems like any other."""
    body = json.loads(estimate_request().model_dump_json()) | {"micro_batch_size": 9, "effective_batch_size": 8}
    answer = shared_service.http.post("/v1/estimates", json=body)
    assert answer.status_code == 422
    assert "`micro_batch_size` is 9" in answer.json()["detail"]


def test_code_is_traced_only_by_allow_list(client: Client) -> None:
    """A `python` target that is not listed does not run."""
    problem = refused(client, estimate_request(python_spec("os:system")))
    assert (problem.status, problem.code) == (403, "python-target-not-allowed")


def test_an_estimate_that_takes_too_long_is_given_up(client: Client) -> None:
    """504 with the time: torch alone takes longer to import."""
    problem = refused(client, estimate_request(None, "B200", timeout_seconds=0.1))
    assert (problem.status, problem.code) == (504, "estimate-timed-out")
    assert "0.1 s" in problem.detail


# --- bounds ---


def posted(url: str, request: EstimateRequest) -> socket.socket:
    """The connection over which a request was sent, its answer not read."""
    address = urlsplit(url)
    body = request.model_dump_json().encode()
    connection = socket.create_connection((str(address.hostname), int(address.port or 0)))
    head = f"POST /v1/estimates HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_estimates_leave_the_api_its_threads(start_service: StartService) -> None:
    """While more estimates are made than the API has threads for everything else, everything else is answered."""
    service = start_service(estimate_slots=45)
    estimator = scripted_in(service)
    estimator.go_on.clear()
    with ExitStack() as stack:
        for size in range(1, 46):
            stack.enter_context(posted(service.url, estimate_request(micro_batch_size=size)))
        for _ in range(45):
            assert estimator.begun.acquire(timeout=PATIENCE_SECONDS)
        assert service.http.get("/v1/tunings", timeout=PATIENCE_SECONDS).status_code == 200
        estimator.go_on.set()


@pytest.mark.thorough
def test_a_service_that_ends_ends_its_estimates(start_service: StartService, hanging: Hanging) -> None:
    """The waiting caller gets an error, and no process is left."""
    service = start_service(python_targets=TARGET)
    app = app_of(service.system, service.settings)
    body = json.loads(estimate_request(hanging.spec).model_dump_json())
    with (
        listening(app) as url,
        in_background(lambda: httpx.post(f"{url}/v1/estimates", json=body, timeout=PATIENCE_SECONDS)) as asked,
    ):
        processes = hanging.processes()
        app.state.context.feed.close()
        answer = asked.result(PATIENCE_SECONDS)
    assert (answer.status_code, answer.json()["code"]) == (503, "estimate-cancelled")
    assert not any(is_running(pid) for pid in processes)


class Scripted:
    """An estimator that answers at once, or holds until it may go on."""

    def __init__(self) -> None:
        self.asked = 0
        self.stopped = 0
        self.error: Exception | None = None
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, request: EstimateRequest, should_stop: ShouldStop) -> Estimate:
        """Answer with the number of the call as the number of parameters."""
        self.asked += 1
        self.begun.release()
        if self.error is not None:
            raise self.error
        while not self.go_on.wait(0.01):
            if should_stop():
                self.stopped += 1
                raise EstimateCancelledError("told to stop")
        gpus = tuple(
            GpuEstimate(
                gpu=name, usable_bytes=1, feasible=Verdict.FITS, largest_micro_batch_size=1, surely_fits=1, may_fit=1
            )
            for name in request.gpus
        )
        return Estimate(decisions="cpu", parameters=self.asked, gpus=gpus, versions={}, seconds=0.0)


def scripted_in(service: Running) -> Scripted:
    """Replace the estimator of a service that has made no estimate."""
    estimator = Scripted()
    service.system.context.estimates._estimator = estimator
    return estimator


def test_estimates_over_http_are_those_of_the_estimator(start_service: StartService) -> None:
    """Answers keep the order; repeated ones come from memory, also for another name of a GPU; errors keep theirs."""
    service = start_service()
    estimator = scripted_in(service)
    with service.client as client:
        found = client.estimates.create(estimate_request(None, "NVIDIA A10G", "16GiB"))
        assert (found.measured, [gpu.gpu for gpu in found.gpus]) == (False, ["NVIDIA A10G", "16GiB"])
        assert client.estimates.create(estimate_request(None, "A10G", "16GiB", timeout_seconds=60.0)) == found
        assert client.estimates.create(estimate_request(None, "L4")).parameters == 2
        estimator.error = EstimateError("labels must be below 10")
        problem = refused(client, estimate_request(None, "T4"))
    assert (problem.status, problem.code, problem.detail) == (422, "cannot-estimate", "labels must be below 10")


def test_a_client_that_goes_away_frees_its_slot(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the slot is taken others are 503 with when to come back; a closed connection stops the estimate."""
    service = start_service()
    estimator = scripted_in(service)
    estimator.go_on.clear()
    monkeypatch.setattr(service.system.context.estimates._bulkhead, "_wait_seconds", 0.05)
    with posted(service.url, estimate_request()):
        assert estimator.begun.acquire(timeout=PATIENCE_SECONDS)
        busy = service.http.post("/v1/estimates", json=json.loads(estimate_request().model_dump_json()))
        assert (busy.status_code, busy.json()["code"], "retry-after" in busy.headers) == (503, "estimates-busy", True)
        assert estimator.stopped == 0
    until(lambda: estimator.stopped == 1)
    estimator.go_on.set()
    with service.client as client:
        assert client.estimates.create(estimate_request()).gpus[0].feasible is Verdict.FITS


def test_an_estimate_ends_with_the_service(start_service: StartService) -> None:
    """The caller that waits for it gets an error."""
    service = start_service()
    estimator = scripted_in(service)
    estimator.go_on.clear()
    body = json.loads(estimate_request().model_dump_json())
    with in_background(lambda: service.http.post("/v1/estimates", json=body)) as asked:
        assert estimator.begun.acquire(timeout=PATIENCE_SECONDS)
        service.system.context.feed.close()
        answer = asked.result(PATIENCE_SECONDS)
    assert (answer.status_code, answer.json()["code"], estimator.stopped) == (503, "estimate-cancelled", 1)


def bounded(estimator: Scripted, *targets: str, **limits: Any) -> EstimateCases:
    """Estimates around a scripted estimator."""
    return EstimateCases(estimator, Policy(targets, ()), {"torch": "2.8"}, EstimateLimits(**limits))


def test_the_least_recently_used_estimate_is_evicted() -> None:
    """A cache of two keeps an estimate that was used again."""
    estimator = Scripted()
    estimates = bounded(estimator, cache_entries=2)
    numbers = [estimates.estimate(estimate_request(micro_batch_size=size)).parameters for size in (1, 2, 1, 3, 1, 2)]
    assert numbers == [1, 2, 1, 3, 1, 4]


def test_estimates_are_evicted_by_size() -> None:
    """Space for one and a half estimates keeps one; a larger estimate is not cached."""
    nbytes = len(Scripted()(estimate_request(), lambda: False).model_dump_json())
    question = len(bounded(Scripted())._cache_key(estimate_request()))
    one = bounded(Scripted(), cache_bytes=(nbytes + question) * 3 // 2)
    numbers = [one.estimate(estimate_request(micro_batch_size=size)).parameters for size in (1, 1, 2, 2, 1)]
    assert numbers == [1, 1, 2, 2, 3]
    none = bounded(Scripted(), cache_bytes=nbytes)
    assert [none.estimate(estimate_request()).parameters for _ in range(2)] == [1, 2]


def test_code_that_may_change_is_traced_each_time() -> None:
    """Estimates of `python` models are not cached."""
    estimates = bounded(Scripted(), TARGET)
    request = estimate_request(python_spec(TARGET))
    assert [estimates.estimate(request).parameters for _ in range(2)] == [1, 2]
    with pytest.raises(TargetNotAllowedError):
        bounded(Scripted()).estimate(request)


def test_concurrent_equal_estimates_are_traced_once() -> None:
    """The second caller finds the estimate of the first in the cache."""
    estimator = Scripted()
    estimator.go_on.clear()
    estimates = bounded(estimator)
    with (
        in_background(lambda: estimates.estimate(estimate_request())) as first,
        in_background(lambda: estimates.estimate(estimate_request())) as second,
    ):
        assert estimator.begun.acquire(timeout=PATIENCE_SECONDS)
        estimator.go_on.set()
        assert first.result(PATIENCE_SECONDS) == second.result(PATIENCE_SECONDS)
    assert estimator.asked == 1


def test_a_full_queue_refuses_at_once() -> None:
    """Beyond the slots and those who may wait, nobody holds a thread; a failed estimate gives its slot back."""
    estimator = Scripted()
    estimator.go_on.clear()
    estimates = bounded(estimator, slots=2, queue=0)
    stop = threading.Event()

    def work() -> Estimate:
        return estimates.estimate(estimate_request(), stop.is_set)

    with in_background(work) as first, in_background(work) as second:
        for _ in range(2):
            assert estimator.begun.acquire(timeout=PATIENCE_SECONDS)
        with pytest.raises(EstimatesBusyError, match="the 2 slots"):
            estimates.estimate(estimate_request())
        stop.set()
        for asked in (first, second):
            with pytest.raises(EstimateCancelledError):
                asked.result(PATIENCE_SECONDS)
    estimator.go_on.set()
    assert estimates.estimate(estimate_request()).parameters == 3


def test_a_caller_who_leaves_the_queue_is_not_served() -> None:
    """While waiting for a slot, as while it is made."""
    estimator = Scripted()
    estimator.go_on.clear()
    estimates = bounded(estimator)
    with in_background(lambda: estimates.estimate(estimate_request())) as first:
        assert estimator.begun.acquire(timeout=PATIENCE_SECONDS)
        with pytest.raises(EstimateCancelledError):
            estimates.estimate(estimate_request(), lambda: True)
        estimator.go_on.set()
        assert first.result(PATIENCE_SECONDS).parameters == 1


@pytest.mark.parametrize("name", ["9" * 400 + "GiB", "\0", "", "🦙", "0GiB"])
def test_odd_names_of_gpus_are_refused(name: str) -> None:
    """Whatever the text, it is the caller's mistake."""
    with pytest.raises((InvalidInputError, EstimateError)):
        bounded(Scripted()).estimate(estimate_request(None, name))


def test_the_list_of_gpus_is_small_and_read_once(start_service: StartService) -> None:
    """Compressed where the client accepts it; each representation has a tag of its own, with which 304 comes back."""
    service = start_service()
    found = {
        coding: service.http.get("/v1/gpus", headers={"Accept-Encoding": coding}) for coding in ("gzip", "identity")
    }
    zipped, plain = found["gzip"], found["identity"]
    assert zipped.json() == plain.json() == EstimateCases.gpus().model_dump(mode="json")
    assert (zipped.headers["content-encoding"], plain.headers.get("content-encoding")) == ("gzip", None)
    assert 4 * int(zipped.headers["content-length"]) < int(plain.headers["content-length"])
    assert zipped.headers["etag"] != plain.headers["etag"]
    for coding, response in found.items():
        headers = {"Accept-Encoding": coding, "If-None-Match": response.headers["etag"]}
        again = service.http.get("/v1/gpus", headers=headers)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", response.headers["etag"])
        assert "Accept-Encoding" in again.headers["vary"]
