"""The routes: their responses, refusals and messages."""

import json
import re
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import pytest

from batchwright.client import ApiError, Client
from batchwright.client.documents.states import State
from batchwright.client.documents.work import TuningSubmission
from batchwright.errors import EstimateError
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.api.dependencies import strict_body
from batchwright_service.problem_mapping import problem_of
from tests.support.factories import CUDA, gpt_spec, mlp_spec, python_spec, recommendation, tuning_request
from tests.support.service.asking import PATIENCE_SECONDS, UNKNOWN, body, ended, problem_in
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, until_stopped


def nested(depth: int) -> Any:
    """Return lists in lists."""
    return [nested(depth - 1)] if depth else 0


# --- the main path ---


def test_a_submitted_tuning_has_a_location(service: Running) -> None:
    """202 with the Location of the tuning, which then ends with a recommendation."""
    response = service.http.post("/v1/tunings", json=body())
    assert response.status_code == HTTPStatus.ACCEPTED
    tuning = service.http.get(response.headers["location"], params={"wait": 20}).json()
    assert (tuning["id"], tuning["state"]) == (response.json()["id"], "SUCCEEDED")
    assert tuning["recommendation"]["largest_micro_batch_size"] == 37


def test_a_repeated_request_is_served_from_the_store(service: Running, client: Client) -> None:
    """200 with the earlier tuning; `fresh` probes again."""
    first = client.tunings.wait(client.tunings.submit(tuning_request()).id)
    response = service.http.post("/v1/tunings", json=body())
    assert (response.status_code, response.json()["id"]) == (HTTPStatus.OK, first.id)
    again = client.tunings.submit(tuning_request(), fresh=True)
    assert again.id != first.id
    assert client.tunings.wait(again.id).recommendation_id != first.recommendation_id


def test_the_workers_are_woken_after_each_change_that_concerns_them(service: Running) -> None:
    """By requests that queue or cancel work, one or several pieces; not by a refused request, nor by reading."""
    woken: SimpleQueue[str] = SimpleQueue()
    object.__setattr__(service.system.context, "wake_workers", lambda: woken.put("woken"))
    assert service.http.post("/v1/tunings", json=body(effective_batch_size=0)).status_code == 422
    location = service.http.post("/v1/tunings", json=body()).headers["location"]
    assert woken.get(timeout=PATIENCE_SECONDS)
    answer = ended(service.http, location)["recommendation_id"]
    job = {"recommendation_id": answer, "training": {"updates": 1}}
    job_id = service.http.post("/v1/jobs", json=job).json()["id"]
    service.http.post(f"/v1/jobs/{job_id}/cancel")
    service.http.post("/v1/jobs/bulk", json={"action": "cancel", "ids": [job_id]})
    service.http.post(f"/v1/recommendations/{answer}/confirm")
    assert [woken.get(timeout=PATIENCE_SECONDS) for _ in range(4)] == ["woken"] * 4
    assert woken.empty()


def test_equal_requests_at_once_are_measured_once(start_service: StartService) -> None:
    """The first is still measured while the others are submitted: its recommendation answers all."""
    go_on = threading.Event()

    def hold(_size: int, should_stop: Callable[[], bool]) -> None:
        while not go_on.wait(0.01) and not should_stop():
            pass

    service = start_service(ScriptedRunner(37, hold))
    locations = [service.http.post("/v1/tunings", json=body()).headers["location"] for _ in range(3)]
    go_on.set()
    first, *others = (ended(service.http, location) for location in locations)
    assert first["probes"] == len(service.runner.sizes)
    assert [tuning["probes"] for tuning in others] == [0, 0]
    assert {tuning["recommendation_id"] for tuning in others} == {first["recommendation_id"]}
    assert len(service.http.get("/v1/recommendations").json()["items"]) == 1


