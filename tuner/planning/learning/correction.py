"""The correction of an estimate by the residuals of earlier tunings on the same kind of device. Pure, no torch.

A tuning that ended with an out-of-memory error shows at which estimate memory runs out, whatever the reason: the
estimate, fragmentation, reclaimable memory, a biased measurement. The difference to the limit is a sum of three parts:
a share of the limit, a number of bytes, and a share of the room for memory that grows with the size. Their
coefficients are those of a Bayesian linear regression over the residuals (a normal distribution of the coefficients, an
inverse-gamma one of the variance: Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3 and exercise
3.12). Its predictive distribution for the new limit is the corrected level. A residual has a weight: less for other
versions, another family or another limit, and for a large step between the size that fits and the size that fails.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.planning.learning.workload_family import family_of, family_weight
from tuner.planning.parameters import DEFAULT_PARAMETERS, SearchParameters
from tuner.planning.session import Tuning
from tuner.schemas.residuals import EstimateCorrection, EstimateResidual
from tuner.schemas.results import ExpectedPeaks

_USABLE_SPREAD = 0.005
"""Spread, between tunings, of the measured peak at which memory runs out, as a share of the limit. A choice."""


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


def conditions_of(tuning: Tuning) -> EstimateConditions:
    """The conditions of a tuning's estimate."""
    return EstimateConditions(
        family=family_of(tuning.request.spec),
        versions=tuning.versions,
        limit_bytes=tuning.probe_limit_bytes,
        elastic=tuning.device.kind == "cpu",
    )


def corrected(
    peaks: ExpectedPeaks,
    residuals: Sequence[EstimateResidual],
    conditions: EstimateConditions,
    parameters: SearchParameters = DEFAULT_PARAMETERS,
) -> ExpectedPeaks:
    """The estimate with the correction that the residuals give; unchanged where there are none of use."""
    useful = [
        (residual, weight)
        for residual in residuals
        if (weight := _similarity(residual, conditions, parameters)) >= parameters.least_residual_weight
    ]
    if not useful:
        return peaks
    correction = _correction(useful, peaks.used_bytes(0), conditions, parameters)
    return peaks.model_copy(update={"correction": correction})


def _correction(
    residuals: Sequence[tuple[EstimateResidual, float]],
    zero: float,
    conditions: EstimateConditions,
    parameters: SearchParameters,
) -> EstimateCorrection:
    limit = conditions.limit_bytes
    regression = _Regression(parameters)
    for residual, weight in residuals:
        failed, step = _failure(residual)
        parts = _parts(residual.limit_bytes, residual.zero_expected_bytes, limit)
        precision = 1.0 / (1.0 + (step / residual.limit_bytes / parameters.residual_spread) ** 2)
        regression.observe(parts, 1.0 - failed / residual.limit_bytes, weight * precision)
    missed, error = regression.predict(_parts(limit, zero, limit))
    growth, growth_error = regression.growth()
    slope = 1.0 / max(1.0 - growth, parameters.least_growth)
    usable, usable_error = (None, 0.0) if conditions.elastic else _usable(residuals, slope)
    return EstimateCorrection(
        tunings=len(residuals),
        weight=math.fsum(weight for _, weight in residuals),
        level=1.0 + slope * missed,
        level_error=slope * error,
        slope=slope,
        slope_error=math.hypot(slope**2 * growth_error, parameters.residual_slope_spread),
        usable=usable,
        usable_error=usable_error,
    )


def _failure(residual: EstimateResidual) -> tuple[float, float]:
    """The estimate at which memory ran out, and its standard deviation (uniform between the fit and the failure)."""
    low, high = residual.fit.expected_bytes, residual.failed_expected_bytes
    return (low + high) / 2, abs(high - low) / math.sqrt(12.0)


def _usable(residuals: Sequence[tuple[EstimateResidual, float]], slope: float) -> tuple[float, float]:
    """The share of the limit at which measured peaks ran out of memory: a weighted mean, and its standard error."""
    found = []
    for residual, weight in residuals:
        failed, step = _failure(residual)
        peak = residual.fit.measured_bytes + slope * (failed - residual.fit.expected_bytes)
        found.append((peak / residual.limit_bytes, weight, step / residual.limit_bytes))
    precisions = [weight / (_USABLE_SPREAD**2 + step**2) for _, weight, step in found]
    total = math.fsum(precisions)
    mean = math.fsum(precision * share for precision, (share, _, _) in zip(precisions, found, strict=True)) / total
    return mean, math.hypot(_USABLE_SPREAD, 1.0 / math.sqrt(total))


def _similarity(residual: EstimateResidual, conditions: EstimateConditions, parameters: SearchParameters) -> float:
    """The weight of a residual for the new estimate, from 0 to 1."""
    weight = family_weight(residual.family, conditions.family, parameters)
    if _without_python(residual.versions) != _without_python(conditions.versions):
        weight *= parameters.other_versions_weight
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

    def __init__(self, parameters: SearchParameters) -> None:
        spread = parameters.residual_spread
        self._means = [0.0, 0.0, 0.0]
        self._covariances = [
            [(error / spread) ** 2 if row == column else 0.0 for column in range(3)]
            for row, error in enumerate(parameters.residual_errors)
        ]
        self._count = parameters.residual_prior_tunings
        self._squares = self._count * spread**2

    def observe(self, parts: Sequence[float], value: float, weight: float) -> None:
        """Take an observation into account, with a weight of at most 1."""
        gains = [math.fsum(map(operator.mul, row, parts)) for row in self._covariances]
        variance = 1.0 / weight + math.fsum(map(operator.mul, gains, parts))
        innovation = value - math.fsum(map(operator.mul, self._means, parts))
        self._means = [mean + gain / variance * innovation for mean, gain in zip(self._means, gains, strict=True)]
        self._covariances = [
            [covariance - one * other / variance for covariance, other in zip(row, gains, strict=True)]
            for row, one in zip(self._covariances, gains, strict=True)
        ]
        self._count += weight
        self._squares += weight * innovation**2 / variance

    def predict(self, parts: Sequence[float]) -> tuple[float, float]:
        """The expected value of another observation, and its standard error."""
        gains = [math.fsum(map(operator.mul, row, parts)) for row in self._covariances]
        variance = self._squares / self._count * (1.0 + max(0.0, math.fsum(map(operator.mul, gains, parts))))
        return math.fsum(map(operator.mul, self._means, parts)), math.sqrt(variance)

    def growth(self) -> tuple[float, float]:
        """The share of the measured growth that estimates miss, and its standard error."""
        return self._means[2], math.sqrt(self._squares / self._count * max(0.0, self._covariances[2][2]))
