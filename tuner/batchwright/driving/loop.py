"""The loop of a tuning: the order of its steps, and what each of its errors means. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from batchwright.driving.probe_runner import ProbeRunner, WorkloadRunner
from batchwright.errors import DeviceError, EstimateError, ProbeCancelledError, ProbeError, StorageError
from batchwright.planning.session import Tuning
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import ExpectedPeaks, Outcome, ProbeResult

_UNEXPLAINED = {Outcome.ERROR, Outcome.LOST, Outcome.TIMED_OUT}
"""Outcomes of probes that a failure of the host or of its device may have caused."""


class Step(Enum):
    """A step of a tuning that is no probe."""

    COUPLING_CHECK = auto()
    ESTIMATE = auto()
    WHAT_IFS = auto()


class TuningHooks:
    """What a caller of ``drive`` does at its steps: nothing by default."""

    def begins(self, step: Step | ProbeRequest) -> None:
        """Take note of a step that begins: the request of a probe, or another step."""

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
    tuning: Tuning,
    runner: ProbeRunner,
    hooks: TuningHooks | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run a tuning from its recorded probes to its end, after which it has its recommendation.

    The coupling check is repeated after a restart. The check of the spec and the estimate are not: they come before the
    first probe. Nothing that the runner keeps between probes outlives this call.

    Args:
        tuning: the session, with the probes that were recorded before.
        runner: runs the probes; a ``WorkloadRunner`` for a workload that is described.
        hooks: what the caller does at the steps.
        should_stop: whether to end now.

    Raises:
        SpecError: naming the field at fault, before any probe.
        TuningFailedError: when the loss couples samples, the request does not allow this, and no exact plan exists.
        DeviceError: when the device failed in the coupling check.
        ProbeCancelledError: when ``should_stop`` returned true.
        ProbeError: when the probing machinery failed.
        StorageError: when the disk for temporary files is full.
    """
    workloads = runner if isinstance(runner, WorkloadRunner) else None
    run = _Drive(tuning, runner, workloads, hooks or TuningHooks(), should_stop)
    is_new = not tuning.probes
    try:
        if is_new:
            run.begin_estimate()
        run.check_coupling()
        if is_new:
            run.seed_search()
        run.run_probes()
        runner.end_search()
        run.estimate_what_ifs()
    finally:
        runner.end_search()


@dataclass(frozen=True)
class _Drive:
    """The steps of ``drive``, whose arguments are its fields."""

    tuning: Tuning
    runner: ProbeRunner
    workloads: WorkloadRunner | None
    """The runner, if it examines workloads."""
    hooks: TuningHooks
    should_stop: Callable[[], bool]

    def begin_estimate(self) -> None:
        """Begin the estimate that seeds the search, so that it is made while the coupling check runs."""
        request = self.tuning.expectation_request()
        if request is not None and self.workloads is not None:
            self.workloads.begin_estimate(request)

    def check_coupling(self) -> None:
        """Check whether the loss couples samples."""
        request = self.tuning.coupling_request()
        if request is None or self.workloads is None:
            return
        self.hooks.begins(Step.COUPLING_CHECK)
        try:
            check = self.workloads.check_coupling(request, self.should_stop)
        except DeviceError as error:
            self.hooks.require_host(f"The check for coupled samples ended with: {error}")
            raise
        self.tuning.record_coupling(check)

    def seed_search(self) -> None:
        """Seed the search with an estimate, or else check the spec.

        A successful estimate has built the workload, so the spec needs no further check. The reason of a missing
        estimate becomes a warning of the recommendation.
        """
        self.hooks.begins(Step.ESTIMATE)
        request, peaks = self.tuning.expectation_request(), None
        if request is not None and self.workloads is not None:
            try:
                peaks = self.workloads.expect(request, self.should_stop)
            except EstimateError as error:
                self.tuning.record_missing_estimate(str(error))
        if peaks is None:
            self.runner.check(self.tuning.request, self.should_stop)
        else:
            self.tuning.start_from_estimate(self.hooks.corrected(peaks))

    def run_probes(self) -> None:
        """Run the probes. The search goes on with an estimate that took too long once that is made."""
        while True:
            late = self.workloads.late_estimate() if self.workloads is not None and self.tuning.lacks_estimate else None
            if late is not None:
                self.tuning.start_from_estimate(self.hooks.corrected(late))
            probe = self.tuning.next_probe()
            if probe is None:
                return
            if self.should_stop():
                raise ProbeCancelledError("the tuning was stopped")
            self.hooks.begins(probe)
            result = self.hooks.run_probe(probe, partial(self.runner.run, probe, self.should_stop))
            if result.outcome in _UNEXPLAINED:
                self.hooks.require_host(f"The probe of {result.micro_batch_size} ended with: {result.message}")
            self.tuning.record(result)
            self.hooks.recorded(result)

    def estimate_what_ifs(self) -> None:
        """Estimate the what-ifs. A change that cannot be estimated becomes a warning."""
        self.hooks.begins(Step.WHAT_IFS)
        while self.workloads is not None and (request := self.tuning.next_what_if()) is not None:
            try:
                peaks = self.workloads.expect(request, self.should_stop)
            except (EstimateError, ProbeError, StorageError):  # the search has ended: its result is worth more
                peaks = None
            self.tuning.record_what_if(peaks)
