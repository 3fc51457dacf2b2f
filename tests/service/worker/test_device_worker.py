"""Workers drive work to its end, whatever is cancelled, stopped, lost or wrong on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.work import JobRequest
from batchwright.errors import ProbeError, SpecError
from batchwright.planning.session import TuningSession
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.requests import ExpectationRequest, ProbeRequest, TrainingRequest, TuningRequest
from batchwright.schemas.results import ExpectedPeak, ExpectedPeaks, Outcome, ProbeResult
from batchwright.schemas.training import RunOutcome, TrainingResult
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.errors import DeviceTakenError, StoreUnavailableError
from batchwright_service.store.models import WorkItem
from batchwright_service.store.store import Store
from batchwright_service.worker.coordinator import Coordinator
from batchwright_service.worker.executors.base import GraceSeconds, OnProgress, TrainingRun
from batchwright_service.worker.worker_settings import WorkerSettings
from tests.support.factories import CPU, mlp_spec, recommendation, tuning_request
from tests.support.service.scripted import (
    SERVED,
    InlineExecutor,
    ScriptedRunner,
    Trainer,
    TrainFunction,
    new_work,
    progress,
    undisturbed,
    until_stopped,
)

VERSIONS = {"torch": "2.8"}
PATIENCE_SECONDS = 120.0

StartWorker = Callable[..., Coordinator]


def no_training(_run: TrainingRun, _on_progress: OnProgress, _grace_seconds: GraceSeconds) -> TrainingResult:
    """No test that uses it trains."""
    raise AssertionError


def worker_settings(folder: Path, lease_seconds: float = 60.0, node_name: str = "host") -> WorkerSettings:
    """Quick polls; leases long enough never to expire by themselves."""
    return WorkerSettings(
        node_name=node_name,
        runs_dir=folder / "runs",
        locks_dir=folder / "locks",
        lease_seconds=lease_seconds,
        poll_seconds=0.02,
        shutdown_grace_seconds=1.0,
    )


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts a worker on the CPU around a runner and a training function."""
    started: list[Coordinator] = []

    def new(
        runner: ScriptedRunner,
        train: TrainFunction = no_training,
        lease_seconds: float = 60.0,
        node_name: str = "host",
    ) -> Coordinator:
        executor = InlineExecutor(CPU, runner, train)
        folder = tmp_path if node_name == "host" else tmp_path / node_name
        settings = worker_settings(folder, lease_seconds, node_name)
        started.append(Coordinator(store, [executor], VERSIONS, settings))
        started[-1].start()
        return started[-1]

    yield new
    for coordinator in started:
        coordinator.stop()


def ended(store: Store, work_id: str) -> WorkItem:
    """The work once it has ended."""
    return when(store, work_id, lambda item: item.state.terminal)


