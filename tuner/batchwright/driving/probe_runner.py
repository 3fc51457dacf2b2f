"""The interface of what runs the probes of a tuning on one device. No torch."""

from collections.abc import Callable
from typing import Protocol

from batchwright.schemas.recommendation import CouplingCheck, DataReading
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import ExpectedPeaks, ProbeResult
from batchwright.schemas.workload import WorkloadSpec


class ProbeRunner(Protocol):
    """A runner of probes."""

    def check(self, request: TuningRequest, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Check the spec without a probe, so that a wrong one is found at once.

        Raises:
            SpecError: naming the field at fault.
            ProbeCancelledError: when ``should_stop`` returned true.
        """

    def run(self, request: ProbeRequest, should_stop: Callable[[], bool] = lambda: False) -> ProbeResult:
        """Run one probe to its end.

        Raises:
            ProbeCancelledError: when ``should_stop`` returned true; the probe's process has ended by then.
            ProbeError: when the probing machinery failed.
        """

    def end_search(self) -> None:
        """End what is kept from one probe of a tuning to the next, such as an estimate in progress. Idempotent."""

    def environment(self) -> dict[str, str]:
        """The environment variables of the probes, with which the job must run too."""

    def close(self) -> None:
        """End every process. Idempotent."""


class WorkloadRunner(ProbeRunner, Protocol):
    """A runner that also examines a workload without a probe: its data, loss and memory. A command offers none."""

    def start(self, spec: WorkloadSpec, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Start the process that makes the following steps, with the modules that the spec needs.

        Raises:
            ProbeCancelledError: when ``should_stop`` returned true.
            ProbeError: when the probing machinery failed.
        """

    def read_data(
        self,
        spec: WorkloadSpec,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int, int], None] = lambda _read, _total: None,
    ) -> DataReading:
        """Read the data of a spec within about a minute, in a process of its own.

        Args:
            spec: the spec.
            should_stop: ends the reading.
            on_progress: receives how many samples, rows or bytes have been read, of how many.

        Raises:
            SpecError: naming the file, and the row where there is one.
            HubUnavailableError: when the hub, which has the tokenizer, does not answer.
            HostFailureError: when a disk fails.
            ProbeCancelledError: when ``should_stop`` returned true.
            ProbeError: when the probing machinery failed.
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
        """Estimate the peaks that probes will measure; None from a runner that makes no estimates.

        Raises:
            EstimateTimedOutError: when the estimate takes too long to wait for; ``late_estimate`` may have it later.
            EstimateError: when the workload cannot be estimated.
            ProbeCancelledError: when ``should_stop`` returned true.
            ProbeError: when the probing machinery failed.
        """

    def late_estimate(self) -> ExpectedPeaks | None:
        """The estimate that ``expect`` did not wait for, as soon as it is made; None before, and if it failed."""
