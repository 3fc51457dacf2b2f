"""The loop of a tuning: it runs the steps that the session names, and knows what each error means. No torch."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

from batchwright.driving.probe_runner import ProbeRunner, WorkloadRunner
from batchwright.errors import DeviceError, EstimateError, ProbeCancelledError, ProbeError, StorageError
from batchwright.planning.session import TuningSession
from batchwright.planning.steps import (
    CheckCoupling,
    EstimateWhatIf,
    ProcessStarted,
    ReadData,
    RunProbe,
    SearchEstimate,
    SeedSearch,
    StartProcess,
    Step,
    StepOutcome,
    WhatIfEstimate,
)
from batchwright.schemas.requests import ExpectationRequest, ProbeRequest
from batchwright.schemas.results import ExpectedPeaks, Outcome, ProbeResult

_UNEXPLAINED = {Outcome.ERROR, Outcome.LOST, Outcome.TIMED_OUT}
"""Outcomes of probes that a failure of the host or of its device may have caused."""


class TuningHooks:
    """What a caller of ``drive`` does at its steps: nothing by default."""

    def begins(self, step: Step) -> None:
        """Take note of a step that begins."""

    def data_read(self, read: int, total: int) -> None:
        """Take note of the progress of the reading of data: samples, rows or bytes, of how many."""

    def corrected(self, peaks: ExpectedPeaks) -> ExpectedPeaks:
        """Return the estimate that is to lead the search."""
        return peaks

    def run_probe(self, probe: ProbeRequest, run: Callable[[], ProbeResult]) -> ProbeResult:
        """Call ``run``, which runs the probe, and return its result."""
        del probe
        return run()

    def require_host(self, ended: str) -> None:
        """Raise if a failure of the host or of its device explains the end of a step.

        Args:
            ended: the end of the step, as a sentence without its full stop.
        """

    def recorded(self, result: ProbeResult) -> None:
        """Take note of a probe that has ended, and that the session has recorded."""


def drive(
    tuning: TuningSession,
    runner: ProbeRunner,
    hooks: TuningHooks | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run a tuning from its recorded probes to its end, after which it has its recommendation.

    Nothing that the runner keeps between probes outlives this call.

    Args:
        tuning: the session, with the probes that were recorded before.
        runner: runs the probes; a ``WorkloadRunner`` for a workload that is described.
        hooks: what the caller does at the steps.
        should_stop: whether to end now.

    Raises:
        SpecError: naming the field, or the file and the row, at fault, before any probe.
        HubUnavailableError, HostFailureError: as ``WorkloadRunner.read_data``.
        TuningFailedError: when the loss couples samples, the request does not allow this, and no exact plan exists.
        DeviceError: when the device failed in the coupling check.
        ProbeCancelledError: when ``should_stop`` returned true.
        ProbeError: when the probing machinery failed.
        StorageError: when the disk for temporary files is full.
    """
    hooks = hooks or TuningHooks()
    workloads = cast("WorkloadRunner", runner)  # the session of a command names no step that needs one
    expectation = tuning.expectation_request() if tuning.begins_search else None
    try:
        if expectation is not None:
            workloads.begin_estimate(expectation)  # it is made during the steps before the search
        while (step := tuning.next_step()) is not None:
            hooks.begins(step)
            began = time.monotonic()
            outcome = _run(step, workloads, hooks, should_stop)
            tuning.record(outcome)
            if isinstance(outcome, ProbeResult):
                hooks.recorded(outcome)
            if not isinstance(step, RunProbe):
                tuning.add_seconds(step, time.monotonic() - began)
            # The search goes on with an estimate that took too long once that is made.
            if tuning.lacks_estimate and (late := workloads.late_estimate()) is not None:
                tuning.record(SearchEstimate(hooks.corrected(late)))
    finally:
        runner.end_search()


def _run(step: Step, runner: WorkloadRunner, hooks: TuningHooks, should_stop: Callable[[], bool]) -> StepOutcome:
    """Run a step. A failure of the host that may have caused its end is raised instead of its outcome."""
    match step:
        case StartProcess(spec):
            runner.start(spec, should_stop)
            return ProcessStarted()
        case ReadData(spec):
            return runner.read_data(spec, should_stop, hooks.data_read)
        case CheckCoupling(coupling):
            try:
                return runner.check_coupling(coupling, should_stop)
            except DeviceError as error:
                hooks.require_host(f"The check for coupled samples ended with: {error}")
                raise
        case SeedSearch():
            found = _estimate(step, runner, should_stop)
            return found if found.peaks is None else SearchEstimate(hooks.corrected(found.peaks))
        case RunProbe(probe):
            if should_stop():
                raise ProbeCancelledError("the tuning was stopped")
            result = hooks.run_probe(probe, partial(runner.run, probe, should_stop))
            if result.outcome in _UNEXPLAINED:
                hooks.require_host(f"The probe of {result.micro_batch_size} ended with: {result.message}")
            return result
        case EstimateWhatIf(changed):
            return WhatIfEstimate(_what_if(changed, runner, should_stop))


def _what_if(
    changed: ExpectationRequest, runner: WorkloadRunner, should_stop: Callable[[], bool]
) -> ExpectedPeaks | None:
    """Estimate a changed spec; None if that fails, since the search has ended and its result is worth more."""
    with suppress(EstimateError, ProbeError, StorageError):
        return runner.expect(changed, should_stop)
    return None


def _estimate(step: SeedSearch, runner: WorkloadRunner, should_stop: Callable[[], bool]) -> SearchEstimate:
    """Make the estimate that is to lead a search. Without one the request is checked, which builds its workload too."""
    missing = None
    if step.estimate is not None:
        try:
            if (peaks := runner.expect(step.estimate, should_stop)) is not None:
                return SearchEstimate(peaks)
        except EstimateError as error:
            missing = str(error)
    runner.check(step.request, should_stop)
    return SearchEstimate(None, missing)
