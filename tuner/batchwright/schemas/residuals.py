"""Residuals of estimates, and the corrections that they give later estimates. Pure data, no torch."""

from typing import Annotated

from pydantic import Field

from batchwright.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt


class PeakResidual(Document):
    """The estimated and the measured peak of one micro-batch size."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    expected_bytes: int
    """Estimated ``ProbeResult.used_bytes``."""
    measured_bytes: PositiveInt
    """Measured ``ProbeResult.used_bytes``."""


class EstimateResidual(Document):
    """Differences between the estimate that seeded a tuning and the tuning's measurements."""

    hardware: str
    """Kind of device: product and memory."""
    family: str
    """Family of the workload: the parts of its spec that decide which kernels run, without its sizes."""
    versions: dict[str, str]
    """Versions of software that affects memory."""
    limit_bytes: PositiveInt
    """Peak at which memory was expected to run out: the limit without the margin, or on CUDA `usable_bytes` of the
    estimate for what the allocator could really reserve, so that an unexpected context is no part of the residual."""
    zero_expected_bytes: int
    """Estimate for a micro-batch of no samples, by extrapolation."""
    fit: PeakResidual
    """The largest size that fitted."""
    failed_size: PositiveInt
    """The smallest size above that ran out of memory."""
    failed_expected_bytes: int
    """Estimate for that size."""
    context_bytes: NonNegativeInt | None = None
    """CUDA: measured bytes of a process's context; None where not known."""


class EstimateCorrection(Document):
    """Correction of an estimate by the residuals of earlier tunings. It changes the order of probes, never the result.

    The corrected use of a size, in shares of the limit, is ``level + slope * (estimate - 1)``.
    """

    tunings: PositiveInt
    """Earlier tunings whose residuals were used."""
    weight: NonNegativeFloat
    """Number of tunings of the same family, versions and limit that tell as much."""
    level: float
    """Share of the limit in use where the estimate meets the limit: above 1 where less fits than estimated."""
    level_error: NonNegativeFloat
    """Standard error of `level`."""
    slope: float
    """Ratio of the growth of memory with the size to its estimate."""
    slope_error: NonNegativeFloat
    """Standard error of `slope`."""
    usable: float | None = None
    """Measured peak, as a share of the limit, above which sizes ran out of memory: below 1 where memory is fragmented,
    above 1 where a part of it is reclaimable. None where no earlier tuning shows this."""
    usable_error: NonNegativeFloat = 0.0
    """Standard error of `usable`."""
    whole_limit: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Probability that sizes ran out of memory at the limit itself, and not at `usable`."""
