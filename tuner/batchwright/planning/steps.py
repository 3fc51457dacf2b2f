"""The steps of a tuning, which its session names in their order, and their outcomes. Pure, no torch."""

from dataclasses import dataclass
from typing import ClassVar

from batchwright.schemas.recommendation import CouplingCheck, DataReading
from batchwright.schemas.requests import CouplingRequest, ExpectationRequest, ProbeRequest, TuningRequest
from batchwright.schemas.results import ExpectedPeaks, ProbeResult
from batchwright.schemas.workload import WorkloadSpec


@dataclass(frozen=True)
class StartProcess:
    """Start the process that makes the other steps, with what a spec imports. Its outcome is a ``ProcessStarted``."""

    timing: ClassVar[str] = "start"
    """Name of its time in ``batchwright.schemas.recommendation.Timings``, as in the steps below."""
    spec: WorkloadSpec


@dataclass(frozen=True)
class ReadData:
    """Read the data that a spec names in files. Its outcome is a ``DataReading``."""

    timing: ClassVar[str] = "data"
    spec: WorkloadSpec


@dataclass(frozen=True)
class CheckCoupling:
    """Check whether the loss couples samples. Its outcome is a ``CouplingCheck``."""

    timing: ClassVar[str] = "coupling_check"
    request: CouplingRequest


@dataclass(frozen=True)
class SeedSearch:
    """Check the request, with the estimate that is to lead the search. Its outcome is a ``SearchEstimate``."""

    timing: ClassVar[str] = "estimate"
    request: TuningRequest
    estimate: ExpectationRequest | None
    """None where the first probe is known without an estimate."""


@dataclass(frozen=True)
class RunProbe:
    """Run a probe. Its outcome is a ``ProbeResult``."""

    request: ProbeRequest


@dataclass(frozen=True)
class EstimateWhatIf:
    """Estimate a changed spec. Its outcome is a ``WhatIfEstimate``."""

    timing: ClassVar[str] = "what_if"
    request: ExpectationRequest


TimedStep = StartProcess | ReadData | CheckCoupling | SeedSearch | EstimateWhatIf
Step = TimedStep | RunProbe


@dataclass(frozen=True)
class ProcessStarted:
    """The process has started."""


@dataclass(frozen=True)
class SearchEstimate:
    """The estimate that is to lead a search, or the rest of it.

    Attributes:
        peaks: the estimate; None where there is none.
        missing: reason of its absence, for a warning; None where none was requested.
    """

    peaks: ExpectedPeaks | None
    missing: str | None = None


@dataclass(frozen=True)
class WhatIfEstimate:
    """The estimate of a changed spec; None where it cannot be estimated."""

    peaks: ExpectedPeaks | None


StepOutcome = ProcessStarted | DataReading | CouplingCheck | SearchEstimate | ProbeResult | WhatIfEstimate
