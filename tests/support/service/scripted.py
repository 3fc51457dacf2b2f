"""A probe runner that answers from a formula, and the documents that the service's tests start from."""

import threading
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from batchwright.client.documents.states import WorkKind
from batchwright.client.documents.workers import ServedDevice
from batchwright.driving.probe_runner import WorkloadRunner
from batchwright.errors import ProbeCancelledError
from batchwright.hardware.memory_in_use import MemoryInUse
from batchwright.planning.accumulation import probe_window
from batchwright.planning.session import TuningSession
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.recommendation import CouplingCheck, DataReading
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import (
    CountedRank,
    CountedUpdates,
    DeviceInfo,
    ExpectedPeaks,
    Outcome,
    Phase,
    ProbeResult,
)
from batchwright.schemas.training import EvaluationReport, RunOutcome, TrainingProgress, TrainingResult
from batchwright.schemas.workload import WorkloadSpec
from batchwright_service.store.models import NewWork
from batchwright_service.worker.executors.base import Executor, GraceSeconds, OnProgress, TrainingRun
from tests.support.factories import CPU, tuning_request

SERVED = ServedDevice(slot="host/cpu", owner="host:scope:1", device=CPU, environment={}, versions={"torch": "2.8"})


class ScriptedRunner:
    """A ``WorkloadRunner``: a size fits if it is at most ``largest``; memory is affine in it.

    ``gate`` is called within each probe, with the size and the probe's ``should_stop``: a test's chance to wait, to
    fail, or to say that a probe takes its time.
    """

    def __init__(self, largest: int, gate: Callable[[int, Callable[[], bool]], None] | None = None) -> None:
        self.largest = largest
        self.sizes: list[int] = []
        self.checked = 0
        self.compared = 0
        self.coupling = CouplingCheck(verdict="separate", message="the loss is a sum over the samples")
        self.closed = False
        self.late: ExpectedPeaks | None = None
        self.memory: MemoryInUse | None = None
        self.spec_error: Exception | None = None
        self.data_errors: list[Exception] = []
        self.gate = gate or (lambda _size, _stop: None)

    def start(self, spec: WorkloadSpec, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Do nothing."""
        del spec, should_stop

    def check(self, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Find the error that the test put there."""
        del should_stop
        assert request.effective_batch_size > 0
        self.checked += 1
        if self.spec_error is not None:
            raise self.spec_error

    def check_coupling(
        self, request: CouplingRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> CouplingCheck:
        """Find what the test put there."""
        del request, should_stop
        self.compared += 1
        return self.coupling

    def read_data(
        self,
        spec: WorkloadSpec,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int, int], None] = lambda _read, _total: None,
    ) -> DataReading:
        """Read nothing, or find the error that the test put there."""
        del spec, should_stop, on_progress
        if self.data_errors:
            raise self.data_errors.pop()
        return DataReading(read=3, total=3, seconds=0.0)

    def begin_estimate(self, request: ExpectationRequest) -> None:
        """Do nothing."""
        del request

    def expect(
        self, request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> ExpectedPeaks | None:
        """No estimate: the search has to do without."""
        del request, should_stop
        return None

    def late_estimate(self) -> ExpectedPeaks | None:
        """Find the estimate that the test put there."""
        return self.late

    def end_search(self) -> None:
        """Forget it."""
        self.late = None

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Answer from the formula."""
        size = request.micro_batch_size
        self.sizes.append(size)
        self.gate(size, should_stop)
        if should_stop():
            raise ProbeCancelledError("the test's probe was ended on request")
        fits = size <= self.largest
        limit = request.limit_bytes or 2**33
        count = "one optimizer update" if request.brackets else "two optimizer updates"
        return ProbeResult(
            micro_batch_size=size,
            accumulates=request.accumulates,
            micro_batch_sizes=probe_window(request),
            outcome=Outcome.FIT if fits else Outcome.OOM,
            phase=Phase.DONE if fits else Phase.WARMUP,
            message=f"{count} ran within the limit" if fits else "asked for 8.00 MiB more in the warm-up",
            process_peak_bytes=min(limit, limit * (size + 1) // (self.largest + 2)) if fits else limit,
            limit_bytes=limit,
            brackets=request.brackets,
            verifies_plan=request.runs_plan and isinstance(request.spec, CommandSpec),
            counted=_counted(request) if fits and isinstance(request.spec, CommandSpec) else None,
        )

    def environment(self) -> dict[str, str]:
        """Nothing is set."""
        return {}

    def close(self) -> None:
        """Remember it."""
        self.closed = True


def _counted(request: ProbeRequest) -> CountedUpdates:
    """The updates of a command that follows its arguments."""
    size = request.micro_batch_size
    is_of_plan = request.runs_plan or request.counts_plan
    steps = request.samples_per_window // size if is_of_plan else len(probe_window(request))
    return CountedUpdates(
        world_size=1,
        accumulation_steps=steps,
        ranks=(CountedRank(rank=0, backward_passes=(steps,) * 2, samples={"loader 1": (steps * size,) * 2}),),
        of_plan=steps * size == request.samples_per_window,
        as_planned=True,
        statement=f"{steps} backward passes of {size} samples per update, as planned",
    )


def until_stopped(started: threading.Event) -> Callable[[int, Callable[[], bool]], None]:
    """A gate that says when a probe runs, and holds it until a stop request."""

    def gate(_size: int, should_stop: Callable[[], bool]) -> None:
        started.set()
        waiting = threading.Event()
        while not should_stop():
            waiting.wait(0.01)

    return gate


def new_work(identifier: str, kind: WorkKind = WorkKind.TUNING, **changes: Any) -> NewWork:
    """A piece of work to queue."""
    values: dict[str, Any] = {
        "id": identifier,
        "kind": kind,
        "device": "cpu",
        "model": "mlp",
        "effective_batch_size": 100,
        "fingerprint": "f" * 64,
        "payload": tuning_request().model_dump_json(),
    }
    return NewWork(**(values | changes))


def progress(update: int, updates: int = 10) -> TrainingProgress:
    """One optimizer update."""
    return TrainingProgress(
        update=update,
        updates=updates,
        loss=1.0 / update,
        terms={"loss": 1.0 / update},
        weights={"loss": 10.0},
        learning_rate=0.1,
        gradient_norm=1.0,
        skipped=False,
        samples=10,
        micro_batch_sizes=(4, 3, 3),
        samples_seen=10 * update,
        epoch=0,
        seconds=0.01,
        peak_bytes=1000,
    )


def evaluation(update: int) -> EvaluationReport:
    """An evaluation, of which each is better than the one before up to the fourth update."""
    return EvaluationReport(
        update=update,
        loss=0.5 + abs(update - 4) / 8,
        terms={},
        weights={"loss": 30.0},
        metrics={"accuracy": 0.75},
        samples=30,
        micro_batch_size=4,
        is_best=0 < update <= 4,
        seconds=0.02,
    )


class Trainer:
    """Trains in this process: resumes from the update it had reached, holds at ``hold_at`` until it is stopped.

    With ``evaluates``, every second update is followed by an evaluation, and the first one follows one too.
    """

    def __init__(
        self, hold_at: int | None = None, outcome: RunOutcome = RunOutcome.SUCCEEDED, *, evaluates: bool = False
    ) -> None:
        self.evaluates = evaluates
        self.hold_at = hold_at
        self.outcome = outcome
        self.reached = 0
        self.graces: list[float] = []
        self.holding = threading.Event()

    def __call__(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        """Make the run, or go on with it from the checkpoint before the last update."""
        plan = run.recommendation.plan
        assert plan is not None
        for update in range(max(1, self.reached), run.request.updates + 1):
            while (grace := grace_seconds()) is None and self.hold_at == update:
                self.holding.set()
                threading.Event().wait(0.005)
            if grace is not None:
                self.graces.append(grace)
                return TrainingResult(outcome=RunOutcome.STOPPED, message="asked to", updates=self.reached)
            self.reached = update
            of_update = [0] if update == 1 else [update] if update % 2 == 0 else []
            evaluations = tuple(evaluation(made) for made in of_update if self.evaluates)
            sizes = {"samples": plan.effective_batch_size, "micro_batch_sizes": plan.micro_batch_sizes[0]}
            made = progress(update, run.request.updates).model_copy(update={"evaluations": evaluations, **sizes})
            on_progress([made.model_copy(update={"samples_seen": update * made.samples})])
        return TrainingResult(outcome=self.outcome, message="ended", updates=self.reached)


TrainFunction = Callable[[TrainingRun, OnProgress, GraceSeconds], TrainingResult]
"""Makes a run in this process, reports its updates, and ends soon after a stop request."""


class InlineExecutor(Executor):
    """Run everything in this process: probes with ``runner``, which it owns, and training runs with ``train``."""

    def __init__(self, device: DeviceInfo, runner: WorkloadRunner, train: TrainFunction) -> None:
        super().__init__(device, runner)
        self._train = train

    @override
    def train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        return self._train(run, on_progress, grace_seconds)


def undisturbed(largest: int = 37, request: TuningRequest | None = None) -> list[ProbeResult]:
    """The probes of a tuning that nothing interrupts."""
    tuning = TuningSession(request or tuning_request(), CPU, environment={}, versions=SERVED.versions)
    runner = ScriptedRunner(largest)
    while (probe := tuning.next_probe()) is not None:
        tuning.record(runner.run(probe))
    return list(tuning.probes)
