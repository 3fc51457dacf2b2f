"""The loop of every tuning: the order of its steps, what it repeats after a restart, and whom it blames."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from typing_extensions import override

from batchwright.driving import foreground
from batchwright.driving.loop import TuningHooks, drive
from batchwright.errors import DeviceError, EstimateError, HostFailureError, ProbeCancelledError, SpecError
from batchwright.planning.accumulation import probe_window
from batchwright.planning.session import TuningSession
from batchwright.planning.steps import CheckCoupling, EstimateWhatIf, ReadData, RunProbe, SeedSearch, StartProcess, Step
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.dataset.data_spec import TextData
from batchwright.schemas.recommendation import DataReading
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import ExpectedPeak, ExpectedPeaks, Outcome, ProbeResult
from batchwright.schemas.unfinished import UnfinishedTuning
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.host_failures import Cause
from tests.support.factories import CPU, gpt_spec, probe_result, tuning_request
from tests.support.oracles import OracleRunner

CURVE = ExpectedPeaks(points=tuple(ExpectedPeak(micro_batch_size=size, used_bytes=size) for size in (1, 99)))


def new_tuning(**changes: Any) -> TuningSession:
    """A tuning of 100 samples on the CPU."""
    return TuningSession(tuning_request(gpt_spec(), **changes), CPU, environment={}, versions={})


def run(probe: ProbeRequest) -> ProbeResult:
    """Fit 37 samples."""
    outcome = Outcome.FIT if probe.micro_batch_size <= 37 else Outcome.OOM
    return probe_result(
        probe.micro_batch_size, outcome, None, accumulates=probe.accumulates, micro_batch_sizes=probe_window(probe)
    )


class Notes(TuningHooks):
    """Hooks that write down their calls."""

    def __init__(self, failure: str = "") -> None:
        self.begun: list[Step] = []
        self.ended: list[str] = []
        self.results: list[ProbeResult] = []
        self.read: list[tuple[int, int]] = []
        self.failure = failure

    @override
    def begins(self, step: Step) -> None:
        self.begun.append(step)

    @override
    def data_read(self, read: int, total: int) -> None:
        self.read.append((read, total))

    @override
    def corrected(self, peaks: ExpectedPeaks) -> ExpectedPeaks:
        return peaks.model_copy(update={"resident_bytes": 7})

    @override
    def run_probe(self, probe: ProbeRequest, run: Callable[[], ProbeResult]) -> ProbeResult:
        return run().model_copy(update={"message": f"noted {probe.micro_batch_size}"})

    @override
    def require_host(self, ended: str) -> None:
        self.ended.append(ended)
        if self.failure:
            raise HostFailureError(Cause.DEVICE, self.failure)

    @override
    def recorded(self, result: ProbeResult) -> None:
        self.results.append(result)


def test_the_steps_have_one_order() -> None:
    """The estimate is begun before the coupling check, so that both are made at once; what-ifs come last."""
    runner, notes, tuning = OracleRunner(run, lambda _: CURVE), Notes(), new_tuning(what_if=True)
    drive(tuning, runner, notes)
    steps = [call for call, before in zip(runner.calls, [None, *runner.calls], strict=False) if call != before]
    assert steps == ["begin_estimate", "start", "check_coupling", "expect", "run", "expect", "end_search"]
    kinds = [type(step) for step in notes.begun]
    probes = len(notes.results)
    assert kinds[: 3 + probes] == [StartProcess, CheckCoupling, SeedSearch, *[RunProbe] * probes]
    assert set(kinds[3 + probes :]) == {EstimateWhatIf}
    assert [step.request.micro_batch_size for step in notes.begun if isinstance(step, RunProbe)] == [
        result.micro_batch_size for result in notes.results
    ]
    assert tuple(notes.results) == tuning.probes
    assert all(result.message == f"noted {result.micro_batch_size}" for result in notes.results)
    assert tuning.expected == CURVE.model_copy(update={"resident_bytes": 7})


def test_data_in_files_is_read_before_anything_runs() -> None:
    """Again after a restart, since it may have changed; the recommendation says how much was read."""
    spec = gpt_spec().model_copy(update={"data": TextData(kind="text", paths=("a.txt",))})
    tuning = TuningSession(tuning_request(spec), CPU, environment={}, versions={})
    tuning.record(probe_result(1, Outcome.FIT, None))
    runner, notes = OracleRunner(run, lambda _: CURVE), Notes()
    drive(tuning, runner, notes)
    assert runner.calls[:4] == ["start", "read_data", "check_coupling", "run"]
    assert isinstance(notes.begun[1], ReadData)
    assert notes.read == [(1, 2)]
    found = tuning.recommendation(identifier="rec_1", created_at=datetime.now(UTC), total_seconds=1.0)
    assert found.evidence.data == DataReading(read=1, total=2, seconds=0.0)


def test_the_steps_have_their_time_in_the_result() -> None:
    """The wait for the estimate is that of this one step; steps that did not run took none."""

    def slow(_: ExpectationRequest) -> ExpectedPeaks:
        time.sleep(0.05)
        return CURVE

    class SlowStart(OracleRunner):
        """Its process takes time to start."""

        @override
        def start(self, spec: WorkloadSpec, should_stop: Callable[[], bool] = lambda: False) -> None:
            time.sleep(0.05)

    tuning = new_tuning()
    drive(tuning, SlowStart(run, slow))
    times = tuning.recommendation(identifier="rec_1", created_at=datetime.now(UTC), total_seconds=9.0).timings
    assert min(times.start_seconds, times.estimate_seconds) >= 0.05
    assert times.coupling_check_seconds < 0.05
    assert times.data_seconds == 0.0


def test_a_quick_tuning_has_the_plan_of_its_estimate_run() -> None:
    """The only probe runs the whole share, since the curve is far below the limit."""
    runner, tuning = OracleRunner(run, lambda _: CURVE), new_tuning(effective_batch_size=30, quick=True)
    drive(tuning, runner)
    (probe,) = tuning.probes
    assert (probe.outcome, probe.micro_batch_sizes) == (Outcome.FIT, (30,))


def test_a_restart_repeats_the_check_of_the_loss_alone() -> None:
    """Probes are recorded; the estimate only orders them; the check of the loss decides which plans are exact."""
    runner, tuning = OracleRunner(run, lambda _: CURVE), new_tuning()
    tuning.record(probe_result(1, Outcome.FIT, None))
    drive(tuning, runner)
    assert runner.calls[:3] == ["start", "check_coupling", "run"]
    assert not {"begin_estimate", "expect", "check"} & set(runner.calls)
    assert tuning.proof_of_search().fits == 37


@pytest.mark.parametrize(("outcome", "estimates"), [(Outcome.OOM, 1), (Outcome.FIT, 0)])
def test_a_restarted_quick_tuning_has_its_estimate_made_again(outcome: Outcome, estimates: int) -> None:
    """Unless its plan has run already: the estimate says which plan to run next."""
    runner, tuning = OracleRunner(run, lambda _: CURVE), new_tuning(quick=True)
    tuning.record(probe_result(34, outcome, None, micro_batch_sizes=(34, 33, 33)))
    drive(tuning, runner)
    assert [runner.calls.count(call) for call in ("begin_estimate", "expect")] == [estimates, estimates]
    assert tuning.proof_of_search().stopped_by == "quick"


def test_a_missing_estimate_has_the_spec_checked() -> None:
    """An estimate has built the workload already."""

    def fail(_: ExpectationRequest) -> ExpectedPeaks:
        raise EstimateError("no trace")

    runner = OracleRunner(run, fail)
    drive(new_tuning(), runner)
    assert runner.calls[:6] == ["begin_estimate", "start", "check_coupling", "expect", "check", "run"]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_an_unexplained_end_of_a_probe_is_a_question_to_the_host(outcome: Outcome) -> None:
    """Before the probe counts: a device that is gone makes every size fail."""

    def end(probe: ProbeRequest) -> ProbeResult:
        return probe_result(probe.micro_batch_size, outcome, None, micro_batch_sizes=probe_window(probe))

    tuning, notes = new_tuning(), Notes("the card is gone")
    if outcome in {Outcome.FIT, Outcome.OOM, Outcome.INVALID_SIZE}:
        drive(tuning, OracleRunner(end), notes)
        assert not notes.ended
        return
    with pytest.raises(HostFailureError, match="the card is gone"):
        drive(tuning, OracleRunner(end), notes)
    assert len(notes.ended) == 1
    assert notes.ended[0].startswith("The probe of ")
    assert not tuning.probes


class BrokenDevice(OracleRunner):
    """Its device fails in the check of the loss."""

    @override
    def check_coupling(self, request: CouplingRequest, should_stop: Callable[[], bool] = lambda: False) -> Any:
        raise DeviceError("an ECC error")


def test_a_device_error_in_the_check_of_the_loss_is_a_question_to_the_host() -> None:
    """Where the host knows nothing, the error stays what it is; the search's remains are ended."""
    notes, runner = Notes(), BrokenDevice(run)
    with pytest.raises(DeviceError, match="an ECC error"):
        drive(new_tuning(), runner, notes)
    assert notes.ended == ["The check for coupled samples ended with: an ECC error"]
    assert runner.calls[-1] == "end_search"
    with pytest.raises(HostFailureError, match="the card is gone"):
        drive(new_tuning(), BrokenDevice(run), Notes("the card is gone"))


