"""Metrics: names, values and access; and the readiness of the service."""

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override

from batchwright.client.documents.api_keys import Scope
from batchwright.errors import EstimateError
from batchwright.schemas.estimates import Estimate, EstimateRequest
from batchwright.schemas.training import MicroBatchSplit, RunOutcome, TrainingResult
from batchwright_service.application.estimates import EstimateCases, EstimateLimits
from batchwright_service.application.readiness import Readiness
from batchwright_service.application.rules.policy import Policy
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import ConfigurationError, EstimatesBusyError, NotReadyError, StoreUnavailableError
from batchwright_service.observability.collectors import device_families, queue_families, readiness_families
from batchwright_service.observability.metrics import NOT_FINITE_CODE, OUT_OF_MEMORY_CODE, Metrics
from batchwright_service.store.scheduling import QueueDepth
from batchwright_service.store.store import Store
from batchwright_service.worker.executors.base import GraceSeconds, OnProgress, TrainingRun
from tests.support.factories import recommendation, tuning_request
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import SERVED, Trainer, new_work, progress

UNITS = ("_seconds", "_bytes", "_total", "_info")
COUNTS = {
    "batchwright_queue_items",
    "batchwright_device_busy",
    "batchwright_device_unready",
    "batchwright_devices",
    "batchwright_ready",
    "process_open_fds",
    "process_max_fds",
}
"""Numbers of things, which have no unit."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    """Return every sample, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return one sample; 0 where there is none."""
    return samples.get((name, frozenset(labels.items())), 0.0)


def used() -> Metrics:
    """Metrics with a sample in every family."""
    metrics = Metrics("1.0")
    metrics.collect("the queue", lambda: [QueueDepth("cpu", 2, 3.5)], queue_families)
    with metrics.device_busy("cpu"):
        metrics.probes.labels("cpu", "FIT").inc()
    metrics.count_lookup(True)
    metrics.estimates.labels("made").inc()
    metrics.observe_request("GET", "/v1/tunings/{tuning_id}", 200, 0.003)
    return metrics


# --- names ---


def test_names_have_base_units_and_help() -> None:
    """Includes what Prometheus' own checker misses: milliseconds, mebibytes, a missing text."""
    families = list(text_string_to_metric_families(used().exposition().decode()))
    assert len(families) > 10
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name.startswith(("batchwright_", "process_"))
        assert name.endswith(UNITS) or name in COUNTS, name
        assert not re.search(r"_(ms|milliseconds|minutes|mib|gib|kb|percent)(_|$)", name), name
        assert len(family.documentation) > 10, name


def test_no_identifier_is_a_label(start_service: StartService) -> None:
    """After requests for a tuning by its id, the template of its route is a label, and its id is none."""
    service = start_service()
    tuning = service.http.post("/v1/tunings", json=tuning_request().model_dump(mode="json")).json()
    service.http.get(f"/v1/tunings/{tuning['id']}?wait=30")
    service.http.get("/nobody/asked/for/this")
    text = service.http.get("/metrics").text
    assert tuning["id"] not in text
    assert "nobody" not in text
    labels = {label for _, found in samples_of(text) for label, _ in found}
    ours = {"device", "outcome", "state", "result", "kind", "code", "folder"}
    assert labels <= ours | {"method", "route", "status", "le", "version"}


# --- what is counted ---


def test_a_tuning_is_counted(start_service: StartService) -> None:
    """Its probes by outcome, its seconds, the busy device, the queue, and the hits of the store."""
    service = start_service()
    for _ in range(2):
        answer = service.http.post("/v1/tunings", json=tuning_request().model_dump(mode="json")).json()
        ended = service.http.get(f"/v1/tunings/{answer['id']}?wait=30").json()
    samples = samples_of(service.http.get("/metrics").text)
    probes = [probe["outcome"] for probe in ended["recommendation"]["evidence"]["probes"]]
    for outcome in ("FIT", "OOM"):
        assert value(samples, "batchwright_probes_total", device="cpu", outcome=outcome) == probes.count(outcome)
    assert value(samples, "batchwright_tuning_seconds_count", state="SUCCEEDED", outcome="succeeded") == 1
    assert value(samples, "batchwright_device_busy_seconds_total", device="cpu") > 0
    assert samples["batchwright_device_busy", frozenset({("device", "cpu")})] == 0
    assert value(samples, "batchwright_recommendation_hits_total", result="miss") == 1
    assert value(samples, "batchwright_recommendation_hits_total", result="hit") == 1