def when(store: Store, work_id: str, condition: Callable[[WorkItem], bool]) -> WorkItem:
    """The work once a condition holds."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        if condition(item := store.work.get(work_id)):
            return item
        pause.wait(0.01)
    raise AssertionError(f"still {store.work.get(work_id)}")


def queue_tuning(store: Store, request: TuningRequest | None = None, *, fresh: bool = False) -> str:
    """Queue a tuning as the use case does."""
    request = request or tuning_request()
    course = TuningSession(request, CPU, environment={}, versions=VERSIONS)
    values: dict[str, Any] = {"fingerprint": course.fingerprint, "payload": request.model_dump_json(), "fresh": fresh}
    return store.submissions.add(new_work(IdentifierSource().new("tun"), **values)).id


def queue_job(store: Store, updates: int) -> str:
    """Queue a job as the use case does."""
    request = JobRequest(recommendation=recommendation(), training=TrainingRequest(updates=updates))
    work = new_work(IdentifierSource().new("job"), WorkKind.JOB, payload=request.model_dump_json())
    return store.submissions.add(work).id


def test_a_tuning_ends_with_its_recommendation(store: Store, start: StartWorker) -> None:
    """Queued, probed, answered: every probe is recorded and the answer is stored."""
    work_id = queue_tuning(store)
    runner = ScriptedRunner(largest=37)
    start(runner)
    item = ended(store, work_id)
    assert item.state is State.SUCCEEDED
    answer = store.recommendations.get(str(item.recommendation_id))
    assert (answer.feasible, answer.largest_micro_batch_size) == (True, 37)
    assert answer.fingerprint == item.fingerprint
    assert [probe.result for probe in store.evidence.probes(work_id)] == list(answer.evidence.probes)
    assert runner.sizes == [probe.micro_batch_size for probe in answer.evidence.probes]
    assert runner.checked == 1


def test_equal_tunings_in_the_queue_are_answered_by_the_first(store: Store, start: StartWorker) -> None:
    """They run no probe and store nothing more, unless they differ in their data, or are to be measured anew."""
    data = {"kind": "synthetic", "samples": 70}
    first, second = queue_tuning(store), queue_tuning(store)
    other = queue_tuning(store, tuning_request(mlp_spec(data=data)))
    runner = ScriptedRunner(largest=37)
    start(runner)
    items = [ended(store, work_id) for work_id in (first, second, other)]
    assert [item.state for item in items] == [State.SUCCEEDED] * 3
    assert len(runner.sizes) == items[0].probes > items[1].probes == items[2].probes == 0
    assert items[0].recommendation_id == items[1].recommendation_id != items[2].recommendation_id
    copied = store.recommendations.get(str(items[2].recommendation_id))
    source = store.recommendations.get(str(items[0].recommendation_id))
    assert copied.request.workload.data is not None
    assert (copied.evidence, source.evidence.tuning_id) == (source.evidence, items[0].id)
    assert copied.created_at > source.created_at
    anew = ended(store, queue_tuning(store, fresh=True))
    assert anew.probes == items[0].probes
    assert anew.recommendation_id not in {item.recommendation_id for item in items}


@pytest.fixture
def beside(store: Store, start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScriptedRunner, str]]:
    """The runner of a slot that has claimed a tuning, and the id of this one: in another slot an equal one runs."""
    monkeypatch.setattr("batchwright_service.worker.runner._EQUAL_TUNING_PAUSE_SECONDS", 0.01)
    began, go_on = threading.Event(), threading.Event()

    def hold(_size: int, should_stop: Callable[[], bool]) -> None:
        began.set()
        while not go_on.wait(0.01) and not should_stop():
            pass

    runner = ScriptedRunner(37, lambda *_: go_on.set())
    queue_tuning(store)
    start(ScriptedRunner(37, hold))
    assert began.wait(PATIENCE_SECONDS)
    work_id = queue_tuning(store)
    start(runner, node_name="other")
    when(store, work_id, lambda item: item.state is not State.QUEUED)
    yield runner, work_id
    go_on.set()


def test_an_equal_tuning_in_another_slot_is_awaited(store: Store, beside: tuple[ScriptedRunner, str]) -> None:
    """Its recommendation answers both; one that waits can be cancelled."""
    runner, work_id = beside
    cancelled = store.submissions.cancel(work_id)
    assert cancelled.state is State.CANCELLING
    assert ended(store, work_id).state is State.CANCELLED
    again = queue_tuning(store)
    when(store, again, lambda item: item.state is State.RUNNING)
    runner.gate(0, lambda: False)  # the other one goes on
    item = ended(store, again)
    assert (item.state, item.probes, runner.sizes) == (State.SUCCEEDED, 0, [])
    others = [row for row in store.work.newest(WorkKind.TUNING, 9) if row.state is State.SUCCEEDED]
    assert {row.recommendation_id for row in others} == {item.recommendation_id}
    assert len(others) == 2


def test_a_quick_tuning_awaits_no_equal_one(store: Store, beside: tuple[ScriptedRunner, str]) -> None:
    """It is for an answer now, and runs one plan beside the search that goes on in the other slot."""
    runner, work_id = beside
    store.submissions.cancel(work_id)
    assert ended(store, work_id).state is State.CANCELLED
    item = ended(store, queue_tuning(store, tuning_request(quick=True)))
    assert item.state is State.SUCCEEDED
    assert item.probes == len(runner.sizes) > 0


def test_an_equal_tuning_is_not_awaited_for_ever(
    store: Store, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A tuning that has waited in vain is measured."""
    monkeypatch.setattr("batchwright_service.domain.lease_waits.EQUAL_TUNING_SECONDS", 0.0)
    runner, work_id = request.getfixturevalue("beside")
    item = ended(store, work_id)
    assert item.state is State.SUCCEEDED
    assert item.probes == len(runner.sizes) > 0


