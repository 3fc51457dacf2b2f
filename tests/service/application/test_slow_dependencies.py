"""Hubs and file systems that hang or fail hold few threads of the API, and the caller is told to try again."""

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchwright_service.application.rules import policy
from batchwright_service.application.rules.bulkhead import Bulkhead
from batchwright_service.errors import DependencyBusyError
from tests.support.factories import gpt_spec
from tests.support.service.asking import PATIENCE_SECONDS, body, problem_in
from tests.support.service.running import Running, StartService

REFUSING = "http://127.0.0.1:1"


@pytest.fixture
def hanging() -> Iterator[str]:
    """A hub that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def failing() -> Iterator[str]:
    """A hub that answers each request with 401: the token of the service is wrong."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def with_hub(
    start: StartService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, seconds: float
) -> Running:
    """A service that may fetch models of a hub, each within some seconds."""
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(policy, "_HUB_SECONDS", seconds)
    return start(hub_models=("acme/*",))


def tuning_of(name: str) -> dict[str, Any]:
    """A submission that names a model of the hub."""
    spec = gpt_spec().model_dump(mode="json", exclude_defaults=True)
    return body(spec={**spec, "model": {"kind": "transformers", "task": "causal-lm", "pretrained": name}})


def test_a_hub_that_hangs_stops_no_other_request(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hanging: str
) -> None:
    """Of sixty submissions, few wait for the hub; all are told to try again. Lists and pages are served meanwhile."""
    service = with_hub(start_service, monkeypatch, tmp_path, hanging, 6.0)
    first = threading.Event()

    def submit(index: int) -> httpx.Response:
        with httpx.Client(base_url=service.url, timeout=PATIENCE_SECONDS) as http:
            response = http.post("/v1/tunings", json=tuning_of(f"acme/tiny-{index}"))
        first.set()
        return response

    with ThreadPoolExecutor(60) as pool:
        responses = [pool.submit(submit, index) for index in range(60)]
        assert first.wait(PATIENCE_SECONDS)
        for path in ("/livez", "/v1/tunings", "/tunings"):
            assert service.http.get(path, timeout=25.0).status_code == 200
        codes: Counter[str] = Counter()
        for response in (each.result() for each in responses):
            assert (response.status_code, "retry-after" in response.headers) == (503, True)
            codes[response.json()["code"]] += 1
    assert codes.keys() == {"dependency-busy", "hub-unavailable"}
    assert codes["dependency-busy"] >= 60 - 2 * 8


@pytest.mark.parametrize("address", ["hanging", REFUSING])
def test_a_hub_that_is_away_is_told_with_a_time_to_try_again(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hanging: str, address: str
) -> None:
    """The spec may be right: no client gives up."""
    found = hanging if address == "hanging" else address
    service = with_hub(start_service, monkeypatch, tmp_path, found, 2.0)
    response = service.http.post("/v1/tunings", json=tuning_of("acme/tiny"))
    problem = problem_in(response, 503, "hub-unavailable")
    assert response.headers["retry-after"]
    assert "did not answer within 2 s" in problem.detail


def test_a_model_that_the_hub_does_not_give_is_a_fault_of_the_spec(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str
) -> None:
    """The child process tells apart what passes and what does not."""
    service = with_hub(start_service, monkeypatch, tmp_path, failing, PATIENCE_SECONDS)
    problem = problem_in(service.http.post("/v1/tunings", json=tuning_of("acme/tiny")), 422, "invalid-spec")
    assert "could not be fetched from" in problem.detail


def test_a_bulkhead_bounds_those_who_wait() -> None:
    """Beyond the slots and the queue nobody waits, and a slot is free again after any end."""
    bulkhead = Bulkhead("the hub", slots=1, queue=0, wait_seconds=0.0)
    with bulkhead.slot(), pytest.raises(DependencyBusyError, match="wait for the hub"), bulkhead.slot():
        pass
    queued = Bulkhead("the hub", slots=1, queue=1, wait_seconds=0.01)
    with queued.slot(), pytest.raises(DependencyBusyError), queued.slot():
        pass
    for _ in range(3):
        with pytest.raises(ValueError, match="of the call"), bulkhead.slot():
            raise ValueError("of the call")
