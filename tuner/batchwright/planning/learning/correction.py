"""The correction of an estimate by the residuals of earlier tunings on the same kind of device. Pure, no torch.

A tuning that ended with an out-of-memory error shows at which estimate memory runs out, whatever the reason: the
estimate, fragmentation, reclaimable memory, a biased measurement. The difference to the limit is a sum of three parts:
a share of the limit, a number of bytes, and a share of the room for memory that grows with the size. Their
coefficients are those of a Bayesian linear regression over the residuals (a normal distribution of the coefficients, an
inverse-gamma one of the variance: Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3 and exercise
3.12). Its predictive distribution for the new limit is the corrected level. A residual has a weight: less for other
versions, another family or another limit, and for a large step between the size that fits and the size that fails.

A correction needs evidence. The product of the predictive densities of all residuals, each by the regression on those
before it, must be at least their product by the usual errors of estimates (a Bayes factor of at least 1). Where replays
in the simulated allocator have been right, this explanation competes with the regression: it corrects nothing, but its
interval is as narrow as a sample, so that the search begins with the replays' answer and the size above it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchwright.planning.learning.workload_family import family_of, family_weight
from batchwright.planning.parameters import PARAMETERS, EstimateErrors
from batchwright.planning.session import TuningSession
from batchwright.schemas.residuals import EstimateCorrection, EstimateResidual
from batchwright.schemas.results import ExpectedPeaks

_USABLE_SPREAD = 0.005
"""Spread, between tunings, of the measured peak at which memory runs out, as a share of the limit. A choice."""
_PEAK_NOISE = 0.001
"""Noise of a measured peak, as a share of the limit, beyond which the limit does not explain it. A choice."""
_CONTRADICTED = 0.02
"""Probability of a peak that the limit does not explain, if memory is not fragmented. A choice."""


@dataclass(frozen=True)
class EstimateConditions:
    """The conditions of a new estimate, with which residuals are compared.

    Attributes:
        family: as from ``workload_family.family_of``.
        versions: versions of software that affects memory.
        limit_bytes: memory that a probe may take.
        elastic: whether a part of the measured memory is reclaimable where memory is short.
    """

    family: str
    versions: dict[str, str]
    limit_bytes: int
    elastic: bool


def conditions_of(tuning: TuningSession) -> EstimateConditions:
    """The conditions of a tuning's estimate."""
    return EstimateConditions(
        family=family_of(tuning.request.workload),
        versions=tuning.conditions.versions,
        limit_bytes=tuning.conditions.probe_limit_bytes,
        elastic=tuning.conditions.device.traits.counts_host_memory,
    )


def corrected(
    peaks: ExpectedPeaks, residuals: Sequence[EstimateResidual], conditions: EstimateConditions
) -> ExpectedPeaks:
    """The estimate with the correction that the residuals give; unchanged where they are of no use."""
    conditions = replace(conditions, limit_bytes=peaks.usable_bytes or conditions.limit_bytes)
    useful = [
        (residual, weight)
        for residual in residuals
        if (weight := _similarity(residual, conditions)) >= PARAMETERS.least_residual_weight
    ]
    if not useful:
        return peaks
    correction = _correction(useful, peaks, conditions)
    return peaks if correction is None else peaks.model_copy(update={"correction": correction})


