"""The contract of executors: every kind keeps it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from batchwright.driving.loop import TuningHooks
from batchwright.errors import ProbeCancelledError, SpecError
from batchwright.planning.session import TuningSession
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, RunProgress, TrainingResult
from batchwright.system.files import lock_directory
from batchwright.training.launching.launcher import TrainingProcess
from batchwright_service.worker.executors.base import Executor, GraceSeconds, OnProgress, TrainingRun
from batchwright_service.worker.executors.local import LocalExecutor
from tests.support.factories import CPU, recommendation, tuning_request
from tests.support.service.processes import are_gone
from tests.support.service.scripted import InlineExecutor, ScriptedRunner, progress, until_stopped

pytestmark = pytest.mark.usefixtures("forked")

MakeExecutor = Callable[[ScriptedRunner], Executor]


def on() -> None:
    """Never stop."""


def train_here(run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
    """A run in this process: an update a millisecond."""
    for update in range(1, run.request.updates + 1):
        if grace_seconds() is not None:
            return TrainingResult(outcome=RunOutcome.STOPPED, message="asked to", updates=update - 1)
        on_progress([progress(update, run.request.updates)])
        time.sleep(0.001)
    return TrainingResult(outcome=RunOutcome.SUCCEEDED, message="done", updates=run.request.updates)


@pytest.fixture(params=["inline", "local"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeExecutor]:
    """Makes an executor of each kind around a runner."""
    made: list[Executor] = []

    def new(runner: ScriptedRunner) -> Executor:
        local = request.param == "local"
        made.append(LocalExecutor(CPU, runner) if local else InlineExecutor(CPU, runner, train_here))
        return made[-1]

    yield new
    for executor in made:
        executor.close()


def tune(executor: Executor, grace_seconds: GraceSeconds = on) -> TuningSession:
    """Run a tuning on the CPU to its end."""
    tuning = TuningSession(tuning_request(), CPU, environment={}, versions={})
    executor.tune(tuning, TuningHooks(), grace_seconds)
    return tuning


def training_run(folder: Path, updates: int) -> TrainingRun:
    """A small run on synthetic data."""
    request = TrainingRequest(updates=updates, checkpoint_every=updates)
    return TrainingRun(folder / "run", recommendation(), request)


def test_probes_go_to_the_runner(make: MakeExecutor) -> None:
    """Their results are the runner's, and nothing of the search is left behind."""
    runner = ScriptedRunner(largest=8)
    tuning = tune(make(runner))
    assert tuning.proof_of_search().fits == 8
    assert [probe.micro_batch_size for probe in tuning.probes] == runner.sizes


def test_a_running_probe_is_stopped(make: MakeExecutor) -> None:
    """A probe ends with the error that says so after a stop request."""
    started = threading.Event()
    executor = make(ScriptedRunner(8, until_stopped(started)))
    with pytest.raises(ProbeCancelledError):
        tune(executor, lambda: 0.0 if started.is_set() else None)


def test_a_wrong_spec_is_found(make: MakeExecutor) -> None:
    """Errors of the runner's check reach the caller."""
    runner = ScriptedRunner(8)
    runner.spec_error = SpecError([], "spec")
    with pytest.raises(SpecError):
        tune(make(runner))


def test_a_running_check_is_stopped(make: MakeExecutor) -> None:
    """The runner learns that the check is no longer wanted."""

    class SlowCheck(ScriptedRunner):
        """Checks until a stop request."""

        def check(self, request: object, should_stop: Callable[[], bool] = lambda: False) -> None:
            """Wait, as long as a check may."""
            del request
            deadline = time.monotonic() + 240
            while time.monotonic() < deadline:
                if should_stop():
                    raise ProbeCancelledError("stopped")

    with pytest.raises(ProbeCancelledError):
        tune(make(SlowCheck(8)), lambda: 0.0)


def test_closing_closes_the_runner(make: MakeExecutor) -> None:
    """Closing again does nothing."""
    runner = ScriptedRunner(8)
    executor = make(runner)
    executor.close()
    executor.close()
    assert runner.closed


def test_a_run_is_stopped_and_goes_on_to_its_end(make: MakeExecutor, tmp_path: Path) -> None:
    """Told to stop, a run is STOPPED; started again it ends, and each update was reported in order."""
    executor = make(ScriptedRunner(8))
    seen: list[int] = []

    def on_progress(updates: Sequence[RunProgress]) -> None:
        seen.extend(update.update for update in updates)

    run = training_run(tmp_path, 100_000)
    stopped = executor.train(run, on_progress, lambda: 30.0 if seen else None)
    assert stopped.outcome is RunOutcome.STOPPED
    assert 0 < stopped.updates < 100_000
    total = stopped.updates + 5
    result = executor.train(training_run(tmp_path, total), on_progress, on)
    assert (result.outcome, result.updates) == (RunOutcome.SUCCEEDED, total)
    assert seen[: stopped.updates] == list(range(1, stopped.updates + 1))
    assert seen[-1] == total
    assert set(seen) == set(range(1, total + 1))


def test_a_run_ends_with_its_listener(make: MakeExecutor, tmp_path: Path) -> None:
    """An exception of the listener ends the run and reaches the caller; the executor stays usable."""
    executor = make(ScriptedRunner(8))

    def fail(updates: Sequence[RunProgress]) -> None:
        if updates:
            raise ValueError("the listener's own")

    with pytest.raises(ValueError, match="the listener's own"):
        executor.train(training_run(tmp_path, 100_000), fail, on)
    assert tune(executor).proof_of_search().fits == 8


