"""A host's trouble hands work back, says why, and is over when it is over: no work fails for it."""

import errno
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as families
from typing_extensions import override

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import JobRequest
from batchwright.errors import CheckLostError, FieldProblem, HubUnavailableError, ProbeError, SpecError
from batchwright.schemas.requests import TrainingRequest, TuningRequest
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright.schemas.training import RunOutcome, RunProgress, SystemTrouble, TrainingResult
from batchwright.system.host_failures import Cause, HostFailure
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.observability.instruments import Instruments
from batchwright_service.store.scheduling import WRITE_CHECK_TTL_SECONDS
from batchwright_service.store.store import Store
from batchwright_service.worker.coordinator import Coordinator
from batchwright_service.worker.executors.base import Executor, GraceSeconds, OnProgress, TrainingRun
from batchwright_service.worker.executors.local import LocalExecutor
from batchwright_service.worker.host_health import HostHealth
from tests.service.worker.test_device_worker import (
    PATIENCE_SECONDS,
    VERSIONS,
    ended,
    queue_job,
    queue_tuning,
    when,
    worker_settings,
)
from tests.support.factories import CPU, gpt_spec, recommendation, tuning_request
from tests.support.scarce import descriptors_used_up, fill, small_disk
from tests.support.service.asking import body, ended as api_ended, problem_in
from tests.support.service.running import StartService, migrated
from tests.support.service.scripted import InlineExecutor, ScriptedRunner, Trainer, new_work

pytestmark = pytest.mark.usefixtures("forked")

MIB = 1024**2
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs")


class Worker:
    """A coordinator of one device, and what it tells."""

    def __init__(self, store: Store, folder: Path, executor: Executor) -> None:
        self.instruments = Instruments()
        settings = worker_settings(folder)
        self.coordinator = Coordinator(
            store,
            [executor],
            VERSIONS,
            type(settings)(**{**vars(settings), "instruments": self.instruments}),
        )

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = self.instruments.metrics.exposition().decode()
        return sum(sample.value for family in families(text) for sample in family.samples if sample.name == name)

    def until_unready(self, wanted: float = 1.0) -> None:
        """Wait until the device takes no work, or takes work again. Reads no file and asks no database."""
        pause = threading.Event()
        for _ in range(int(PATIENCE_SECONDS / 0.01)):
            if self.metric("batchwright_device_unready") == wanted:
                return
            pause.wait(0.01)
        raise AssertionError


StartWorker = Callable[..., Worker]


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts a worker around an executor, or around a runner and a training function."""
    started: list[Worker] = []

    def new(train: Any = None, runner: ScriptedRunner | None = None, executor: Executor | None = None) -> Worker:
        made = executor or InlineExecutor(CPU, runner or ScriptedRunner(37), train or Trainer())
        started.append(Worker(store, tmp_path, made))
        started[-1].coordinator.start()
        return started[-1]

    yield new
    for worker in started:
        worker.coordinator.stop()


def states(store: Store, ids: list[str]) -> set[State]:
    """The states of works."""
    return {store.work.get(work).state for work in ids}


def announced(store: Store, unready: bool) -> str | None:  # noqa: FBT001 - reads as what is waited for
    """Why the device is unready, once it was announced as such, or as ready again."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        found = [seen.served.unready for seen in store.devices.list()]
        if found and (found[0] is not None) is unready:
            return found[0]
        pause.wait(0.01)
    raise AssertionError(store.devices.list())


# --- full disks ---


def queue_steady_job(store: Store, updates: int, keep: int) -> str:
    """Queue a job that writes a checkpoint after every update."""
    training = TrainingRequest(updates=updates, checkpoint_every=1, keep_checkpoints=keep)
    request = JobRequest(recommendation=recommendation(), training=training)
    work = new_work(IdentifierSource().new("job"), WorkKind.JOB, payload=request.model_dump_json())
    return store.submissions.add(work).id