def _correction(
    residuals: Sequence[tuple[EstimateResidual, float]], peaks: ExpectedPeaks, conditions: EstimateConditions
) -> EstimateCorrection | None:
    """The correction; none where the usual errors of estimates explain the residuals better than a common cause."""
    replayed = peaks.usable_bytes is not None
    usual = PARAMETERS.replay_errors if replayed else PARAMETERS.estimate_errors
    regression, by_regression, by_right_replays = _Regression(), 0.0, 0.0
    for residual, similarity in residuals:
        low, high = residual.fit.expected_bytes, residual.failed_expected_bytes
        failed, step = (low + high) / 2, abs(high - low) / math.sqrt(12.0)  # uniform between the fit and the failure
        parts = _parts(residual.limit_bytes, residual.zero_expected_bytes, conditions.limit_bytes)
        missed = 1.0 - failed / residual.limit_bytes
        weight = similarity / (1.0 + (step / residual.limit_bytes / PARAMETERS.residual_spread) ** 2)
        by_regression += regression.log_density(parts, missed, weight)
        by_regression -= _log_density(missed, regression.spread**2 * (1.0 / weight - 1.0), usual)
        variance = PARAMETERS.residual_spread**2 * (1.0 / weight - 1.0)
        by_right_replays += _log_density(missed, variance, PARAMETERS.right_replay_errors)
        by_right_replays -= _log_density(missed, variance, usual)
        regression.observe(parts, missed, weight)
    weight = math.fsum(similarity for _, similarity in residuals)
    if replayed and by_right_replays > max(0.0, by_regression):
        return _right_replays(len(residuals), min(weight, math.expm1(by_right_replays)))
    if by_regression < 0.0:
        return None
    return _by_regression(regression, residuals, peaks, conditions)


def _right_replays(tunings: int, weight: float) -> EstimateCorrection:
    """The correction of replays that were right so far: none, but with their small error."""
    ((level_error, slope_error, _),) = PARAMETERS.right_replay_errors
    return EstimateCorrection(
        tunings=tunings, weight=weight, level=1.0, level_error=level_error, slope=1.0, slope_error=slope_error
    )


def _by_regression(
    regression: _Regression,
    residuals: Sequence[tuple[EstimateResidual, float]],
    peaks: ExpectedPeaks,
    conditions: EstimateConditions,
) -> EstimateCorrection:
    """The correction that a regression over the residuals predicts."""
    missed, error = regression.predict(_parts(conditions.limit_bytes, peaks.used_bytes(0), conditions.limit_bytes))
    growth, growth_error = regression.growth()
    slope = 1.0 / max(1.0 - growth, PARAMETERS.least_growth)
    usable = _Usable() if conditions.elastic else _usable(residuals, slope)
    return EstimateCorrection(
        tunings=len(residuals),
        weight=math.fsum(similarity for _, similarity in residuals),
        level=1.0 + slope * missed,
        level_error=slope * error,
        slope=slope,
        slope_error=math.hypot(slope**2 * growth_error, PARAMETERS.residual_slope_spread),
        usable=usable.share,
        usable_error=usable.error,
        whole_limit=usable.whole_limit,
    )


def _log_density(missed: float, variance: float, errors: EstimateErrors) -> float:
    """The logarithm of the density of a difference by independent errors of estimates, with this variance besides."""
    variances = [(error**2 + variance, probability) for error, _, probability in errors]
    densities = (
        probability * math.exp(-(missed**2) / total / 2) / math.sqrt(2 * math.pi * total)
        for total, probability in variances
    )
    return math.log(max(math.fsum(densities), sys.float_info.min))


@dataclass(frozen=True)
class _Usable:
    """The share of the limit at which measured peaks ran out of memory, its standard error, and ``whole_limit``."""

    share: float | None = None
    error: float = 0.0
    whole_limit: float = 0.0


def _usable(residuals: Sequence[tuple[EstimateResidual, float]], slope: float) -> _Usable:
    """The weighted mean of the shares, and the probability that the limit itself explains them.

    The limit explains a residual if it lies between the peaks of the size that fits and of the one that fails. The
    other explanation, fragmentation, may put them anywhere within its error.
    """
    (_, whole), (fragmentation, lost) = PARAMETERS.limit_errors
    found, log_odds = [], math.log(whole / lost)
    for residual, similarity in residuals:
        low = residual.fit.measured_bytes / residual.limit_bytes
        step = slope * (residual.failed_expected_bytes - residual.fit.expected_bytes) / residual.limit_bytes
        found.append((low + step / 2, similarity / (_USABLE_SPREAD**2 + step**2 / 12.0)))
        explained = low - _PEAK_NOISE <= 1.0 <= low + step + _PEAK_NOISE
        by_limit = 1.0 if explained else _CONTRADICTED
        log_odds += similarity * math.log(by_limit / min(1.0, (step + 2 * _PEAK_NOISE) / (2 * fragmentation)))
    total = math.fsum(precision for _, precision in found)
    mean = math.fsum(share * precision for share, precision in found) / total
    return _Usable(mean, math.hypot(_USABLE_SPREAD, 1.0 / math.sqrt(total)), 1.0 / (1.0 + math.exp(-log_odds)))


