"""The queue: priorities, positions and expected waits."""

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import JobSubmission
from batchwright.schemas.requests import TrainingRequest
from batchwright_service.application.rules.wait_time import Running as AtWork, expected_waits
from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed
from batchwright_service.domain.key_texts import make_key
from batchwright_service.store.models import AnnouncedDevice, WorkRow
from batchwright_service.store.scheduling import Waiting
from tests.support.factories import recommendation
from tests.support.service.asking import PATIENCE_SECONDS, body, ended, problem_in
from tests.support.service.running import Running, StartService
from tests.support.service.scripted import ScriptedRunner, new_work, until_stopped

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def busy(start_service: StartService) -> Running:
    """A service whose only device is busy until its work is cancelled."""
    started = threading.Event()
    service = start_service(ScriptedRunner(37, until_stopped(started)))
    service.http.post("/v1/tunings", json=body(effective_batch_size=3))
    assert started.wait(PATIENCE_SECONDS)
    return service


def submitted(service: Running, **changes: Any) -> str:
    """Submit a tuning and return its id."""
    response = service.http.post("/v1/tunings", json=body(**changes))
    assert response.status_code == 202
    return str(response.json()["id"])


def test_the_queue_lists_the_order_of_work(busy: Running) -> None:
    """Higher priorities come first, older work before newer; no wait is given without durations."""
    low = submitted(busy, effective_batch_size=5, priority=-5)
    plain = submitted(busy, effective_batch_size=6)
    high = submitted(busy, effective_batch_size=7, priority=5)
    items = busy.http.get("/v1/queue").json()["items"]
    assert [(item["id"], item["position"]) for item in items] == [(high, 1), (plain, 2), (low, 3)]
    assert [item["priority"] for item in items] == [5, 0, -5]
    assert {(item["kind"], item["device"], item["model"]) for item in items} == {("tuning", "cpu", "mlp")}
    assert all(item["age_seconds"] >= 0 and item["expected_wait_seconds"] is None for item in items)
    assert len(busy.http.get("/v1/queue", params={"limit": 2}).json()["items"]) == 2


def test_the_queue_of_a_slot(busy: Running) -> None:
    """Work for its device or hardware that it is, with the positions of the whole queue; over HTTP and in the SDK.

    Its host has one device, so that work for two does not wait for it.
    """
    (here,) = (seen.served for seen in busy.system.store.devices.list())
    lane = HardwareNeed.of_kind(here.device, 1).lane
    busy.system.store.submissions.add(new_work(f"tun_{1:032x}", device=ANY_DEVICE, hardware=lane))
    busy.system.store.submissions.add(new_work(f"tun_{2:032x}", device="cuda:7"))
    busy.system.store.submissions.add(new_work(f"tun_{3:032x}", hardware="none|1"))
    two = HardwareNeed.of_kind(here.device, 2).lane
    busy.system.store.submissions.add(new_work(f"tun_{4:032x}", device=ANY_DEVICE, hardware=two))
    own = {submitted(busy, effective_batch_size=5), f"tun_{1:032x}"}
    assert {item["id"] for item in busy.http.get("/v1/queue", params={"slot": here.slot}).json()["items"]} == own
    with busy.client as client:
        assert {entry.id for entry in client.queue.list(slot=here.slot)} == own
        assert len(client.queue.list(limit=1, slot=here.slot)) == 1
        assert client.queue.list(slot="elsewhere/cpu") == ()


def test_an_unready_device_has_no_expected_wait(start_service: StartService, tmp_path: Path) -> None:
    """The end of a host problem is unknown."""
    (in_the_way := tmp_path / "disk").write_text("")
    service = start_service(runs_dir=in_the_way / "runs")
    waiting_id = submitted(service, effective_batch_size=5)
    items = service.http.get("/v1/queue").json()["items"]
    assert [(item["id"], item["expected_wait_seconds"]) for item in items] == [(waiting_id, None)]
    position = service.http.get(f"/v1/tunings/{waiting_id}").json()["queue"]
    assert position == {"position": 1, "expected_wait_seconds": None, "unserved": None}