# --- jobs as processes ---


@pytest.fixture
def processes() -> list[TrainingProcess]:
    """Return the processes that an executor of ``local`` has created."""
    return []


@pytest.fixture
def local(processes: list[TrainingProcess]) -> Iterator[LocalExecutor]:
    """Runs jobs as processes, which go on once after they were killed."""

    def new_process(directory: Path) -> TrainingProcess:
        processes.append(TrainingProcess(directory, restarts=1))
        return processes[-1]

    executor = LocalExecutor(CPU, ScriptedRunner(8), new_process)
    yield executor
    executor.close()


def test_a_killed_run_goes_on_from_its_checkpoint(
    local: LocalExecutor, processes: list[TrainingProcess], tmp_path: Path
) -> None:
    """Someone kills its process, twice, with a checkpoint in between: it goes on, with every update made."""
    every = 10
    run = TrainingRun(tmp_path, recommendation(), TrainingRequest(updates=100_000, checkpoint_every=every))
    seen: list[int] = []
    began_after: dict[int, int] = {}

    def on_progress(updates: Sequence[RunProgress]) -> None:
        """Kill each of the first two processes after the first checkpoint that it has surely written itself."""
        seen.extend(update.update for update in updates)
        pid, checkpoint = processes[0].pids[0], processes[0].paths.checkpointed_update() or 0
        before = began_after.setdefault(pid, checkpoint)
        if len(began_after) < 3 and checkpoint >= before + every:
            os.kill(pid, signal.SIGKILL)

    def grace_seconds() -> float | None:
        return 30.0 if len(began_after) == 3 and seen[-1] > max(began_after.values()) + every else None

    result = local.train(run, on_progress, grace_seconds)
    assert result.outcome is RunOutcome.STOPPED, result.message
    assert result.resumed_from is not None
    assert result.resumed_from >= 2 * every
    assert set(seen) == set(range(1, result.updates + 1))


def test_what_nobody_heard_of_is_told_when_a_run_goes_on(local: LocalExecutor, tmp_path: Path) -> None:
    """A worker that was frozen or killed may have left updates untold: those up to the checkpoint are, each once."""
    first = TrainingRun(tmp_path, recommendation(), TrainingRequest(updates=100_000))
    made: list[int] = []
    stopped = local.train(
        first, lambda updates: made.extend(update.update for update in updates), lambda: 30.0 if len(made) > 3 else None
    )
    seen: list[int] = []
    rest = TrainingRun(tmp_path, recommendation(), TrainingRequest(updates=stopped.updates + 2), reported=2)
    local.train(rest, lambda updates: seen.extend(update.update for update in updates), on)
    assert seen == list(range(3, stopped.updates + 3))


def test_a_run_that_is_killed_again_and_again_fails(
    local: LocalExecutor, processes: list[TrainingProcess], tmp_path: Path
) -> None:
    """Without a checkpoint in between, no more often than allowed; the result says what happened."""
    killed: set[int] = set()

    def on_progress(_updates: Sequence[RunProgress]) -> None:
        pid = processes[0].pids[0]
        if pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)

    result = local.train(TrainingRun(tmp_path, recommendation(), TrainingRequest()), on_progress, on)
    assert (result.outcome, len(killed)) == (RunOutcome.FAILED, 2)
    assert "killed from outside (SIGKILL)" in result.message


def test_no_process_outlives_its_listener(
    local: LocalExecutor, processes: list[TrainingProcess], tmp_path: Path
) -> None:
    """A lost lease, say, ends every process of the run before the caller hears of it."""
    alive: set[int] = set()

    def fail(updates: Sequence[RunProgress]) -> None:
        if updates:
            alive.update(processes[0].pids)
            raise ValueError("the listener's own")

    with pytest.raises(ValueError, match="the listener's own"):
        local.train(training_run(tmp_path, 100_000), fail, on)
    assert alive
    assert are_gone(alive)


def test_a_run_that_is_told_to_stop_may_be_given_less_time_later(tmp_path: Path) -> None:
    """A second signal, or a lost lease, ends at the next poll what was given long to write its checkpoint."""

    class Deaf(TrainingProcess):
        """Does not hear SIGTERM."""

        def request_stop(self) -> None:
            """Pass nothing on."""
            asked.append(len(polled))
            pids.update(self.pids)

    asked: list[int] = []
    pids: set[int] = set()
    polled: list[float | None] = []
    graces = iter([None, 600.0, 600.0])

    def grace_seconds() -> float | None:
        polled.append(next(graces, 0.0))
        return polled[-1]

    executor = LocalExecutor(CPU, ScriptedRunner(8), Deaf)
    result = executor.train(training_run(tmp_path, 100_000), lambda _: None, grace_seconds)
    executor.close()
    assert asked == [2]
    assert result.outcome is not RunOutcome.SUCCEEDED
    assert polled[1:] == [600.0, 600.0, 0.0]
    assert pids
    assert are_gone(pids)


def test_a_run_waits_for_the_process_that_still_has_its_folder(local: LocalExecutor, tmp_path: Path) -> None:
    """A worker may be frozen while its processes go on in a shared folder. Told to stop, the one that waits does."""
    run = training_run(tmp_path, 3)
    grace = iter([None, None, None, 0.5])
    with lock_directory(run.directory, 0.0) as alone:
        assert alone
        stopped = local.train(run, lambda _: None, lambda: next(grace))
    assert (stopped.outcome, stopped.updates) == (RunOutcome.STOPPED, 0)
    assert local.train(run, lambda _: None, on).outcome is RunOutcome.SUCCEEDED