def coupled_runner(largest: int) -> ScriptedRunner:
    """A runner that finds the loss to couple samples."""
    runner = ScriptedRunner(largest)
    runner.coupling = CouplingCheck(verdict="coupled", message="BatchNorm is at fault.")
    return runner


def test_a_coupled_loss_fails_a_tuning_before_its_probes(store: Store, start: StartWorker) -> None:
    """Several ranks can make no exact plan: the problem has a code of its own, and nothing was probed."""
    work_id = queue_tuning(store, tuning_request(mlp_spec(parallelism={"world_size": 2})))
    runner = coupled_runner(37)
    start(runner)
    item = ended(store, work_id)
    assert item.state is State.FAILED
    assert item.problem is not None
    assert item.problem.code == "coupled-loss"
    assert "BatchNorm is at fault." in item.problem.detail
    assert (runner.compared, runner.checked, runner.sizes) == (1, 0, [])


def test_a_restarted_tuning_checks_its_loss_again(store: Store, start: StartWorker) -> None:
    """Only probes are recorded: the evidence would otherwise lack the check."""
    started = threading.Event()
    hold = until_stopped(started)
    request = tuning_request(allow_batch_coupling=True)
    stop_at = undisturbed(37, request)[1].micro_batch_size
    work_id = queue_tuning(store, request)
    runner = coupled_runner(37)
    runner.gate = lambda size, stop: hold(size, stop) if size == stop_at else None
    first = start(runner)
    assert started.wait(PATIENCE_SECONDS)
    first.stop()
    second = coupled_runner(37)
    start(second)
    item = ended(store, work_id)
    assert item.state is State.SUCCEEDED
    assert (second.compared, second.checked) == (1, 0)
    answer = store.recommendations.get(str(item.recommendation_id))
    assert [advice.code for advice in answer.warnings] == ["coupled-loss"]


class EstimatingRunner(ScriptedRunner):
    """A scripted runner with an estimate: checkpointing leaves half of what a sample takes."""

    def expect(self, request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False) -> ExpectedPeaks:
        """Half as much per sample, with checkpointing."""
        assert not should_stop()
        whole = request.limit_bytes // (self.largest + 2)
        sample = whole // 2 if request.spec.activation_checkpointing else whole
        points = (ExpectedPeak(micro_batch_size=number, used_bytes=whole + number * sample) for number in (1, 2))
        return ExpectedPeaks(points=tuple(points))