def test_the_metric_and_the_summary_count_the_same_submissions(start_service: StartService) -> None:
    """A miss, a hit and its repetition by an idempotency key, and a `fresh` submission, which looks up nothing."""
    service = start_service()
    body = tuning_request().model_dump(mode="json")
    first = service.http.post("/v1/tunings", json=body).json()
    service.http.get(f"/v1/tunings/{first['id']}?wait=30")
    for _ in range(2):
        service.http.post("/v1/tunings", json=body, headers={"Idempotency-Key": "once"})
    service.http.post("/v1/tunings", json={**body, "fresh": True})
    samples = samples_of(service.http.get("/metrics").text)
    summary = service.http.get("/v1/summary").json()["recommendation_hits"]
    counted = {
        result: value(samples, "batchwright_recommendation_hits_total", result=result) for result in ("hit", "miss")
    }
    assert (summary["hits"], summary["misses"]) == (counted["hit"], counted["miss"]) == (1, 1)


def test_requests_are_timed_by_route(start_service: StartService) -> None:
    """By template, method and status; long polls separately, and unmatched routes as such."""
    service = start_service()
    service.http.get("/v1/devices")
    service.http.get("/v1/tunings/tun_0192f3a1b2c3700089abcdef01234567")
    service.http.get("/v1/tunings/tun_0192f3a1b2c3700089abcdef01234567?wait=1")
    service.http.get("/nothing")
    service.http.request("BREW", "/v1/devices")
    samples = samples_of(service.http.get("/metrics").text)
    for method, route, status in (
        ("GET", "/v1/devices", "200"),
        ("GET", "/v1/tunings/{tuning_id}", "404"),
        ("GET", "/v1/tunings/{tuning_id}?wait", "404"),
        ("GET", "unmatched", "404"),
    ):
        counted = value(samples, "batchwright_http_request_seconds_count", method=method, route=route, status=status)
        assert counted == 1, route
    assert [
        dict(labels)["status"] for name, labels in samples if ("method", "other") in labels and name.endswith("_count")
    ]


def test_the_queue_is_reported_by_device(store: Store) -> None:
    """The number, and the age of the oldest; nothing when the database is unavailable."""
    for _ in range(2):
        store.submissions.add(new_work(IdentifierSource().new("tun")))
    metrics = Metrics()
    metrics.collect("the queue", store.queue.depths, queue_families)
    samples = samples_of(metrics.exposition().decode())
    assert value(samples, "batchwright_queue_items", device="cpu") == 2
    assert 0 <= value(samples, "batchwright_queue_oldest_age_seconds", device="cpu") < 60


def test_metrics_continue_without_the_database() -> None:
    """Only the queue is omitted."""

    def away() -> list[QueueDepth]:
        raise StoreUnavailableError("away")

    metrics = Metrics()
    metrics.collect("the queue", away, queue_families)
    metrics.count_lookup(True)
    samples = samples_of(metrics.exposition().decode())
    assert value(samples, "batchwright_recommendation_hits_total", result="hit") == 1
    assert not [name for name, _ in samples if "queue" in name]


def test_a_busy_device_is_seen_while_it_is_busy() -> None:
    """The gauge is 1, and the seconds rise before the work has ended."""
    metrics = Metrics()
    metrics.register_device("cpu")
    assert value(samples_of(metrics.exposition().decode()), "batchwright_device_busy_seconds_total", device="cpu") == 0
    with metrics.device_busy("cpu"):
        samples = samples_of(metrics.exposition().decode())
        assert value(samples, "batchwright_device_busy", device="cpu") == 1
        assert value(samples, "batchwright_device_busy_seconds_total", device="cpu") > 0


def test_devices_are_counted_by_state(store: Store) -> None:
    """A live one that takes work, one that takes none, and those whose worker sends no heartbeat."""
    store.devices.announce(SERVED)
    store.devices.announce(SERVED.model_copy(update={"slot": "host/cuda:0", "unready": "disk-full: no space"}))
    for lease_seconds, ready, unready, silent in ((15.0, 1, 1, 0), (-1.0, 0, 0, 2)):
        metrics = Metrics()
        metrics.collect("the devices", store.devices.list, partial(device_families, lease_seconds=lease_seconds))
        samples = samples_of(metrics.exposition().decode())
        counted = [value(samples, "batchwright_devices", state=state) for state in ("ready", "unready", "silent")]
        assert counted == [ready, unready, silent]