def test_a_stop_request_ends_the_loop_between_two_probes() -> None:
    """What was recorded stays, and no estimate goes on."""
    tuning, runner = new_tuning(), OracleRunner(run)
    with pytest.raises(ProbeCancelledError):
        drive(tuning, runner, None, lambda: len(tuning.probes) >= 2)
    assert len(tuning.probes) == 2
    assert runner.calls[-1] == "end_search"


def test_a_command_is_only_checked_and_probed() -> None:
    """Its runner has neither a loss to compare nor a model to trace."""
    model = {"kind": "command", "argv": ["python", "train.py", "{micro_batch_size}"]}
    spec = CommandSpec.model_validate({"model": model})
    request = TuningRequest(spec=spec, effective_batch_size=100, device="cpu")
    runner, tuning = OracleRunner(run), TuningSession(request, CPU, environment={}, versions={})
    with pytest.raises(ProbeCancelledError):
        drive(tuning, runner, None, lambda: len(tuning.probes) >= 2)
    assert set(runner.calls) == {"check", "run", "end_search"}


def test_a_wrong_spec_runs_no_probe() -> None:
    """And leaves nothing behind."""

    class Wrong(OracleRunner):
        """Finds a fault in every spec."""

        @override
        def check(self, request: object, should_stop: Callable[[], bool] = lambda: False) -> None:
            raise SpecError([], "spec")

    runner = Wrong(run)
    with pytest.raises(SpecError):
        drive(new_tuning(), runner)
    assert "run" not in runner.calls
    assert runner.calls[-1] == "end_search"


def test_a_tuning_that_an_estimate_leads_goes_on_from_any_probe() -> None:
    """The same probes in the same order, and the same proof, wherever it was stopped."""

    def finished(tuning: TuningSession, most: int = 100) -> TuningSession:
        while len(tuning.probes) < most and (probe := tuning.next_probe()) is not None:
            tuning.record(run(probe))
        return tuning

    def begun() -> TuningSession:
        tuning = new_tuning()
        tuning.start_from_estimate(CURVE)
        return tuning

    whole = finished(begun())
    assert len(whole.probes) > 2
    for made in range(len(whole.probes)):
        stopped = foreground._unfinished(finished(begun(), made), KeyboardInterrupt(), 1.0)
        resumed = new_tuning()
        foreground._resume(resumed, UnfinishedTuning.model_validate_json(stopped.model_dump_json()))
        assert resumed.probes == whole.probes[:made]
        assert finished(resumed).probes == whole.probes
        assert resumed.proof_of_search() == whole.proof_of_search()
