"""The loop of a tuning: the order of its steps, and what each of its errors means. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial

from batchwright.driving.probe_runner import ProbeRunner, WorkloadRunner
from batchwright.errors import DeviceError, EstimateError, ProbeCancelledError, ProbeError, StorageError
from batchwright.planning.session import TuningSession
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import ExpectedPeaks, Outcome, ProbeResult

_UNEXPLAINED = {Outcome.ERROR, Outcome.LOST, Outcome.TIMED_OUT}
"""Outcomes of probes that a failure of the host or of its device may have caused."""


class Step(StrEnum):
    """A step of a tuning that is no probe, by its name in ``batchwright.schemas.recommendation.Timings``."""

    DATA = "data"
    COUPLING_CHECK = "coupling_check"
    ESTIMATE = "estimate"
    WHAT_IFS = "what_if"


class TuningHooks:
    """What a caller of ``drive`` does at its steps: nothing by default."""

    def begins(self, step: Step | ProbeRequest) -> None:
        """Take note of a step that begins: the request of a probe, or another step."""

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

    The data is read and the coupling checked again after a restart. The check of the spec and the estimate are not
    repeated: they come before the first probe. Nothing that the runner keeps between probes outlives this call.

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
    workloads = runner if isinstance(runner, WorkloadRunner) else None
    is_new = not tuning.probes
    try:
        expectation = tuning.expectation_request() if is_new else None
        if expectation is not None and workloads is not None:
            workloads.begin_estimate(expectation)  # it is made while the data is read and the coupling checked
        spec = tuning.spec_with_data()
        if spec is not None and workloads is not None:
            with _step(tuning, hooks, Step.DATA):
                tuning.data = workloads.read_data(spec, should_stop, hooks.data_read)
        _check_coupling(tuning, workloads, hooks, should_stop)
        if is_new:
            with _step(tuning, hooks, Step.ESTIMATE):
                if not _seed_search(tuning, workloads, hooks, should_stop):
                    runner.check(tuning.request, should_stop)
        while (probe := _next_probe(tuning, workloads, hooks)) is not None:
            if should_stop():
                raise ProbeCancelledError("the tuning was stopped")
            hooks.begins(probe)
            result = hooks.run_probe(probe, partial(runner.run, probe, should_stop))
            if result.outcome in _UNEXPLAINED:
                hooks.require_host(f"The probe of {result.micro_batch_size} ended with: {result.message}")
            tuning.record(result)
            hooks.recorded(result)
        runner.end_search()
        with _step(tuning, hooks, Step.WHAT_IFS):
            _estimate_what_ifs(tuning, workloads, should_stop)
    finally:
        runner.end_search()


@contextmanager
def _step(tuning: TuningSession, hooks: TuningHooks, step: Step) -> Iterator[None]:
    """Announce a step, and add its time to that of the tuning's earlier ones of its kind."""
    hooks.begins(step)
    began = time.monotonic()
    try:
        yield
    finally:
        tuning.step_seconds[step] = tuning.step_seconds.get(step, 0.0) + time.monotonic() - began


def _check_coupling(
    tuning: TuningSession, workloads: WorkloadRunner | None, hooks: TuningHooks, should_stop: Callable[[], bool]
) -> None:
    """Check whether the loss couples samples."""
    request = tuning.coupling_request()
    if request is None or workloads is None:
        return
    with _step(tuning, hooks, Step.COUPLING_CHECK):
        try:
            check = workloads.check_coupling(request, should_stop)
        except DeviceError as error:
            hooks.require_host(f"The check for coupled samples ended with: {error}")
            raise
    tuning.record_coupling(check)


def _seed_search(
    tuning: TuningSession, workloads: WorkloadRunner | None, hooks: TuningHooks, should_stop: Callable[[], bool]
) -> bool:
    """Seed the search with an estimate, and return whether there is one: it has built the workload.

    The reason of a missing estimate becomes a warning of the recommendation.
    """
    request, peaks = tuning.expectation_request(), None
    if request is not None and workloads is not None:
        try:
            peaks = workloads.expect(request, should_stop)
        except EstimateError as error:
            tuning.record_missing_estimate(str(error))
    if peaks is not None:
        tuning.start_from_estimate(hooks.corrected(peaks))
    return peaks is not None


def _next_probe(tuning: TuningSession, workloads: WorkloadRunner | None, hooks: TuningHooks) -> ProbeRequest | None:
    """The next probe. The search goes on with an estimate that took too long once that is made."""
    late = workloads.late_estimate() if workloads is not None and tuning.lacks_estimate else None
    if late is not None:
        tuning.start_from_estimate(hooks.corrected(late))
    return tuning.next_probe()


def _estimate_what_ifs(
    tuning: TuningSession, workloads: WorkloadRunner | None, should_stop: Callable[[], bool]
) -> None:
    """Estimate the what-ifs. A change that cannot be estimated becomes a warning."""
    while workloads is not None and (request := tuning.next_what_if()) is not None:
        try:
            peaks = workloads.expect(request, should_stop)
        except (EstimateError, ProbeError, StorageError):  # the search has ended: its result is worth more
            peaks = None
        tuning.record_what_if(peaks)
