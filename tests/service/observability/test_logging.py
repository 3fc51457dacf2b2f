"""Logging, and the ids that connect a line, a request and a trace."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from batchwright.schemas.requests import TrainingRequest
from batchwright.system.processes import propagated_environment
from batchwright.training.launching.launcher import TrainingProcess
from batchwright_service.errors import ConfigurationError
from batchwright_service.observability.instruments import create_spans
from batchwright_service.observability.logging import (
    RepeatLimit,
    announce,
    configure_logging,
    log_context,
    rate_limited_logger,
)
from batchwright_service.observability.tracing import Spans, current_trace_parent, parse_trace_parent, within_trace
from batchwright_service.worker.executors.base import TrainingRun
from batchwright_service.worker.executors.local import LocalExecutor
from tests.support.factories import CPU, recommendation, tuning_request
from tests.support.service.processes import Api, slow_service, wait_until
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
REQUEST_ID = "scheduler-42.a"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The stream of the log, in JSON, during a test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    root.handlers = []
    configure_logging("debug", "json", stream)
    yield stream
    root.handlers = before
    root.setLevel(level)


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    """Return the logged objects."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def submit(service: Running, **headers: str) -> str:
    """Submit a tuning, wait for its end, and return its id."""
    answer = service.http.post("/v1/tunings", json=tuning_request().model_dump(mode="json"), headers=headers)
    assert answer.status_code == 202, answer.text
    tuning_id: str = answer.json()["id"]
    assert service.http.get(f"/v1/tunings/{tuning_id}?wait=30").json()["state"] == "SUCCEEDED"
    return tuning_id


# --- lines ---


def test_a_line_is_an_object_with_its_context(stream: io.StringIO) -> None:
    """Time, level, logger, message, context fields, trace id, and a traceback in one field."""
    log = logging.getLogger("test")
    with log_context(request_id="r1", device=None), within_trace(PARENT):
        log.info("half %d", 1, extra={"fields": {"status": 200}})
        log.error("two\nlines", exc_info=ValueError("broken"))
    log.info("outside")
    first, second, third = lines_of(stream)
    assert first["time"].endswith("+00:00")
    assert {name: first[name] for name in first if name != "time"} == {
        "level": "info",
        "logger": "test",
        "message": "half 1",
        "request_id": "r1",
        "trace_id": TRACE_ID,
        "status": 200,
    }
    assert second["exception"].endswith("ValueError: broken")
    assert set(third) == {"time", "level", "logger", "message"}


def test_text_lines_end_with_their_context() -> None:
    """The message comes first."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    stream = io.StringIO()
    try:
        configure_logging("info", "text", stream)
        with log_context(tuning_id="tun_1"):
            logging.getLogger("test").info("done")
    finally:
        root.handlers = before
        root.setLevel(level)
    assert stream.getvalue().endswith("INFO test: done [tuning_id=tun_1]\n")


@pytest.mark.parametrize("style", ["text", "json"])
def test_requests_cannot_forge_log_lines(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch, style: Literal["text", "json"]
) -> None:
    """Quoted values of a request have no line breaks and no escape codes, in either style."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    stream = io.StringIO()
    configure_logging("info", style, stream)
    start_service().http.post("/v1/zzz%0aERROR%20forged%1b[31m", json={})
    logging.getLogger("test").info("quoted %s", "a\nERROR forged \x1b[31m\x9b")
    written = stream.getvalue()
    assert written.count("forged") >= 2
    assert "\nERROR" not in written
    assert "\x1b" not in written
    assert "\x9b" not in written


def test_a_request_and_its_tuning_are_found_in_the_log(start_service: StartService, stream: io.StringIO) -> None:
    """The submission has the request's id; the worker's lines have the tuning's, its device and the request's trace."""
    service = start_service()
    tuning_id = submit(service, **{"X-Request-ID": REQUEST_ID, "traceparent": PARENT})
    wait_until(lambda: "SUCCEEDED" in stream.getvalue())
    found = lines_of(stream)
    request = next(line for line in found if line.get("request_id") == REQUEST_ID and "route" in line)
    assert (request["method"], request["route"], request["status"]) == ("POST", "/v1/tunings", 202)
    assert (request["level"], request["trace_id"]) == ("info", TRACE_ID)
    work = [line for line in found if line.get("tuning_id") == tuning_id]
    assert len(work) >= 2
    assert {(line["device"], line["trace_id"]) for line in work} == {("cpu", TRACE_ID)}