def _similarity(residual: EstimateResidual, conditions: EstimateConditions) -> float:
    """The weight of a residual for the new estimate, from 0 to 1."""
    weight = family_weight(residual.family, conditions.family)
    if _without_python(residual.versions) != _without_python(conditions.versions):
        weight *= PARAMETERS.other_versions_weight
    distance = math.log2(conditions.limit_bytes / residual.limit_bytes)
    return weight / (1.0 + distance**2)


def _without_python(versions: dict[str, str]) -> dict[str, str]:
    return {name: version for name, version in versions.items() if name != "python"}


def _parts(limit: float, zero: float, new_limit: float) -> tuple[float, float, float]:
    """The parts of a difference with coefficients of 1, as shares of ``limit``.

    They are a share of the limit, bytes (as many as the new limit), and the room for memory that grows with the size.
    None depends on what was measured, so that the coefficients are not biased by the spread of the measurements.
    """
    return 1.0, new_limit / limit, (limit - zero) / limit


class _Regression:
    """Bayesian linear regression on three coefficients, one observation at a time (recursive least squares).

    All variances are in units of the variance of the observations, of which ``_squares / _count`` is the estimate.
    """

    def __init__(self) -> None:
        spread = PARAMETERS.residual_spread
        self._means = [0.0, 0.0, 0.0]
        self._covariances = [
            [(error / spread) ** 2 if row == column else 0.0 for column in range(3)]
            for row, error in enumerate(PARAMETERS.residual_errors)
        ]
        self._count = PARAMETERS.residual_prior_tunings
        self._squares = self._count * spread**2

    @property
    def spread(self) -> float:
        """The standard deviation of an observation of weight 1."""
        return math.sqrt(self._squares / self._count)

    def observe(self, parts: Sequence[float], value: float, weight: float) -> None:
        """Take an observation into account, with a weight of at most 1."""
        gains, variance = self._gains(parts, weight)
        innovation = value - math.fsum(map(operator.mul, self._means, parts))
        self._means = [mean + gain / variance * innovation for mean, gain in zip(self._means, gains, strict=True)]
        self._covariances = [
            [covariance - one * other / variance for covariance, other in zip(row, gains, strict=True)]
            for row, one in zip(self._covariances, gains, strict=True)
        ]
        self._count += weight
        self._squares += weight * innovation**2 / variance

    def log_density(self, parts: Sequence[float], value: float, weight: float) -> float:
        """The logarithm of the density of an observation before it is taken into account: Student's distribution."""
        freedom, scale = 2.0 * self._count, self.spread * math.sqrt(self._gains(parts, weight)[1])
        deviation = (value - math.fsum(map(operator.mul, self._means, parts))) / scale
        return (
            math.lgamma((freedom + 1) / 2)
            - math.lgamma(freedom / 2)
            - math.log(math.pi * freedom) / 2
            - math.log(scale)
            - (freedom + 1) / 2 * math.log1p(deviation**2 / freedom)
        )

    def _gains(self, parts: Sequence[float], weight: float) -> tuple[list[float], float]:
        """The covariances of an observation with the coefficients, and its variance."""
        gains = [math.fsum(map(operator.mul, row, parts)) for row in self._covariances]
        return gains, 1.0 / weight + math.fsum(map(operator.mul, gains, parts))

    def predict(self, parts: Sequence[float]) -> tuple[float, float]:
        """The expected value of another observation, and its standard error."""
        variance = max(1.0, self._gains(parts, 1.0)[1])
        return math.fsum(map(operator.mul, self._means, parts)), self.spread * math.sqrt(variance)

    def growth(self) -> tuple[float, float]:
        """The share of the measured growth that estimates miss, and its standard error."""
        return self._means[2], self.spread * math.sqrt(max(0.0, self._covariances[2][2]))