def test_the_priority_does_not_affect_the_recommendation(busy: Running) -> None:
    """The priority is in the tuning and in lists, and not in the fingerprint."""
    first = busy.http.post("/v1/tunings", json=body(priority=9)).json()
    second = busy.http.post("/v1/tunings", json=body(priority=-9)).json()
    assert (first["priority"], second["priority"]) == (9, -9)
    assert first["fingerprint"] == second["fingerprint"]
    assert "priority" not in first["request"]
    assert busy.http.get("/v1/tunings").json()["items"][0]["priority"] == -9


def test_a_positive_priority_requires_the_scope_admin(start_service: StartService) -> None:
    """Other keys may use priorities of 0 and below."""
    service = start_service()
    new, text = make_key("test", (Scope.TUNINGS_WRITE,))
    service.system.store.keys.add(new)
    headers = {"Authorization": f"Bearer {text}"}
    refused = service.http.post("/v1/tunings", json=body(priority=1), headers=headers)
    assert "priority 1" in problem_in(refused, 403, "scope-missing").detail
    assert service.http.post("/v1/tunings", json=body(priority=-1), headers=headers).status_code == 202


def test_a_wait_depends_on_the_required_hardware(service: Running) -> None:
    """A free device of another kind shortens no wait, and a kind without workers has no expected wait."""
    store = service.system.store
    for _ in range(3):
        assert ended(service.http, service.http.post("/v1/tunings", json=body(fresh=True)).headers["location"])
    (here,) = (seen.served for seen in store.devices.list())
    other = here.device.model_copy(update={"total_bytes": here.device.total_bytes + 1})
    idle = here.model_copy(update={"slot": "other/cpu", "owner": "other", "device": other})
    store.devices.announce(idle)
    for number, hardware in enumerate((idle.hardware, "none|1")):
        store.submissions.add(new_work(f"tun_{number:032x}", hardware=hardware))
    waits = {item["id"][-1]: item["expected_wait_seconds"] for item in service.http.get("/v1/queue").json()["items"]}
    assert waits == {"0": 0.0, "1": None}