def test_readiness_is_a_metric(store: Store) -> None:
    """It is 0 without a worker, and 1 with one."""
    for ready in (0, 1):
        metrics = Metrics()
        metrics.collect("the readiness", readiness_of(store).is_ready, readiness_families)
        assert value(samples_of(metrics.exposition().decode()), "batchwright_ready") == ready
        store.devices.announce(SERVED)


class ShortTrainer(Trainer):
    """Runs out of memory twice in its first update, and fails after it."""

    def __init__(self, **result: Any) -> None:
        super().__init__()
        self._result = result

    @override
    def __call__(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        split = MicroBatchSplit(rank=0, size=4, parts=(2, 2), message="out of memory")
        on_progress([progress(1, run.request.updates).model_copy(update={"splits": (split, split)})])
        return TrainingResult(outcome=RunOutcome.FAILED, message="it failed", updates=1, **self._result)


@pytest.mark.parametrize(
    ("failed", "result"),
    [(OUT_OF_MEMORY_CODE, {"out_of_memory": True}), (NOT_FINITE_CODE, {"not_finite_since": 1})],
)
def test_a_failed_job_is_counted_by_its_code(start_service: StartService, failed: str, result: dict[str, Any]) -> None:
    """With its split micro-batches; the series of the code is there before the first failure."""
    service = start_service(trainer=ShortTrainer(**result))
    code = {"kind": "job", "code": failed}
    before = samples_of(service.http.get("/metrics").text)
    assert before["batchwright_failures_total", frozenset(code.items())] == 0
    body = {"recommendation": recommendation().model_dump(mode="json"), "training": {"updates": 2}}
    job = service.http.post("/v1/jobs", json=body).json()
    ended = service.http.get(f"/v1/jobs/{job['id']}?wait=30").json()
    assert ended["state"] == "FAILED"
    assert ended["problem"]["code"] == failed
    assert ended["result"].items() >= result.items()
    samples = samples_of(service.http.get("/metrics").text)
    assert value(samples, "batchwright_failures_total", **code) == 1
    assert value(samples, "batchwright_job_splits_total", device="cpu") == 2
    assert value(samples, "batchwright_job_seconds_count", state="FAILED", outcome="failed") == 1


def test_disks_are_reported_by_folder(tmp_path: Path) -> None:
    """Their free bytes and their size; a folder that is not there is left out."""
    metrics = Metrics()
    metrics.collect_disks({"runs": tmp_path, "temporary": tmp_path / "gone"})
    samples = samples_of(metrics.exposition().decode())
    free = value(samples, "batchwright_disk_free_bytes", folder="runs")
    assert 0 < free < value(samples, "batchwright_disk_size_bytes", folder="runs")
    assert ("batchwright_disk_size_bytes", frozenset({("folder", "temporary")})) not in samples


def test_estimates_are_counted_by_result() -> None:
    """Made, cached, refused for lack of a slot, failed."""
    metrics = Metrics()
    asked = EstimateRequest.model_validate({"spec": tuning_request().spec.model_dump(mode="json"), "gpus": ["T4"]})
    made = Estimate(decisions="cpu", parameters=1, gpus=(), versions={}, seconds=0.0)
    estimates = EstimateCases(lambda _request, _stop: made, Policy([], []), {}, EstimateLimits(), metrics)
    estimates.estimate(asked)
    estimates.estimate(asked)

    def fail(_request: EstimateRequest, _stop: Callable[[], bool]) -> Estimate:
        raise EstimateError("cannot")

    with pytest.raises(EstimateError):
        EstimateCases(fail, Policy([], []), {}, EstimateLimits(), metrics).estimate(asked)
    with pytest.raises(EstimatesBusyError):
        EstimateCases(fail, Policy([], []), {}, EstimateLimits(slots=0, queue=0), metrics).estimate(asked)
    samples = samples_of(metrics.exposition().decode())
    for result in ("made", "cached", "failed", "refused"):
        assert value(samples, "batchwright_estimates_total", result=result) == 1, result


# --- who reads them ---


def test_metrics_require_the_scope_tunings_read_once_keys_exist(start_service: StartService) -> None:
    """A key for jobs alone is refused."""
    service = start_service()
    assert service.http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    keys = {}
    for scope in (Scope.TUNINGS_READ, Scope.JOBS_RUN):
        new, keys[scope] = make_key("test", (scope,), None)
        service.system.store.keys.add(new)
    statuses = [
        service.http.get("/metrics", headers={"Authorization": f"Bearer {key}"}).status_code for key in keys.values()
    ]
    assert statuses == [200, 403]


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_a_separate_port_serves_metrics(start_service: StartService) -> None:
    """No key is needed, for processes without an API; the port closes with the service."""
    port = free_port()
    with started(start_service, metrics_port=port):
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert value(samples_of(text), "batchwright_device_busy", device="cpu") == 0
    assert 'batchwright_build_info{version="' in text


@contextmanager
def started(start_service: StartService, metrics_port: int) -> Iterator[Running]:
    """A service with a metrics port."""
    yield start_service(metrics_port=metrics_port)


def test_a_taken_metrics_port_is_named() -> None:
    """The error is ours, and names the port."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConfigurationError, match=r"metrics on 127\.0\.0\.1 port"),
    ):
        Metrics().serve("127.0.0.1", listener.getsockname()[1])


# --- readiness ---


def readiness_of(
    store: Store, stuck_seconds: float = 60.0, pause: Callable[[float], object] = lambda _: None
) -> Readiness:
    """Return a readiness check over a store, without a wait."""
    return Readiness(store.queue, store.devices, 15.0, stuck_seconds, pause)


def test_ready_with_one_live_worker_of_several(store: Store) -> None:
    """A host that is gone does not take the service with it; it is named."""
    with pytest.raises(NotReadyError, match="no worker sent a heartbeat within 15 s"):
        readiness_of(store).check()
    store.devices.announce(SERVED)
    store.devices.announce(SERVED.model_copy(update={"slot": "gone/cpu", "owner": "gone"}))
    assert readiness_of(store).check().checks["workers"] == "2 of 2 alive"
    with pytest.raises(NotReadyError, match="without a heartbeat: gone/cpu, host/cpu"):
        Readiness(store.queue, store.devices, -1.0, 60.0).check()


def test_untaken_work_makes_the_service_unready(store: Store) -> None:
    """The reason names the device, the age and the setting."""
    store.devices.announce(SERVED)
    store.submissions.add(new_work(IdentifierSource().new("tun")))
    assert readiness_of(store).check().status == "ok"
    with pytest.raises(NotReadyError, match=r"a worker of cpu is idle \(1 waiting, .*BATCHWRIGHT_READY_QUEUE_SECONDS"):
        readiness_of(store, stuck_seconds=-1.0).check()


def test_many_callers_share_one_readiness_check(store: Store) -> None:
    """Anyone may call without a key: one check serves all callers within the second, refusals too."""
    looks = readiness_of(store)
    with pytest.raises(NotReadyError):
        looks.check()
    store.devices.announce(SERVED)
    with pytest.raises(NotReadyError, match="no worker sent a heartbeat"):
        looks.check()
    assert readiness_of(store).check().status == "ok"


def test_work_for_an_unserved_device_makes_the_service_unready(store: Store) -> None:
    """A worker of another device does not count."""
    store.devices.announce(SERVED)
    store.submissions.add(new_work(IdentifierSource().new("tun"), device="cuda:7"))
    with pytest.raises(NotReadyError, match="cuda:7"):
        readiness_of(store, stuck_seconds=-1.0).check()


def test_work_behind_other_work_keeps_the_service_ready(store: Store) -> None:
    """The device is busy, however long the wait."""
    store.devices.announce(SERVED)
    for _ in range(2):
        store.submissions.add(new_work(IdentifierSource().new("tun")))
    assert store.leases.claim(SERVED, 60.0) is not None
    assert readiness_of(store, stuck_seconds=-1.0).check().status == "ok"


def test_a_worker_between_two_works_is_checked_twice(store: Store) -> None:
    """The worker looks idle for a moment; by the second check it has taken the next work."""
    store.devices.announce(SERVED)
    for _ in range(2):
        store.submissions.add(new_work(IdentifierSource().new("tun")))
    assert readiness_of(store, -1.0, lambda _: store.leases.claim(SERVED, 60.0)).check().status == "ok"