@pytest.mark.parametrize(("style", "said"), [("text", "ready\n"), ("json", "")])
def test_the_announcement_is_an_object_in_json_logs(
    stream: io.StringIO, capsys: pytest.CaptureFixture[str], style: Literal["text", "json"], said: str
) -> None:
    """A collector of objects gets no plain line."""
    announce("ready", style)
    assert capsys.readouterr().err == said
    assert [line["message"] for line in lines_of(stream)] == ([] if said else ["ready"])


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_repeated_messages_are_limited_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The first one of the next period gives the number suppressed; errors always pass."""
    logger, clock = logging.getLogger("tests.repeated"), Clock()
    logger.addFilter(RepeatLimit(times=2, seconds=60.0, clock=clock))
    for number in range(10):
        logger.warning("again %d", number)
    logger.error("broken")
    assert caplog.messages == ["again 0", "again 1", "broken"]
    clock.now += 60.0
    logger.warning("again %d", 10)
    assert caplog.messages[3:] == ["again 10 (and 8 more times)"]


def test_messages_with_the_same_first_line_are_limited_together(caplog: pytest.LogCaptureFixture) -> None:
    """An error of the event loop lists its socket and connection, of which clients cause any number."""
    logger = logging.getLogger("tests.loop")
    logger.addFilter(RepeatLimit(highest=logging.ERROR))
    for number in range(20):
        logger.error(f"Fatal error on transport\ntransport: <fd={number}>")  # noqa: G004 - as asyncio does
    assert len(caplog.messages) == 5


def test_a_rate_limited_logger_writes_each_text_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Two devices have a line each, with the name of the parent logger; the number of counted texts is bounded."""
    clock = Clock()
    sparse = rate_limited_logger(logging.getLogger("tests.above"), clock)
    for _ in range(3):
        for device in ("cpu", "cuda:0"):
            sparse.warning("%s is full", device)
    clock.now += 60.0
    sparse.warning("%s is full", "cpu")
    assert caplog.messages == ["cpu is full", "cuda:0 is full", "cpu is full (and 2 more times)"]
    assert {record.name for record in caplog.records} == {"tests.above"}


# --- requests ---


def test_every_response_names_its_request(service: Running) -> None:
    """By the caller's id where it is well formed, else by a generated one; refusals too."""
    given = service.http.get("/livez", headers={"X-Request-ID": REQUEST_ID})
    assert given.headers["X-Request-ID"] == REQUEST_ID
    for wrong in ("", "two words", "x" * 65, "line\tbreak"):
        made = service.http.get("/livez", headers={"X-Request-ID": wrong}).headers["X-Request-ID"]
        assert made not in {"", wrong}
    refused = service.http.get("/v1/tunings", headers={"Host": "elsewhere"})
    assert (refused.status_code, bool(refused.headers["X-Request-ID"])) == (403, True)