def test_a_request_that_needs_no_new_probe_gets_its_own_recommendation(service: Running, client: Client) -> None:
    """For other data no probe runs, and the recommendation for a job carries the new request."""
    first = client.tunings.wait(client.tunings.submit(tuning_request(mlp_spec(data=None))).id)
    probes = len(service.runner.sizes)
    second = client.tunings.submit(tuning_request(mlp_spec()))
    assert (second.state, second.fingerprint) == (State.SUCCEEDED, first.fingerprint)
    assert second.recommendation is not None
    assert first.recommendation is not None
    assert second.recommendation.id != first.recommendation.id
    assert second.recommendation.request.workload.data is not None
    assert second.recommendation.evidence == first.recommendation.evidence
    assert client.recommendations.get(second.recommendation.id) == second.recommendation
    assert len(service.runner.sizes) == probes
    assert client.tunings.submit(tuning_request(mlp_spec())).id == second.id


def test_a_memory_limit_may_be_a_size(service: Running, client: Client) -> None:
    """Responses have the number of bytes, which is the same request; another text is refused by its field."""
    response = service.http.post("/v1/tunings", json=body(memory_limit_bytes="1GiB"))
    tuning = client.tunings.wait(response.json()["id"])
    assert response.json()["request"]["memory_limit_bytes"] == tuning.request.memory_limit_bytes == 2**30
    assert client.tunings.submit(tuning_request(memory_limit_bytes="1024MiB")).id == tuning.id
    wrong = service.http.post("/v1/tunings", json=body(memory_limit_bytes="12 parsecs"))
    (error,) = problem_in(wrong, 422, "invalid-request").errors
    assert error.field == "memory_limit_bytes"
    assert error.message.startswith("is not a size: write for example 8GiB")


def test_a_memory_limit_that_the_context_takes_is_refused(start_service: StartService) -> None:
    """The problem names the limit, the context's bytes and the remedy; nothing is queued."""
    card = CUDA.model_copy(update={"least_context_bytes": 450 * 2**20})
    service = start_service(device=card)
    refused = service.http.post("/v1/tunings", json=body(device="cuda:0", memory_limit_bytes="400MiB"))
    problem = problem_in(refused, 422, "device-error")
    assert re.search(r"400\.00 MiB, .*takes at least 450\.00 MiB\. Raise the limit, or leave it out", problem.detail)
    assert service.http.get("/v1/tunings").json()["items"] == []


def test_the_device_may_be_omitted(client: Client) -> None:
    """The only device of the service is used."""
    assert client.tunings.submit(tuning_request(device=None)).request.device == "cpu"


def test_a_wait_is_bounded(start_service: StartService) -> None:
    """A long poll responds with the current state when its time is up."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    with service.client as client:
        tuning = client.tunings.submit(tuning_request())
        assert started.wait(PATIENCE_SECONDS)
        answer = service.http.get(f"/v1/tunings/{tuning.id}", params={"wait": 0.3})
        assert answer.json()["state"] == "RUNNING"
        assert client.tunings.set_priority(tuning.id, 5).priority == 0
        waiting = client.tunings.submit(tuning_request(effective_batch_size=7))
        assert client.tunings.set_priority(waiting.id, 5).priority == 5
        assert client.tunings.get(waiting.id).priority == 5
        assert client.tunings.cancel(waiting.id).state is State.CANCELLED
        assert client.tunings.cancel(tuning.id).state is State.CANCELLING
        assert client.tunings.wait(tuning.id, PATIENCE_SECONDS).state is State.CANCELLED
        assert client.tunings.cancel(tuning.id).state is State.CANCELLED


def test_a_job_is_configured_then_run(client: Client, service: Running) -> None:
    """A dry run returns the command, files and environment and starts nothing; the job then runs."""
    tuning = client.tunings.wait(client.tunings.submit(tuning_request()).id)
    answer = tuning.recommendation
    assert answer is not None
    training = TrainingRequest(updates=3)
    configured = client.jobs.configure(answer.id, training)
    assert {file.path for file in configured.files} == {"recommendation.json", "training.json"}
    assert json.loads(configured.files[1].content)["updates"] == 3
    assert list(client.jobs.list()) == []
    assert configured.command == ("python", "-P", "-m", "batchwright.training.worker", ".")
    assert configured.working_directory == "."
    assert str(service.settings.data_dir) not in configured.model_dump_json()
    job = client.jobs.wait(client.jobs.submit(answer, training).id)
    assert (job.state, job.recommendation_id) == (State.SUCCEEDED, answer.id)
    assert job.progress is not None
    assert job.progress.update == 3
    assert job.directory is not None
    assert Path(job.directory).is_relative_to(service.settings.runs_dir)


def test_devices_name_their_work(start_service: StartService) -> None:
    """A busy device names its running work, and the length of its queue."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    with service.client as client:
        running = client.tunings.submit(tuning_request())
        assert started.wait(PATIENCE_SECONDS)
        client.tunings.submit(tuning_request(effective_batch_size=7))
        (device,) = client.devices.list()
        assert (device.device.id, device.alive, device.running_id, device.queued) == ("cpu", True, running.id, 1)