def test_the_queue_is_readable_while_its_work_is_deleted(busy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a device may be deleted before its start is looked up."""
    waits, store = submitted(busy, effective_batch_size=5), busy.system.store
    devices = store.devices.list

    def deleted_after() -> list[AnnouncedDevice]:
        seen = devices()
        for device in seen:
            if device.running_id is not None and device.running_id != waits:
                busy.http.post(f"/v1/tunings/{device.running_id}/cancel")
                ended(busy.http, f"/v1/tunings/{device.running_id}")
                store.retention.delete(device.running_id)
        return seen

    monkeypatch.setattr(store.devices, "list", deleted_after)
    assert busy.http.get("/v1/queue").status_code == 200


@pytest.mark.parametrize("priority", [-101, 101, 0.5])
def test_priorities_are_bounded(shared_service: Running, priority: float) -> None:
    """A priority is from -100 to 100."""
    problem_in(shared_service.http.post("/v1/tunings", json=body(priority=priority)), 422, "invalid-request")


def waiting(name: str, kind: WorkKind = WorkKind.TUNING) -> Waiting:
    """Return an entry of the queue."""
    return Waiting(name, kind, "cpu", "mlp", 0, 1, 0.0, 8)


def took(seconds: float, kind: WorkKind = WorkKind.TUNING, attempts: int = 1) -> WorkRow:
    """Return ended work of that duration."""
    values: dict[str, Any] = dict.fromkeys(WorkRow.__dataclass_fields__)
    values |= {"kind": kind, "state": State.SUCCEEDED, "attempts": attempts}
    return WorkRow(**values | {"started_at": NOW, "ended_at": NOW + timedelta(seconds=seconds)})


RECENT = [took(10.0), took(20.0), took(60.0)]


def test_waits_follow_from_recent_durations() -> None:
    """Running work is expected to take the median, and each entry starts after the one before."""
    at_work = AtWork(WorkKind.TUNING, NOW)
    waits = expected_waits([waiting("a"), waiting("b")], [at_work], RECENT, NOW + timedelta(seconds=5))
    assert waits == {"a": 15.0, "b": 35.0}


def test_several_workers_share_the_queue() -> None:
    """A free worker takes the first entry at once; the next one waits for the first worker to become free."""
    at_work = AtWork(WorkKind.TUNING, NOW)
    waits = expected_waits([waiting("a"), waiting("b"), waiting("c")], [at_work, None], RECENT, NOW)
    assert waits == {"a": 0.0, "b": 20.0, "c": 20.0}


def test_overdue_work_gives_no_negative_wait() -> None:
    """Work beyond its expected duration may end at any moment."""
    waits = expected_waits([waiting("a")], [AtWork(WorkKind.TUNING, NOW)], RECENT, NOW + timedelta(hours=1))
    assert waits == {"a": 0.0}


@pytest.mark.parametrize(
    ("workers", "recent"),
    [
        ([], RECENT),
        ([AtWork(WorkKind.TUNING, NOW)], RECENT[:2]),
        ([AtWork(WorkKind.JOB, NOW)], RECENT),
        ([AtWork(WorkKind.TUNING, NOW)], [took(0.0, attempts=0)] * 5),
    ],
)
def test_no_wait_is_expected_without_data(workers: list[AtWork | None], recent: list[WorkRow]) -> None:
    """There is no worker, or fewer than three durations; stored recommendations took no device time."""
    assert expected_waits([waiting("a")], workers, recent, NOW) == {"a": None}


def test_waits_behind_an_unknown_duration_are_unknown() -> None:
    """Work without known durations has an expected start, and hides those behind it."""
    waits = expected_waits([waiting("a", WorkKind.JOB), waiting("b")], [None], RECENT, NOW)
    assert waits == {"a": 0.0, "b": None}


# --- the position of one tuning or job ---


def test_a_polled_tuning_has_its_position(busy: Running) -> None:
    """The position is present while the tuning is queued, and absent while it runs and after its end."""
    first, second = (submitted(busy, effective_batch_size=size) for size in (5, 6))
    positions = [busy.http.get(f"/v1/tunings/{tuning_id}").json()["queue"] for tuning_id in (first, second)]
    assert positions == [
        {"position": 1, "expected_wait_seconds": None, "unserved": None},
        {"position": 2, "expected_wait_seconds": None, "unserved": None},
    ]
    running = next(item["id"] for item in busy.http.get("/v1/tunings").json()["items"] if item["state"] == "RUNNING")
    assert busy.http.get(f"/v1/tunings/{running}").json()["queue"] is None
    assert busy.http.post(f"/v1/tunings/{first}/cancel").json()["queue"] is None
    with busy.client as client:
        queue = client.tunings.get(second).queue
        assert queue is not None
        assert queue.position in {1, 2}  # as it was at most a second ago


def test_a_polled_job_has_its_position(busy: Running) -> None:
    """The job is behind the tuning that was queued before."""
    submitted(busy, effective_batch_size=5)
    submission = JobSubmission(recommendation=recommendation(), training=TrainingRequest(updates=1))
    made = busy.http.post("/v1/jobs", json=submission.model_dump(mode="json")).headers["location"]
    assert busy.http.get(made).json()["queue"]["position"] == 2


def test_a_new_position_does_not_end_a_wait(busy: Running) -> None:
    """A long poll waits for states and probes: only the response at its end has the new position and tag."""
    low = submitted(busy, effective_batch_size=5, priority=-5)
    known = busy.http.get(f"/v1/tunings/{low}").headers["etag"]
    submitted(busy, effective_batch_size=6)
    headers = {"If-None-Match": known}
    answer = busy.http.get(f"/v1/tunings/{low}", params={"wait": 1.5}, headers=headers)
    assert answer.elapsed.total_seconds() >= 1.0
    assert (answer.status_code, answer.json()["queue"]["position"]) == (200, 2)
    assert answer.headers["etag"] != known
    busy.http.post(f"/v1/tunings/{low}/cancel")
    ended_now = busy.http.get(f"/v1/tunings/{low}", params={"wait": 30}, headers=headers)
    assert ended_now.json()["state"] == "CANCELLED"