def test_no_job_fails_on_a_full_disk(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """Six jobs wait while the folder of runs is full; the device says why; all are done when there is room."""
    with small_disk(tmp_path / "runs", MIB) as runs:
        filler = fill(runs)
        jobs = [queue_job(store, updates=3) for _ in range(6)]
        worker = start()
        worker.until_unready()
        cause = announced(store, unready=True)
        assert cause is not None
        assert cause.startswith("disk-full: ")
        assert str(runs) in cause
        assert states(store, jobs) == {State.QUEUED}
        filler.unlink()
        assert [ended(store, work).state for work in jobs] == [State.SUCCEEDED] * 6
        assert announced(store, unready=False) is None


def test_no_work_fails_while_its_folder_cannot_be_made(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """A file in the place of the folder: jobs and tunings wait until it is gone."""
    (tmp_path / "runs").touch()
    works = [queue_job(store, updates=3), queue_tuning(store), queue_job(store, updates=3)]
    worker = start()
    worker.until_unready()
    assert "missing: " in (announced(store, unready=True) or "")
    assert states(store, works) == {State.QUEUED}
    (tmp_path / "runs").unlink()
    assert {ended(store, work).state for work in works} == {State.SUCCEEDED}


@pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)], indirect=True
)
def test_a_disk_that_fills_beside_a_running_job_hands_it_back(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """Others fill the disk while a process trains: its checkpoint waits for room, and the job ends well."""
    with small_disk(tmp_path / "runs", 4 * MIB) as runs:
        fillers: list[Path] = []
        executor = Filling(CPU, ScriptedRunner(0), lambda: fillers.append(fill(runs)))
        job = queue_steady_job(store, updates=150, keep=1)
        worker = start(executor=executor)
        worker.until_unready()
        item = when(store, job, lambda item: item.state is not State.RUNNING)
        assert (item.state, item.problem) == (State.QUEUED, None)
        fillers[0].unlink()
        item = ended(store, job)
        assert (item.state, item.problem) == (State.SUCCEEDED, None)


class Filling(LocalExecutor):
    """Calls ``filled`` once, when a run has made its first update."""

    def __init__(self, device: Any, runner: ScriptedRunner, filled: Callable[[], object]) -> None:
        super().__init__(device, runner)
        self.filled = filled
        self.done = False

    @override
    def train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        def report_and_fill(updates: Sequence[RunProgress]) -> None:
            if updates and not self.done:
                self.done = True
                self.filled()
            on_progress(updates)

        return super().train(run, report_and_fill, grace_seconds)


def test_a_job_that_fills_the_disk_itself_fails_with_words(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """Its own checkpoints take all room: it fails, naming the disk, what is free and what helps."""
    with small_disk(tmp_path / "runs", MIB):
        start(executor=LocalExecutor(CPU, ScriptedRunner(0)))
        item = ended(store, queue_steady_job(store, updates=500, keep=500))
        assert item.state is State.FAILED
        assert item.problem is not None
        assert item.problem.code == "training-failed"
        assert f"the disk of {tmp_path / 'runs' / item.id}" in item.problem.detail
        assert "full" in item.problem.detail
        assert "keep fewer checkpoints" in item.problem.detail
        assert item.attempts == 1


# --- descriptors ---


def test_no_work_fails_without_descriptors(store: Store, start: StartWorker) -> None:
    """Every descriptor of the process is taken: jobs and tunings wait, and all are done when some are given back."""
    works = [queue_job(store, updates=3), queue_tuning(store), queue_job(store, updates=3)]
    gate = threading.Event()
    reached = threading.Event()

    def first(run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        reached.set()
        assert gate.wait(PATIENCE_SECONDS)
        os.close(os.dup(0))
        return Trainer()(run, on_progress, grace_seconds)

    worker = start(first)
    assert reached.wait(PATIENCE_SECONDS)
    with descriptors_used_up():
        gate.set()
        worker.until_unready()
    assert {ended(store, work).state for work in works} == {State.SUCCEEDED}
    assert worker.metric("batchwright_host_troubles_total") >= 1


# --- what is the host's, and what is the work's ---


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EMFILE, "Too many open files"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
        PermissionError(errno.EACCES, "Permission denied", "/runs"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__ + str(getattr(error, "errno", "")),
)
def test_a_system_error_around_work_hands_it_back(store: Store, start: StartWorker, error: Exception) -> None:
    """The tuning and the job go on later and succeed."""
    failures = [error, error]

    def gate(_size: int, _stop: Callable[[], bool]) -> None:
        if len(failures) > 1:
            raise failures.pop()

    def train(run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        if failures:
            raise failures.pop()
        return Trainer()(run, on_progress, grace_seconds)

    works = [queue_tuning(store), queue_job(store, updates=3)]
    worker = start(train, ScriptedRunner(37, gate))
    assert [ended(store, work).state for work in works] == [State.SUCCEEDED] * 2
    assert worker.metric("batchwright_host_troubles_total") == 2
    assert worker.metric("batchwright_device_unready") == 0


def test_an_error_of_the_machinery_counts_by_its_cause(store: Store, start: StartWorker) -> None:
    """A fork server that cannot be started for want of descriptors is no failure of the tuning."""
    failures = [ProbeError("the fork server did not start")]
    failures[0].__cause__ = OSError(errno.EMFILE, "Too many open files")

    def gate(_size: int, _stop: Callable[[], bool]) -> None:
        if failures:
            raise failures.pop()

    work = queue_tuning(store)
    start(runner=ScriptedRunner(37, gate))
    assert ended(store, work).state is State.SUCCEEDED


def test_a_probe_that_fails_on_a_host_in_trouble_is_not_recorded(
    store: Store, start: StartWorker, tmp_path: Path
) -> None:
    """Its error has shown nothing: the probe is run again when the host is well."""

    class Broken(ScriptedRunner):
        """Ends in an error as long as the folder of runs is none."""

        def run(self, request: Any, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
            """Fail, or answer."""
            result = super().run(request, should_stop)
            if len(self.sizes) > 1:
                return result
            (tmp_path / "runs").rmdir()
            (tmp_path / "runs").touch()
            return result.model_copy(update={"outcome": Outcome.ERROR, "message": "exit status 1"})

    work = queue_tuning(store)
    worker = start(runner=Broken(37))
    worker.until_unready()
    item = when(store, work, lambda item: item.state is State.QUEUED)
    assert (item.probes, item.problem) == (0, None)
    (tmp_path / "runs").unlink()
    assert ended(store, work).state is State.SUCCEEDED


@pytest.mark.parametrize(
    ("error", "code"), [(SpecError([], "spec"), "invalid-spec"), (CheckLostError("x"), "check-lost")]
)
def test_a_failure_on_a_host_that_is_well_stays_one(
    store: Store, start: StartWorker, error: Exception, code: str
) -> None:
    """A check that finds a fault, and one that is lost again and again, end the tuning with codes of their own."""
    runner = ScriptedRunner(37)
    runner.spec_error = error
    work = queue_tuning(store)
    start(runner=runner)
    item = ended(store, work)
    assert item.problem is not None
    assert (item.state, item.problem.code) == (State.FAILED, code)


def tuning_with_data() -> TuningRequest:
    """A tuning that names files of data."""
    return tuning_request(gpt_spec(data={"kind": "records", "paths": ["/data/rows.jsonl"]}))


def test_bad_data_ends_a_tuning_before_its_first_probe(store: Store, start: StartWorker) -> None:
    """The problem names the field and the row, and no probe ran."""
    runner, row = ScriptedRunner(37), FieldProblem("data.paths", "cannot be read", "row 5000 of /data/rows.jsonl")
    runner.data_errors = [SpecError([row])]
    work = queue_tuning(store, tuning_with_data())
    start(runner=runner)
    item = ended(store, work)
    assert item.problem is not None
    assert (item.state, item.problem.code, runner.sizes) == (State.FAILED, "invalid-spec", [])
    assert "row 5000 of /data/rows.jsonl" in str(item.problem)


def test_a_tuning_waits_for_a_hub_that_does_not_answer(store: Store, start: StartWorker) -> None:
    """It goes back to the queue, and says at its end how much of its data was read."""
    runner = ScriptedRunner(37)
    runner.data_errors = [HubUnavailableError([FieldProblem("model.pretrained", "does not answer")]) for _ in "ab"]
    work = queue_tuning(store, tuning_with_data())
    worker = start(runner=runner)
    item = ended(store, work)
    assert item.state is State.SUCCEEDED
    assert worker.metric("batchwright_host_troubles_total") == 2
    found = store.recommendations.get(item.recommendation_id or "")
    assert found.evidence.data is not None
    assert found.evidence.data.in_words == "all 3 samples"


def test_a_hub_that_never_answers_ends_work_in_the_end(
    store: Store, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the words of the hub."""
    monkeypatch.setattr("batchwright_service.worker.host_health._FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("batchwright_service.worker.attempts._MAX_HUB_FAILURES", 7)
    runner = ScriptedRunner(37)
    runner.data_errors = [HubUnavailableError([FieldProblem("model.pretrained", "does not answer")])] * 20
    work = queue_tuning(store, tuning_with_data())
    start(runner=runner)
    item = ended(store, work)
    assert item.problem is not None
    assert (item.state, item.problem.code) == (State.FAILED, "host-trouble")
    assert "does not answer" in item.problem.detail
    assert len(runner.data_errors) == 12


def test_trouble_that_follows_the_work_is_the_works_own(
    store: Store, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that meets it every time, on a host that is well each time, fails with the words; the next one runs."""
    monkeypatch.setattr("batchwright_service.worker.host_health._FIRST_PAUSE_SECONDS", 0.001)
    first = queue_job(store, updates=3)
    calls: list[Path] = []

    def train(run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        if run.directory.name == first:
            calls.append(run.directory)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run.directory))
        return Trainer()(run, on_progress, grace_seconds)

    start(train)
    second = queue_job(store, updates=3)
    item = ended(store, first)
    assert item.problem is not None
    assert (item.state, item.problem.code) == (State.FAILED, "host-trouble")
    assert "Permission denied" in item.problem.detail
    assert len(calls) == 6
    assert ended(store, second).state is State.SUCCEEDED


@pytest.mark.parametrize("cause", ["input-output", "hub"])
def test_a_disk_or_hub_that_failed_in_a_run_hands_it_back(store: Store, start: StartWorker, cause: str) -> None:
    """A training process reports an input/output error, or a hub that did not answer: the job goes on later."""
    results = [
        TrainingResult(
            outcome=RunOutcome.FAILED,
            message="it failed",
            updates=0,
            trouble=SystemTrouble(cause=cause, message="it failed (/runs)"),
        )
    ]

    def train(run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        return results.pop() if results else Trainer()(run, on_progress, grace_seconds)

    job = queue_job(store, updates=3)
    start(train)
    assert ended(store, job).state is State.SUCCEEDED


def test_a_device_that_is_gone_takes_no_work(store: Store, start: StartWorker) -> None:
    """NVML knows it no more: work waits for its return."""

    class Gone(InlineExecutor):
        """A device that comes and goes."""

        gone: str | None = "cpu does not answer: GPU is lost"

        def lost_device(self) -> str | None:
            """As it is now."""
            return self.gone

    executor = Gone(CPU, ScriptedRunner(37), Trainer())
    work = queue_tuning(store)
    worker = start(executor=executor)
    worker.until_unready()
    assert announced(store, unready=True) == "device: cpu does not answer: GPU is lost"
    executor.gone = None
    assert ended(store, work).state is State.SUCCEEDED


# --- what callers see ---


def test_a_service_says_why_its_device_is_unready(start_service: StartService, tmp_path: Path) -> None:
    """`/readyz` answers 503 and `/v1/devices` tells the cause, until it is over."""
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "runs").touch()
    service = start_service()
    problem = problem_in(service.http.get("/readyz"), 503, "not-ready")
    assert "no worker takes work: host/cpu (missing: " in problem.detail
    assert service.http.get("/v1/devices").json()["items"][0]["unready"].startswith("missing: ")
    (tmp_path / "data" / "runs").unlink()
    announced(service.system.store, unready=False)
    pause = threading.Event()
    while (answer := service.http.get("/readyz")).status_code != 200:
        assert "host/cpu" in answer.text
        pause.wait(0.05)
    assert service.http.get("/v1/devices").json()["items"][0]["unready"] is None


def test_a_full_database_is_no_unknown_device(start_service: StartService, tmp_path: Path) -> None:
    """Its worker cannot announce itself any more: 503 with the cause, also when the lease is long over."""
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        (disk / "store.db").write_bytes(migrated())
        service = start_service(database_url=f"sqlite:///{disk / 'store.db'}", lease_seconds=1.0)
        filler = fill(disk)
        pause = threading.Event()
        while service.system.store.devices.list()[0].age_seconds <= 1.0:
            pause.wait(0.05)
        pause.wait(WRITE_CHECK_TTL_SECONDS)
        problem = problem_in(service.http.post("/v1/tunings", json=body()), 503, "store-unavailable")
        assert "full" in problem.detail
        filler.unlink()
        while service.system.store.devices.list()[0].age_seconds > 1.0:
            pause.wait(0.05)
        location = service.http.post("/v1/tunings", json=body()).headers["Location"]
        assert api_ended(service.http, location)["state"] == "SUCCEEDED"


def test_trouble_is_among_the_measurements_of_workers() -> None:
    """The API requests them from its worker's process and reports them as its own."""
    metrics = Instruments().metrics
    metrics.register_device("cpu")
    metrics.set_device_trouble("cpu", "disk-full")
    values = {sample.name: sample.value for family in metrics.work_families() for sample in family.samples}
    assert values["batchwright_device_unready"] == 1
    assert values["batchwright_host_troubles_total"] == 1


# --- pauses and the log ---


def test_a_host_in_trouble_is_looked_at_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    """With growing pauses up to a bound; the log has one line a minute, and one at the end."""
    now = [0.0]
    looks: list[float] = []
    over = [False]

    def look(_needed: int) -> HostFailure | None:
        looks.append(now[0])
        return None if over[0] else HostFailure(Cause.DISK_FULL, "no room")

    health = HostHealth("host/cpu", look, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        while now[0] < 120.0:
            assert not health.is_ready()
            now[0] += 0.05
        over[0] = True
        now[0] += 15.0
        assert health.is_ready()
    pauses = [later - earlier for earlier, later in itertools.pairwise(looks[:-1])]
    assert all(later >= earlier - 0.01 for earlier, later in itertools.pairwise(pauses))
    assert max(pauses) == pytest.approx(15.0, abs=0.1)
    assert len(looks) < 20
    assert [record.message for record in caplog.records] == [
        "host/cpu takes no work: disk-full: no room",
        "host/cpu takes no work: disk-full: no room (and 8 more times)",
        "host/cpu takes work again: disk-full is over",
    ]
    assert health.unready is None


def test_room_that_work_needs_is_waited_for_as_long_as_it_waits() -> None:
    """A checkpoint that found no room: less work is taken while there is less, unless the work is gone."""
    now, needs, waits = [0.0], [], [True]

    def look(needed: int) -> HostFailure | None:
        needs.append(needed)
        return HostFailure(Cause.DISK_FULL, "too little", needed) if needed else None

    health = HostHealth("host/cpu", look, clock=lambda: now[0])
    assert health.is_ready()
    health.report_trouble(HostFailure(Cause.DISK_FULL, "full", 5000), lambda: waits[0])
    now[0] += 10.0
    assert not health.is_ready()
    waits[0] = False
    now[0] += 20.0
    assert health.is_ready()
    assert needs == [0, 5000, 0]