def test_lists_are_paged_and_slim(service: Running, client: Client) -> None:
    """Pages continue without gap or repetition, newest first, without the whole documents."""
    ids = [client.tunings.submit(tuning_request(effective_batch_size=size)).id for size in (5, 6, 7)]
    page = service.http.get("/v1/tunings", params={"limit": 2}).json()
    assert [row["id"] for row in page["items"]] == [ids[2], ids[1]]
    assert not {"request", "recommendation"} & set(page["items"][0])
    assert [row.id for row in client.tunings.list(page_size=2)] == ids[::-1]
    for tuning_id in ids:
        client.tunings.wait(tuning_id)
    assert len(list(client.recommendations.list(page_size=1))) == 3
    assert list(client.recommendations.list(model="gpt")) == []


def test_a_working_service_is_healthy(client: Client) -> None:
    """A working service is live and ready."""
    assert client.livez().status == "ok"
    assert client.readyz().status == "ok"


def test_a_service_without_workers_is_not_ready(service: Running) -> None:
    """Readiness is 503 with `Retry-After` when no worker serves the device."""
    service.system.coordinator.stop()
    response = service.http.get("/readyz")
    problem_in(response, 503, "not-ready")
    assert response.headers["retry-after"]
    assert problem_in(service.http.post("/v1/tunings", json=body()), 422, "unknown-device")


def test_an_api_without_workers_is_ready_by_its_database(service: Running) -> None:
    """The readiness probe of an API replica asks the database alone."""
    service.system.coordinator.stop()
    assert service.http.get("/readyz/database").json() == {"status": "ok", "checks": {"store": "written"}}


# --- refusals ---


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not-found"),
        ("GET", f"/v1/tunings/{UNKNOWN}", 404, "not-found"),
        ("GET", f"/v1/tunings/{UNKNOWN}/probes", 404, "not-found"),
        ("GET", f"/v1/tunings/{UNKNOWN}/events", 404, "not-found"),
        ("POST", f"/v1/tunings/{UNKNOWN}/cancel", 404, "not-found"),
        ("POST", f"/v1/tunings/{UNKNOWN}/priority", 422, "invalid-request"),
        ("GET", "/v1/tunings/%00", 404, "not-found"),
        ("GET", f"/v1/jobs/{UNKNOWN}", 404, "not-found"),
        ("GET", "/v1/recommendations/x", 404, "not-found"),
        ("DELETE", "/v1/tunings", 405, "method-not-allowed"),
        ("GET", "/v1/tunings?limit=0", 422, "invalid-request"),
        ("GET", "/v1/tunings?cursor=nonsense", 400, "invalid-cursor"),
        ("GET", "/v1/jobs?cursor=%F0%9F%98%80", 400, "invalid-cursor"),
        ("GET", f"/v1/tunings/{UNKNOWN}?wait=61", 422, "invalid-request"),
        ("GET", f"/v1/tunings/{UNKNOWN}?wait=nan", 422, "invalid-request"),
        ("GET", "/v1/recommendations?model=%00", 422, "invalid-request"),
        ("POST", "/v1/tunings", 422, "invalid-request"),
    ],
)
def test_every_refusal_is_a_problem(shared_service: Running, method: str, path: str, status: int, code: str) -> None:
    """Every refusal is a problem document with its status and a stable code."""
    problem_in(shared_service.http.request(method, path), status, code)


def test_not_found_names_the_likely_reason(shared_service: Running) -> None:
    """The problem names the kind and the id, and the likely reason."""
    for path, kind in (("tunings", "tuning"), ("jobs", "job"), ("recommendations", "recommendation")):
        identifier = f"{kind[:3]}_{'0' * 32}"
        problem = problem_in(shared_service.http.get(f"/v1/{path}/{identifier}"), 404, "not-found")
        assert problem.detail == f"No {kind} with the id '{identifier}'. It may have been deleted."