def test_a_tuning_learns_from_the_estimate_of_an_earlier_one(store: Store, start: StartWorker) -> None:
    """The first finds the estimate of its family to be far too high; the next takes a fit and an OOM, and says why."""

    class Pessimist(ScriptedRunner):
        """A runner whose estimates are 40 % above what its probes measure."""

        def expect(self, request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False) -> ExpectedPeaks:
            """1.4 times the formula."""
            assert not should_stop()
            whole = 1.4 * request.limit_bytes / (self.largest + 2)
            points = (ExpectedPeak(micro_batch_size=size, used_bytes=round((size + 1) * whole)) for size in (1, 90))
            return ExpectedPeaks(points=tuple(points))

    runner = Pessimist(largest=30)
    start(runner)
    answers = []
    for width in (32, 48):
        spec = mlp_spec(model={"kind": "reference", "architecture": {"name": "mlp", "hidden_features": width}})
        item = ended(store, queue_tuning(store, tuning_request(spec)))
        answers.append(store.recommendations.get(str(item.recommendation_id)))
    first, second = (answer.evidence for answer in answers)
    assert first.expected is not None
    assert first.expected.correction is None
    assert second.expected is not None
    assert second.expected.correction is not None
    assert second.expected.correction.tunings == 1
    assert [answer.largest_micro_batch_size for answer in answers] == [30, 30]
    assert [probe.micro_batch_size for probe in second.probes if not probe.runs_plan] == [30, 31]
    assert len(first.probes) > 2


def test_a_tuning_expects_the_context_that_an_earlier_one_measured(store: Store, start: StartWorker) -> None:
    """Its estimate leaves to the context what the probes on this device found, and not what was assumed before."""
    contexts = []

    class Measuring(EstimatingRunner):
        """A runner whose probes find a context of a million bytes."""

        def expect(self, request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False) -> ExpectedPeaks:
            """Keep the context of the request."""
            contexts.append(request.context_bytes)
            return super().expect(request, should_stop)

        def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
            """Measure the context, whatever the size."""
            return super().run(request, should_stop).model_copy(update={"context_bytes": 1_000_000})

    start(Measuring(largest=30))
    for _ in range(2):
        assert ended(store, queue_tuning(store, fresh=True)).state is State.SUCCEEDED
    assert contexts == [0, 1_000_000]


def test_a_wrong_spec_fails_before_any_probe(store: Store, start: StartWorker) -> None:
    """An error of the check ends the tuning as FAILED, with the code of an invalid spec and without a probe."""
    work_id = queue_tuning(store)
    runner = ScriptedRunner(37)
    runner.spec_error = SpecError([], "spec")
    start(runner)
    item = ended(store, work_id)
    assert item.state is State.FAILED
    assert item.problem is not None
    assert (item.problem.code, item.problem.status) == ("invalid-spec", None)
    assert runner.sizes == []


def test_a_broken_workload_fails_with_its_reason(store: Store, start: StartWorker) -> None:
    """Probes that end in ERROR end the tuning as FAILED, with the search's word and the probes as evidence."""

    class Broken(ScriptedRunner):
        """A workload with a bug."""

        def run(self, request: object, should_stop: object = None) -> ProbeResult:
            """Fail for a reason that is no matter of size."""
            del request, should_stop
            return ProbeResult(
                micro_batch_size=1, accumulates=True, outcome=Outcome.ERROR, phase="warmup", message="bug"
            )

    work_id = queue_tuning(store)
    start(Broken(37))
    item = ended(store, work_id)
    assert item.state is State.FAILED
    assert item.problem is not None
    assert item.problem.code not in {"", "internal-error"}
    assert "bug" in item.problem.detail
    assert item.probes == 2


@pytest.mark.parametrize(("error", "code"), [(ProbeError("fork"), "probe-error"), (KeyError("x"), "internal-error")])
def test_a_failure_of_the_machinery_fails_the_tuning_and_not_the_worker(
    store: Store, start: StartWorker, error: Exception, code: str
) -> None:
    """The tuning is FAILED without a traceback, and the worker goes on to the next."""
    failures = [error]

    def fail_once(_size: int, _stop: Callable[[], bool]) -> None:
        if failures:
            raise failures.pop()

    first, second = queue_tuning(store), queue_tuning(store)
    start(ScriptedRunner(37, fail_once))
    problem = ended(store, first).problem
    assert problem is not None
    assert problem.code == code
    assert "Traceback" not in problem.detail
    assert ended(store, second).state is State.SUCCEEDED


