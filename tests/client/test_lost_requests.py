"""The SDK against a real service over a network that loses requests and responses: nothing is created twice."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st

from batchwright.client import (
    InvalidRequestError,
)
from batchwright.client.resources.api import AsyncCalls
from batchwright.schemas.requests import TrainingRequest
from tests.support.factories import recommendation, tuning_request
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, until_stopped
from tests.support.service.scripted_network import Driver, all_names, fake_time, problem

Against = Callable[..., Any]
TIMEOUT_SECONDS = 120.0
SIZES = count(1000)
"""Effective batch sizes that no other test uses, so that each makes a request of its own."""


@pytest.fixture(params=["blocking", "asyncio"])
def against(request: pytest.FixtureRequest) -> Against:
    """Runs calls against a service, through both clients, one after the other."""
    return Driver(request.param).against


class Forwarding:
    """Forwards requests to a service, and loses some requests and some responses."""

    def __init__(self, url: str, faults: list[str]) -> None:
        self.url = url
        self.faults = faults
        self.sent = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Lose the request, its response, or nothing."""
        self.sent += 1
        fault = self.faults.pop(0) if self.faults else "none"
        if fault == "request lost":
            raise httpx.ConnectError("refused")
        if fault == "busy":
            return problem(503, "store-unavailable", Retry_After="1")
        kept = {name: request.headers[name] for name in ("Content-Type", "Idempotency-Key") if name in request.headers}
        url = self.url + request.url.raw_path.decode()
        response = httpx.request(request.method, url, content=request.content, headers=kept, timeout=60.0)
        if fault == "response lost":
            raise httpx.ReadError("connection reset")
        return httpx.Response(
            response.status_code, headers={"Content-Type": "application/json"}, content=response.content
        )


# --- lost responses ---


def test_a_key_names_one_submission(against: Against, shared_service: Running) -> None:
    """An equal request under the key gets the same tuning; another request is refused."""
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


@given(faults=st.lists(st.sampled_from(["request lost", "response lost", "busy"]), max_size=5))
@settings(max_examples=12, deadline=None)
def test_a_submission_with_lost_responses_creates_one_tuning(shared_service: Running, faults: list[str]) -> None:
    """Whatever is lost, in any order, the returned tuning is the only one."""
    network = Forwarding(shared_service.url, list(faults))
    request = tuning_request(effective_batch_size=next(SIZES))
    with fake_time():
        made = Driver("blocking")(network, lambda calls: calls.tunings.submit(request, fresh=True))
    assert network.sent == len(faults) + 1
    with shared_service.client as client:
        assert [row.id for row in client.tunings.list(fingerprint=made.fingerprint)] == [made.id]


def test_a_submission_with_lost_responses_creates_one_job(start_service: StartService) -> None:
    """As a tuning, over asyncio."""
    service = start_service()
    network = Forwarding(service.url, ["response lost", "response lost"])
    with fake_time():
        made = Driver("asyncio")(network, lambda calls: calls.jobs.submit(recommendation(), TrainingRequest(updates=1)))
    with service.client as client:
        assert [row.id for row in client.jobs.list()] == [made.id]


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_wait_survives_a_restart_of_the_service(start_service: StartService, kind: str) -> None:
    """The service stops midway; its successor at another address continues, and the wait returns the recommendation."""
    started = threading.Event()
    with_a_hold = start_service(ScriptedRunner(37, until_stopped(started)))
    network = Forwarding(with_a_hold.url, [])

    def restart() -> None:
        assert started.wait(TIMEOUT_SECONDS)
        with_a_hold.system.coordinator.stop()
        network.url = start_service(ScriptedRunner(37)).url

    async def tune(calls: AsyncCalls) -> int | None:
        tuning = await calls.tunings.submit(tuning_request())
        restarting.start()
        network.faults.extend(["request lost", "busy"])
        return (await calls.tunings.wait(tuning.id, timeout_seconds=TIMEOUT_SECONDS)).attempts

    restarting = threading.Thread(target=restart)
    assert Driver(kind)(network, tune) == 2
    restarting.join()


# --- sockets ---


@contextmanager
def scripted_server(*answers: bytes | None, pause_seconds: float = 0.0) -> Iterator[str]:
    """A server that gives each connection one of these answers and hangs up; none is a reset. It never reads on.

    It pauses in the middle of an answer and before its last three bytes.
    """
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
                        for part in (answer[:20], answer[20:-3], answer[-3:]):
                            connection.sendall(part)
                            time.sleep(pause_seconds)

        silent: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(TIMEOUT_SECONDS)
        for connection in silent:
            connection.close()


SILENCE = b"silence"
GOOD = json.dumps({"items": []}).encode()
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(GOOD), GOOD)


@pytest.mark.parametrize("failure", [None, b"", b"nonsense\r\n\r\n", WHOLE[:-3], SILENCE])
def test_a_failed_connection_is_retried(against: Against, failure: bytes | None) -> None:
    """A reset, a hang-up, no HTTP, half a response, and silence for longer than the time given: over real sockets."""
    with scripted_server(failure, failure, WHOLE) as url, fake_time() as clock:
        assert against(url, all_names, timeout_seconds=1.0 if failure is SILENCE else TIMEOUT_SECONDS) == []
        assert len(clock.pauses) == 2


def test_a_timeout_bounds_each_silence(against: Against) -> None:
    """A response that keeps coming may take longer in all."""
    with scripted_server(WHOLE, pause_seconds=0.6) as url:
        assert against(url, all_names, timeout_seconds=1.0, retry_seconds=0.0) == []