def test_the_methods_of_a_path_are_named(shared_service: Running) -> None:
    """405 names every method of the path; OPTIONS does too, and succeeds."""
    assert shared_service.http.delete("/v1/tunings").headers["allow"] == "GET, HEAD, OPTIONS, POST"
    response = shared_service.http.options(f"/v1/tunings/{UNKNOWN}")
    assert (response.status_code, response.headers["allow"]) == (204, "DELETE, GET, HEAD, OPTIONS")
    assert shared_service.http.options("/v1/tunings/bulk").headers["allow"] == "OPTIONS, POST"
    assert problem_in(shared_service.http.options("/nowhere"), 404, "not-found")


def test_every_wrong_field_is_named(shared_service: Running) -> None:
    """A wrong spec is 422 with each field as the caller wrote it, its value, and the allowed values."""
    wrong = body(
        effective_batch_size=0, spec={"model": {"kind": "reference", "architecture": {"name": "gpt", "heads": 0}}}
    )
    problem = problem_in(shared_service.http.post("/v1/tunings", json=wrong | {"fesh": True}), 422, "invalid-request")
    faults = {fault.field: fault for fault in problem.errors}
    assert set(faults) == {"effective_batch_size", "spec.model.architecture.heads", "fesh"}
    assert faults["effective_batch_size"].value == "0"
    assert faults["spec.model.architecture.heads"].message == "must be at least 1"
    assert faults["fesh"].message == "is not a field here; did you mean `fresh`?"


@pytest.mark.parametrize("malformed", ['{"spec": ', '{"effective_batch_size": "\\ud800"}', "[]", "null", '{"a": NaN}'])
def test_malformed_json_is_a_problem(shared_service: Running, malformed: str) -> None:
    """A body that is not JSON, or not of the expected shape, is refused with our own message."""
    headers = {"content-type": "application/json"}
    response = shared_service.http.post("/v1/tunings", content=malformed, headers=headers)
    assert response.status_code in {400, 422}
    problem_in(response, response.status_code, "malformed-json" if response.status_code == 400 else "invalid-request")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_values_outside_json_are_refused(shared_service: Running, number: str) -> None:
    """NaN and infinities could not be stored as they were sent."""
    content = json.dumps(body()).replace('"effective_batch_size": 100', f'"effective_batch_size": {number}')
    response = shared_service.http.post("/v1/tunings", content=content, headers={"content-type": "application/json"})
    assert "NaN" in problem_in(response, 422, "invalid-request").detail


def test_paths_are_exact(shared_service: Running) -> None:
    """There is no redirect, which could send a key to another host behind a proxy."""
    problem_in(shared_service.http.get("/v1/tunings/", follow_redirects=False), 404, "not-found")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "a\x00b"},
        {"model_type": "x" * 1000},
        {"model_type": "gpt2", "n": float("1e999")},
        {"model_type": "gpt2", "n": 10**400},
        {"model_type": "gpt2", "n": "\ud800"},
        {"model_type": "gpt2", "\udfff": 1},
        {"model_type": "gpt2", "n": nested(100)},
        {"model_type": "gpt2", "n": nested(900)},
    ],
)
def test_unusual_values_cause_no_failure(shared_service: Running, config: dict[str, Any]) -> None:
    """The free parts of a spec are stored or refused: never a 500."""
    spec = {"model": {"kind": "transformers", "task": "causal-lm", "config": config}, "batch": {"sequence_length": 8}}
    content = json.dumps(body(spec=spec))
    headers = {"content-type": "application/json"}
    assert shared_service.http.post("/v1/tunings", content=content, headers=headers).status_code in {202, 400, 413, 422}


@pytest.mark.parametrize(
    "changes", [{"fresh": 0}, {"effective_batch_size": "7"}, {"priority": True}, {"uniform": "no"}]
)
def test_values_are_not_converted(shared_service: Running, changes: dict[str, Any]) -> None:
    """A number is not accepted as a boolean, nor a text as a number."""
    (field,) = changes
    problem = problem_in(shared_service.http.post("/v1/tunings", json=body(**changes)), 422, "invalid-request")
    assert [fault.field for fault in problem.errors] == [field]