def test_a_running_tuning_is_cancelled(store: Store, start: StartWorker) -> None:
    """A cancellation reaches a running probe, and the worker goes on to the next tuning."""
    started = threading.Event()
    work_id = queue_tuning(store)
    coordinator = start(ScriptedRunner(37, until_stopped(started)))
    assert started.wait(PATIENCE_SECONDS)
    assert store.submissions.cancel(work_id).state is State.CANCELLING
    coordinator.notify()
    item = ended(store, work_id)
    assert (item.state, item.probes) == (State.CANCELLED, 0)
    started.clear()
    queue_tuning(store)
    coordinator.notify()
    assert started.wait(PATIENCE_SECONDS)


def test_a_cancellation_from_another_process_is_seen(store: Store, start: StartWorker) -> None:
    """Without a notification the next heartbeat finds the cancellation."""
    started = threading.Event()
    work_id = queue_tuning(store)
    start(ScriptedRunner(37, until_stopped(started)))
    assert started.wait(PATIENCE_SECONDS)
    store.submissions.cancel(work_id)
    assert ended(store, work_id).state is State.CANCELLED


def test_a_stopped_worker_hands_its_tuning_back(store: Store, start: StartWorker) -> None:
    """After a graceful stop the tuning is queued with its probes, and the next worker runs only the rest."""
    whole = undisturbed(37)
    stop_at = whole[1].micro_batch_size
    started = threading.Event()
    hold = until_stopped(started)
    work_id = queue_tuning(store)
    first = start(ScriptedRunner(37, lambda size, stop: hold(size, stop) if size == stop_at else None))
    assert started.wait(PATIENCE_SECONDS)
    first.stop()
    item = store.work.get(work_id)
    assert (item.state, item.probes) == (State.QUEUED, 1)
    second = ScriptedRunner(37)
    start(second)
    assert ended(store, work_id).state is State.SUCCEEDED
    assert second.sizes == [probe.micro_batch_size for probe in whole[1:]]
    assert second.checked == 0