def test_an_unexpected_error_names_its_log_line(
    service: Running, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets the request id and no details; the log has the traceback under that id."""

    def fail(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(service.system.store.devices, "list", fail)
    answer = service.http.get("/v1/devices", headers={"X-Request-ID": REQUEST_ID})
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["X-Request-ID"] == REQUEST_ID
    problem = answer.json()
    assert problem["code"] == "internal-error"
    assert f"(request {REQUEST_ID})" in problem["detail"]
    assert "secret" not in answer.text
    line = next(line for line in lines_of(stream) if "exception" in line)
    assert (line["request_id"], line["level"]) == (REQUEST_ID, "error")
    assert "KeyError: 'secret'" in line["exception"]


# --- traces ---


@pytest.mark.parametrize(
    "wrong",
    [None, "", PARENT.upper(), PARENT[:-1], f"ff{PARENT[2:]}", f"00-{'0' * 32}-b7ad6b7169203331-01", f"{PARENT}-more"],
)
def test_an_invalid_trace_parent_is_ignored(wrong: str | None) -> None:
    """The standard requires that."""
    assert parse_trace_parent(wrong) is None
    assert parse_trace_parent(PARENT) == PARENT


def test_the_trace_reaches_the_probes(start_service: StartService) -> None:
    """The environment of a probe's process has the trace of its tuning; none for work without a trace."""
    seen: list[dict[str, str]] = []
    service = start_service(ScriptedRunner(37, lambda _size, _stop: seen.append(propagated_environment())))
    submit(service, traceparent=PARENT)
    assert seen
    assert all(environment == {"TRACEPARENT": PARENT} for environment in seen)
    seen.clear()
    service.http.post("/v1/tunings", json=tuning_request().model_dump(mode="json") | {"fresh": True})
    wait_until(lambda: bool(seen))
    assert seen[0] == {}


def test_a_jobs_process_has_the_trace(tmp_path: Path) -> None:
    """The environment of the process has it."""
    seen: list[bytes] = []
    made: list[TrainingProcess] = []

    def new_process(directory: Path) -> TrainingProcess:
        made.append(TrainingProcess(directory))
        return made[-1]

    def grace_seconds() -> float | None:
        if made and made[0].pids:
            environment = Path(f"/proc/{made[0].pids[0]}/environ").read_bytes()
            if environment:  # empty while exec sets up the process
                seen.append(environment)
        return 0.0 if seen else None

    executor = LocalExecutor(CPU, ScriptedRunner(8), new_process)
    with within_trace(PARENT):
        executor.train(
            TrainingRun(tmp_path, recommendation(), TrainingRequest(updates=1)), lambda _: None, grace_seconds
        )
    assert f"TRACEPARENT={PARENT}".encode() in seen[-1].split(b"\0")


# --- spans ---


@pytest.mark.thorough
def test_opentelemetry_is_imported_only_if_enabled() -> None:
    """A service is built without it."""
    code = (
        "import sys, batchwright_service.entrypoints.serve, batchwright_service.entrypoints.work; "
        "from batchwright_service.observability.instruments import create_spans; create_spans('1', {});"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')], "
        "'batchwright_service.observability.opentelemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_spans_are_recorded_only_with_an_exporter(variables: dict[str, str]) -> None:
    """No spans are recorded without an exporter, or when the operator disables them."""
    assert type(create_spans("1", variables)) is Spans


def test_spans_without_the_extra_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the missing package and the extra."""
    for name in [
        name
        for name in sys.modules
        if name.startswith("opentelemetry") or name == "batchwright_service.observability.opentelemetry"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r"batchwright\[otel\]"):
        create_spans("1", {"OTEL_TRACES_EXPORTER": "console"})


def test_a_no_op_span_keeps_the_given_trace() -> None:
    """The trace of the request, or that of the enclosing block."""
    spans = Spans()
    with spans.span("work", parent=PARENT):
        assert current_trace_parent() == PARENT
        with spans.span("probe", micro_batch_size=4):
            assert current_trace_parent() == PARENT
    assert current_trace_parent() is None


@pytest.mark.usefixtures("starts")
def test_spans_follow_a_request_to_its_probes(tmp_path: Path) -> None:
    """With the extra and its variables, request, tuning and probes are spans of the caller's trace."""
    pytest.importorskip("opentelemetry.sdk")
    out = tmp_path / "spans.txt"
    otel = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with slow_service(tmp_path / "data", tmp_path / "journal", 0.0, environment=otel, output=out) as served:
        api = Api(served.url)
        api.http.headers["traceparent"] = PARENT
        assert api.ended(api.submit("/v1/tunings", tuning_request().model_dump(mode="json")))["state"] == "SUCCEEDED"
        wait_until(lambda: '"name": "tuning"' in out.read_text())
        api.http.close()
    spans = [json.loads(text) for text in out.read_text().replace("}\n{", "}\n\0{").split("\0")]
    by_name = {span["name"]: span for span in spans}
    request, tuning, probe = by_name["POST /v1/tunings"], by_name["tuning"], by_name["probe"]
    assert {span["context"]["trace_id"] for span in (request, tuning, probe)} == {f"0x{TRACE_ID}"}
    assert request["parent_id"] == "0xb7ad6b7169203331"
    assert tuning["parent_id"] == request["context"]["span_id"]
    assert probe["parent_id"] == tuning["context"]["span_id"]
    assert tuning["attributes"]["batchwright.outcome"] == "SUCCEEDED"
    assert probe["attributes"]["batchwright.outcome"] in {"FIT", "OOM"}