def test_a_whole_number_may_have_a_fraction_of_zero(shared_service: Running) -> None:
    """JSON Schema has it so, also inside a spec. Other fractions are refused, and user code gets the number as sent."""
    wanted = body(effective_batch_size=12.0)
    wanted["spec"]["model"]["architecture"]["hidden_layers"] = 3.0
    found = shared_service.http.post("/v1/tunings", json=wanted)
    assert found.status_code == 202, found.text
    request = found.json()["request"]
    assert (request["effective_batch_size"], request["spec"]["model"]["architecture"]["hidden_layers"]) == (12, 3)
    refused = shared_service.http.post("/v1/tunings", json=body(effective_batch_size=12.5))
    assert "effective_batch_size: must be a whole number" in problem_in(refused, 422, "invalid-request").detail
    spec = {"model": {"kind": "python", "target": "module:function", "arguments": {"width": 1.0}}}
    read: Any = strict_body(TuningSubmission)
    arguments = read.func(body(spec=spec, effective_batch_size=12.0), None).spec.model.arguments
    assert [type(value) for value in arguments.values()] == [float]


def test_an_undeclared_body_is_refused(shared_service: Running) -> None:
    """A body that is not declared as JSON is 415."""
    response = httpx.post(
        f"{shared_service.url}/v1/tunings", content=b"spec: {}", headers={"content-type": "text/yaml"}
    )
    assert "text/yaml" in problem_in(response, 415, "unsupported-media-type").detail


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused_unread(start_service: StartService, *, chunked: bool) -> None:
    """A body above the limit is 413, whether or not its length is declared."""
    service = start_service(max_body_bytes=2048)
    large = b" " * 5000
    content = iter([large[:2500], large[2500:]]) if chunked else large
    response = service.http.post("/v1/tunings", content=content, headers={"content-type": "application/json"})
    assert "2048" in problem_in(response, 413, "body-too-large").detail


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://["}, {"Sec-Fetch-Site": "cross-site"}],
)
def test_a_page_of_another_site_cannot_change_anything(shared_service: Running, headers: dict[str, str]) -> None:
    """A request of a foreign page is refused for every method that changes something."""
    problem_in(shared_service.http.post("/v1/tunings", json=body(), headers=headers), 403, "foreign-origin")
    problem_in(shared_service.http.post(f"/v1/tunings/{UNKNOWN}/cancel", headers=headers), 403, "foreign-origin")


def test_pages_of_the_service_may_change_things(shared_service: Running) -> None:
    """The service's own origin is not foreign."""
    response = shared_service.http.post("/v1/tunings", json=body(), headers={"Origin": shared_service.url})
    assert response.status_code == HTTPStatus.ACCEPTED