def test_a_dead_workers_tuning_goes_on_at_once(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """Work of a dead process of this host is taken over without waiting for its lease, from its recorded probes."""
    whole = undisturbed(37)
    work_id = queue_tuning(store)
    dead = SERVED.model_copy(update={"owner": worker_settings(tmp_path).new_owner()})
    claim = store.leases.claim(dead, 3600.0)
    assert claim is not None
    for ordinal, result in enumerate(whole[:2], start=1):
        store.evidence.record_probe(claim.lease, ordinal, result)
    runner = ScriptedRunner(37)
    start(runner)
    item = ended(store, work_id)
    assert (item.state, item.attempts) == (State.SUCCEEDED, 2)
    assert runner.sizes == [probe.micro_batch_size for probe in whole[2:]]


def test_a_takeover_is_counted(store: Store, tmp_path: Path) -> None:
    """Work of a dead process counts once; work that was only queued, or handed back since, does not."""
    queue_tuning(store)
    work_ids = [queue_tuning(store), queue_tuning(store, tuning_request(mlp_spec(), 64))]
    dead = SERVED.model_copy(update={"owner": worker_settings(tmp_path).new_owner()})
    assert store.leases.claim(dead, 3600.0) is not None
    vanished = store.leases.claim(SERVED.model_copy(update={"slot": "a/cpu", "owner": "a:scope:1"}), 0.0)
    again = store.leases.claim(SERVED.model_copy(update={"slot": "b/cpu", "owner": "b:scope:1"}), 3600.0)
    assert vanished is not None
    assert again is not None
    store.leases.hand_back(again.lease)
    settings = worker_settings(tmp_path)
    executor = InlineExecutor(CPU, ScriptedRunner(37), no_training)
    coordinator = Coordinator(store, [executor], VERSIONS, settings)
    coordinator.start()
    for work_id in work_ids:
        ended(store, work_id)
    coordinator.stop()
    assert b'batchwright_takeovers_total{device="cpu"} 1.0' in settings.instruments.metrics.exposition()


def test_a_worker_that_lost_its_lease_says_nothing(store: Store, start: StartWorker) -> None:
    """A running probe whose lease was taken over is ended, and its result is not recorded."""
    started = threading.Event()
    work_id = queue_tuning(store)
    runner = ScriptedRunner(37, until_stopped(started))
    start(runner)
    assert started.wait(PATIENCE_SECONDS)
    store.leases.release_slot(SERVED.slot, "host:")
    other = store.leases.claim(SERVED.model_copy(update={"slot": "other/cpu", "owner": "other:1"}), 3600.0)
    assert other is not None
    when(store, work_id, lambda _: len(runner.sizes) == 1)
    store.evidence.record_probe(other.lease, 1, undisturbed(37)[0])
    item = store.work.get(work_id)
    assert (item.state, item.slot, item.probes, item.attempts) == (State.RUNNING, "other/cpu", 1, 2)


def test_work_that_ends_its_workers_is_given_up(store: Store, start: StartWorker) -> None:
    """After several workers in a row vanished without recording anything, the work is FAILED."""
    work_id = queue_tuning(store)
    for _ in range(6):
        assert store.leases.claim(SERVED, 0.0) is not None
    start(ScriptedRunner(37))
    item = ended(store, work_id)
    assert item.problem is not None
    assert item.problem.code == "worker-lost"


class AwayAfterClaims:
    """A store of a worker's own, which cannot be reached after each of some claims until its lease has ended."""

    def __init__(self, store: Store, times: int) -> None:
        self._store = store
        self.left = times
        self.away_until = 0.0

    def new_listener(self, _owner: str, _receiver: object) -> None:
        """None: the worker polls."""

    def __getattr__(self, name: str) -> AwayInterface:
        """An interface whose methods fail while the store is away."""
        return AwayInterface(self, getattr(self._store, name))


class AwayInterface:
    """One interface of a store that is away."""

    def __init__(self, away: AwayAfterClaims, interface: object) -> None:
        self._away = away
        self._interface = interface

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method that fails while the store is away."""
        method: Callable[..., Any] = getattr(self._interface, name)
        away = self._away

        def call(*arguments: Any) -> Any:
            if time.monotonic() < away.away_until:
                raise StoreUnavailableError("disk is full")
            found = method(*arguments)
            if name == "claim" and found is not None and away.left:
                away.left -= 1
                away.away_until = time.monotonic() + 2.0 * arguments[1]
            return found

        return call


def test_a_store_that_is_away_again_and_again_fails_no_work(store: Store, tmp_path: Path) -> None:
    """A worker that could not record or hand back anything is there all the time: it did not vanish."""
    work_id = queue_tuning(store)
    away = AwayAfterClaims(store, times=7)
    executor = InlineExecutor(CPU, ScriptedRunner(37), no_training)
    worker = Coordinator(cast("Store", away), [executor], VERSIONS, worker_settings(tmp_path, lease_seconds=0.3))
    worker.start()
    try:
        item = ended(store, work_id)
    finally:
        worker.stop()
    assert (item.problem, item.state, away.left) == (None, State.SUCCEEDED, 0)


def test_probes_of_another_environment_are_not_mixed(store: Store, start: StartWorker) -> None:
    """A tuning interrupted by an upgrade fails with a reason rather than rest on two versions' probes."""
    request = tuning_request()
    work = new_work(IdentifierSource().new("tun"), payload=request.model_dump_json())
    work_id = store.submissions.add(work).id
    claim = store.leases.claim(SERVED, 3600.0)
    assert claim is not None
    store.evidence.record_probe(claim.lease, 1, undisturbed(37)[0])
    store.leases.hand_back(claim.lease)
    start(ScriptedRunner(37))
    item = ended(store, work_id)
    assert item.problem is not None
    assert item.problem.code == "environment-changed"


def test_a_cancelled_tuning_of_a_dead_worker_ends(store: Store, start: StartWorker) -> None:
    """Work in CANCELLING whose worker died becomes CANCELLED by the next worker."""
    work_id = queue_tuning(store)
    assert store.leases.claim(SERVED, 0.0) is not None
    store.submissions.cancel(work_id)
    runner = ScriptedRunner(37)
    start(runner)
    assert ended(store, work_id).state is State.CANCELLED
    assert runner.sizes == []


def test_a_device_is_served_once(
    store: Store, start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second service on the same data folder is refused, naming the device and the holder."""
    monkeypatch.setattr("batchwright_service.domain.lease_waits.SLOT_SECONDS", 0.0)
    start(ScriptedRunner(37))
    second = Coordinator(store, [InlineExecutor(CPU, ScriptedRunner(37), no_training)], {}, worker_settings(tmp_path))
    with pytest.raises(DeviceTakenError, match=r"cpu is served by host:"):
        second.start()


# --- jobs ---


def test_a_jobs_folder_tells_where_it_ran(store: Store, start: StartWorker, tmp_path: Path) -> None:
    """So that whoever reads its files knows whether they are of its last attempt."""
    job_id = queue_job(store, updates=3)
    start(ScriptedRunner(0), Trainer())
    assert ended(store, job_id).slot == "host/cpu"
    assert (tmp_path / "runs" / job_id / ".slot").read_text() == "host/cpu"


def test_a_job_ends_with_its_result(store: Store, start: StartWorker) -> None:
    """A job's updates become events, its newest update its progress, and its result is stored."""
    job_id = queue_job(store, updates=3)
    start(ScriptedRunner(0), Trainer())
    item = ended(store, job_id)
    assert item.state is State.SUCCEEDED
    assert item.progress == progress(3, 3)
    assert item.result is not None
    assert item.result.updates == 3
    assert [event.progress.update for event in store.evidence.events(job_id) if event.progress] == [1, 2, 3]


def test_a_failed_run_fails_its_job(store: Store, start: StartWorker) -> None:
    """A run that cannot go on leaves its result and a problem."""
    job_id = queue_job(store, updates=3)
    start(ScriptedRunner(0), Trainer(outcome=RunOutcome.FAILED))
    item = ended(store, job_id)
    assert item.state is State.FAILED
    assert item.problem is not None
    assert item.result is not None
    assert item.problem.code == "training-failed"


def test_a_running_job_is_cancelled(store: Store, start: StartWorker) -> None:
    """A cancellation stops the run, with little time to end itself, and the job is CANCELLED."""
    trainer = Trainer(hold_at=2)
    job_id = queue_job(store, updates=3)
    coordinator = start(ScriptedRunner(0), trainer)
    assert trainer.holding.wait(PATIENCE_SECONDS)
    store.submissions.cancel(job_id)
    coordinator.notify()
    assert ended(store, job_id).state is State.CANCELLED
    assert trainer.graces[0] < 2.0


def test_a_stopped_workers_job_goes_on(store: Store, start: StartWorker) -> None:
    """After a graceful stop the job is queued; the next worker resumes it, and no update is recorded twice."""
    trainer = Trainer(hold_at=3)
    job_id = queue_job(store, updates=5)
    first = start(ScriptedRunner(0), trainer)
    assert trainer.holding.wait(PATIENCE_SECONDS)
    first.stop()
    assert store.work.get(job_id).state is State.QUEUED
    trainer.hold_at = None
    start(ScriptedRunner(0), trainer)
    item = ended(store, job_id)
    assert (item.state, item.attempts) == (State.SUCCEEDED, 2)
    assert [event.progress.update for event in store.evidence.events(job_id) if event.progress] == [1, 2, 3, 4, 5]
