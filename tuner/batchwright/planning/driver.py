"""Drive a tuning: the interface of what runs its probes, and the steps before and after them.

The driver (``batchwright.foreground``, ``batchwright_service.worker.runner``, a test) keeps this order::

    begin_estimate(tuning, runner.begin_estimate)
    check_coupling(tuning, runner.check_coupling)
    prepare_search(tuning, runner.check, runner.expect)
    for probe in remaining_probes(tuning, runner.late_estimate):
        tuning.record(runner.run(probe))
    runner.end_search()
    estimate_what_ifs(tuning, runner.expect)
    recommendation = tuning.recommendation(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from batchwright.errors import EstimateError, ProbeError, StorageError
from batchwright.planning.session import Tuning
from batchwright.schemas.recommendation import CouplingCheck
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import ExpectedPeaks, ProbeResult


class ProbeRunner(Protocol):
    """A runner of probes on one device."""

    def check(self, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Build the workload without memory for its tensors, so that a wrong spec is found before any probe.

        Raises:
            SpecError: naming the field at fault.
            ProbeCancelledError: when ``should_stop`` returned true.
        """

    def check_coupling(
        self, request: CouplingRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> CouplingCheck:
        """Compare the loss of a batch with that of its parts, in a process of its own.

        Raises:
            DeviceError: when the device failed.
            ProbeCancelledError: when ``should_stop`` returned true.
            ProbeError: when the probing machinery failed.
        """

    def begin_estimate(self, request: ExpectationRequest) -> None:
        """Begin the estimate that ``expect`` will be asked for, where it can be made beside other tasks.

        ``end_search`` ends it.
        """

    def expect(
        self, request: ExpectationRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> ExpectedPeaks | None:
        """Estimate the peaks that probes will measure; none from a runner that makes no estimates.

        Raises:
            EstimateTimedOutError: when the estimate takes too long to wait for; ``late_estimate`` may have it later.
            EstimateError: when the workload cannot be estimated.
            ProbeCancelledError: when ``should_stop`` returned true.
            ProbeError: when the probing machinery failed.
        """

    def late_estimate(self) -> ExpectedPeaks | None:
        """The estimate that ``expect`` did not wait for, as soon as it is made; none before, and if it failed."""

    def end_search(self) -> None:
        """End what is kept from one probe of a tuning to the next, such as an estimate in progress. Idempotent."""

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Run one probe to its end.

        Raises:
            ProbeCancelledError: when ``should_stop`` returned true; the probe's process has ended by then.
            ProbeError: when the probing machinery failed.
        """

    def environment(self) -> dict[str, str]:
        """The environment variables of the probes, with which the job must run too."""

    def close(self) -> None:
        """End every process. Idempotent."""


def begin_estimate(tuning: Tuning, begin: Callable[[ExpectationRequest], None]) -> None:
    """Begin the estimate that seeds the search, so that it is made while the coupling check runs."""
    request = tuning.expectation_request()
    if request is not None:
        begin(request)


def check_coupling(tuning: Tuning, check: Callable[[CouplingRequest], CouplingCheck]) -> None:
    """Check whether the loss couples samples, before the first probe and again after a restart.

    Raises:
        TuningFailedError: when the loss couples samples, the request does not allow this, and no exact plan exists.
        DeviceError: when the device failed.
    """
    request = tuning.coupling_request()
    if request is not None:
        tuning.record_coupling(check(request))


def prepare_search(
    tuning: Tuning,
    check: Callable[[TuningRequest], None],
    expect: Callable[[ExpectationRequest], ExpectedPeaks | None],
) -> None:
    """Seed the search with an estimate before the first probe, or else check the spec.

    A successful estimate has built the workload, so the spec needs no further check. The reason of a missing estimate
    becomes a warning of the recommendation.

    Raises:
        SpecError: naming the field at fault.
    """
    request, peaks = tuning.expectation_request(), None
    if request is not None:
        try:
            peaks = expect(request)
        except EstimateError as error:
            tuning.record_missing_estimate(str(error))
    if peaks is None:
        check(tuning.request)
    else:
        tuning.start_from_estimate(peaks)


def remaining_probes(tuning: Tuning, late_estimate: Callable[[], ExpectedPeaks | None]) -> Iterator[ProbeRequest]:
    """The probes of a tuning, in order. The search goes on with an estimate that took too long once that is made.

    The result of each probe must be recorded before the next one is taken.
    """
    while True:
        if tuning.lacks_estimate and (peaks := late_estimate()) is not None:
            tuning.start_from_estimate(peaks)
        probe = tuning.next_probe()
        if probe is None:
            return
        yield probe


def estimate_what_ifs(tuning: Tuning, expect: Callable[[ExpectationRequest], ExpectedPeaks | None]) -> None:
    """Estimate the what-ifs of a tuning. A change that cannot be estimated becomes a warning.

    Raises:
        ProbeCancelledError: as ``expect``.
    """
    while (request := tuning.next_what_if()) is not None:
        try:
            peaks = expect(request)
        except (EstimateError, ProbeError, StorageError):  # the search has ended: its result is worth more
            peaks = None
        tuning.record_what_if(peaks)