def test_a_foreign_host_name_is_refused(shared_service: Running) -> None:
    """A foreign Host, as DNS rebinding sends, is refused for every method."""
    for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[", "", "x" * 5000):
        problem_in(shared_service.http.get("/v1/tunings", headers={"Host": name}), 403, "host-not-allowed")
    assert shared_service.http.get("/v1/tunings", headers={"Host": "localhost:1"}).status_code == HTTPStatus.OK


def test_an_unexpected_error_discloses_nothing(shared_service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug is a 500 problem without its traceback or message."""

    def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(shared_service.system.context.devices, "list", fail)
    problem = problem_in(shared_service.http.get("/v1/devices"), 500, "internal-error")
    assert "secret" not in problem.detail


def refusal(client: Client, status: int, code: str, request: Any) -> str:
    """Return the detail of the problem that refuses a tuning or job."""
    with pytest.raises(ApiError) as caught:
        client.jobs.submit(request) if hasattr(request, "evidence") else client.tunings.submit(request)
    assert (caught.value.status, caught.value.code) == (status, code)
    return caught.value.problem.detail


def test_code_runs_only_by_allow_list(start_service: StartService) -> None:
    """A `python` target that is not listed is refused, naming the setting; a listed one is accepted."""
    service = start_service(python_targets="my_project.workloads:build")
    with service.client as client:
        detail = refusal(client, 403, "python-target-not-allowed", tuning_request(python_spec("os:system")))
        assert "BATCHWRIGHT_PYTHON_TARGETS" in detail
        client.tunings.submit(tuning_request(python_spec("my_project.workloads:build")))


def test_jobs_read_only_below_the_data_roots(start_service: StartService, tmp_path: Path) -> None:
    """A data path outside the roots is refused, naming the setting; one below them is accepted."""
    service = start_service(data_roots=str(tmp_path))
    with service.client as client:
        outside = recommendation(gpt_spec(data={"kind": "text", "paths": [f"{tmp_path}/*.txt", "/etc/passwd"]}))
        assert "BATCHWRIGHT_DATA_ROOTS" in refusal(client, 403, "data-path-not-allowed", outside)
        client.jobs.submit(recommendation(gpt_spec(data={"kind": "text", "paths": [f"{tmp_path}/**/*.txt"]})))


def test_impossible_jobs_are_refused_with_the_remedy(client: Client) -> None:
    """No data, too many ranks, nothing fits, another device, variables that are not the allocator's."""
    assert "`data`" in refusal(client, 422, "invalid-request", recommendation(mlp_spec(data=None)))
    assert "dry run" in refusal(client, 422, "unsupported-job", recommendation(None, 17, world_size=17))
    crowded = recommendation(request=tuning_request(mlp_spec(parallelism={"world_size": 17}), 10))
    assert "without a sample" in refusal(client, 422, "no-plan", crowded)
    nothing = recommendation(feasible=False, infeasible_reason="1 does not fit", plan=None)
    assert "1 does not fit" in refusal(client, 422, "infeasible-recommendation", nothing)
    device = recommendation().device
    other = device.model_copy(update={"name": "another processor"})
    assert "another processor" in refusal(client, 409, "device-mismatch", recommendation(device=other))
    absent = device.model_copy(update={"id": "cuda:9", "kind": "cuda"})
    refusal(client, 422, "unknown-device", recommendation(device=absent))
    preload = recommendation(environment={"LD_PRELOAD": "/tmp/mine.so"})  # noqa: S108 - a name, never used
    assert "LD_PRELOAD" in refusal(client, 422, "invalid-request", preload)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_ARENA_MAX": "1\0"},
        {"MALLOC_ARENA_MAX": "1" * 900_000},
        {"MALLOC ARENA": "1"},
        {"MALLOC=ARENA": "1"},
        {"": "1"},
        {"M" * 200: "1"},
        {f"V{number}": "1" for number in range(65)},
    ],
)
def test_invalid_environment_variables_are_refused(
    shared_service: Running, *, dry_run: bool, environment: dict[str, str]
) -> None:
    """Invalid names and values in a submitted recommendation are refused by their field."""
    sent = recommendation().model_dump(mode="json") | {"environment": environment}
    submission = {"recommendation": sent, "dry_run": dry_run}
    problem = problem_in(shared_service.http.post("/v1/jobs", json=submission), 422, "invalid-request")
    assert "environment" in problem.errors[0].field


def test_requests_that_cannot_be_planned_are_refused(client: Client) -> None:
    """Fewer samples than ranks, more micro-batches than a plan lists, too much memory, an absent device."""
    ranks = mlp_spec(parallelism={"world_size": 200})
    refusal(client, 422, "no-plan", tuning_request(ranks, effective_batch_size=100))
    endless = tuning_request(effective_batch_size=2**22 - 1, max_micro_batch_size=1)
    assert "use an effective batch of at most 262144" in refusal(client, 422, "no-plan", endless)
    refusal(client, 422, "invalid-request", tuning_request(memory_limit_bytes=2**60))
    assert "cpu" in refusal(client, 422, "unknown-device", tuning_request(device="cuda:3"))


def test_a_problem_quotes_no_traceback() -> None:
    """Of a process's output, only the last line of a traceback is quoted."""
    printed = (
        'it ended with status 1: Traceback (most recent call last):\n  File "x.py", line 1\nValueError: too wide\n'
    )
    assert problem_of(EstimateError(printed)).detail == "it ended with status 1: ValueError: too wide"
    assert problem_of(EstimateError("too wide")).detail == "too wide"
