"""The posterior of a search: where the largest size that fits may lie, by measurements and an estimate. Pure, no torch.

A posterior is a weighted list of hypotheses on the memory curve. Each gives, for a micro-batch size, the probability
that the size fits. No figure is trusted absolutely: a part of the weight allows for a limit that is effectively lower
or higher (fragmentation, a biased measurement), another part knows nothing but the bracket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TypeAlias

from batchwright.planning.parameters import PARAMETERS, Levels
from batchwright.schemas.residuals import EstimateCorrection

Survival: TypeAlias = Callable[[float], float]
"""The probability that a micro-batch of this size fits, under one hypothesis."""
Posterior: TypeAlias = list[tuple[float, Survival]]
"""Weighted hypotheses."""
Point: TypeAlias = tuple[int, int]
"""A size that fits, and its measured peak in bytes."""
Curve: TypeAlias = Callable[[float], float]
"""The bytes that an estimate expects at a size."""

_LIKELIHOODS = 20
"""Likelihoods to fit among which the first size is chosen."""


def from_measurements(points: Sequence[Point], limit: int | None, end: int, start: float | None = None) -> Posterior:
    """The posterior from measurements alone, before it is conditioned on the bracket.

    Args:
        points: measured peaks, by rising size, on one affine piece of the memory curve (``last_affine_piece``).
        limit: bytes a probe may take.
        end: an upper bound of the answer, exclusive.
        start: lower bound of the answer, with a single point.
    """
    weight = PARAMETERS.uninformed_weight
    uninformed: Posterior = [(weight, _log_uniform(0.5, end))]
    if not limit or not points:
        return uninformed
    if len(points) == 1:
        return [*uninformed, (1 - weight, _log_uniform(min(start or points[0][0], end - 1), end))]
    lines = _lines(points, limit)
    return [*uninformed, *(((1 - weight) * share, survival) for share, survival in lines)]


def from_estimate(  # noqa: PLR0913 - all that a posterior rests on
    points: Sequence[Point],
    limit: int,
    end: int,
    curve: Curve,
    surplus: int | None = None,
    *,
    elastic: bool = False,
    replayed: bool = False,
    correction: EstimateCorrection | None = None,
) -> Posterior:
    """The posterior from an estimate's ``curve``, calibrated with measurements, and from a line through the latter.

    Args:
        points: measured peaks, by rising size.
        limit: bytes on the curve at which memory runs out.
        end: an upper bound of the answer, exclusive.
        curve: the memory curve of the estimate.
        surplus: bytes held between updates beyond the estimate, which is the error of the curve at size 0.
        elastic: whether a part of the measured memory is reclaimable where memory is short.
        replayed: whether ``limit`` is that of replays in a simulation of the allocator.
        correction: correction of the estimate that was learned from earlier tunings.
    """
    saturated = PARAMETERS.saturated_share * limit
    straight = last_affine_piece([(size, used) for size, used in points if not elastic or used <= saturated])
    lines = list(_lines(straight, limit)) if len(straight) > 1 else []
    measurements = [
        _Measurement(curve(size) / limit, used / limit, saturated=used > saturated) for size, used in points
    ]
    if points and surplus is not None:
        at_zero = _Measurement(curve(0) / limit, (curve(0) + surplus) / limit, PARAMETERS.resident_noise)
        measurements.insert(0, at_zero)
    beyond = sum(curve(size) > limit for size, _ in points) if replayed else None
    models = [
        *_default_models(beyond_replays=beyond, elastic=elastic),
        *_learned_models(correction, elastic=elastic),
    ]
    calibrated = list(_calibrated_curves(models, measurements, limit, curve))
    share = PARAMETERS.estimate_weight if lines else 1.0
    return [
        (PARAMETERS.uninformed_weight, _log_uniform(0.5, end)),
        *((share * weight, survival) for weight, survival in _normalised(calibrated)),
        *(((1 - share) * weight, survival) for weight, survival in _normalised(lines)),
    ]


def fit_probability(posterior: Posterior, size: int) -> float:
    """The probability that ``size`` fits."""
    return math.fsum(weight * survival(size) for weight, survival in posterior)


@dataclass(frozen=True)
class BracketedPosterior:
    """A posterior conditioned on the bracket: the answer is at least the candidate ``low`` and below ``high``.

    Attributes:
        low: index of a candidate that fits; 0 when none is known.
        high: index of a candidate that fails, or one past the last candidate.
        failed: whether ``high`` is a candidate that fails.
        posterior: the unconditioned posterior.
        size_of: the candidates' sizes, by index; 0 for index 0.
    """

    low: int
    high: int
    failed: bool
    posterior: Posterior
    size_of: Callable[[int], int]

    def mass_from(self, index: int) -> float:
        """The probability that the candidate ``index`` fits, and ``high`` does not; not normalised."""
        size = self.size_of(index)
        pairs = zip(self.posterior, self._beyond, strict=True)
        return sum(weight * max(0.0, survival(size) - rest) for (weight, survival), rest in pairs)

    @cached_property
    def _beyond(self) -> list[float]:
        return [survival(self.size_of(self.high)) if self.failed else 0.0 for _, survival in self.posterior]

    def nearest_to(self, probability: float) -> int:
        """The candidate inside the bracket whose probability to fit is nearest to ``probability``."""
        target = probability * self.mass_from(self.low)
        below, above = self.low, self.high
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if self.mass_from(middle) >= target else (below, middle)
        inside = [index for index in (below, above) if self.low < index < self.high]
        return min(inside, key=lambda index: abs(self.mass_from(index) - target))

    def fewest_probes(self, cautious: float) -> int:
        """The candidate from which the fewest probes are expected, at most ``cautious`` likely to fit.

        A fit calibrates the estimate, so that the answer and the size above it follow: three probes. Two suffice where
        the answer is this candidate or the one below. An answer further below takes four, because an OOM measures
        nothing.
        """

        def expected(index: int) -> float:
            above = self.mass_from(index + 1) if index + 1 < self.high else 0.0
            return above - 2 * self.mass_from(max(index - 1, self.low))

        likely = (self.nearest_to(cautious * share / _LIKELIHOODS) for share in range(_LIKELIHOODS, 0, -1))
        return min(likely, key=expected)


def last_affine_piece(points: list[Point]) -> list[Point]:
    """The points without those that lie on a floor, or before a kink of the memory curve."""
    while len(points) > 1:
        is_flat = min(points[1][1], points[-1][1]) <= points[0][1] * (1 + PARAMETERS.flat_rise)
        if not is_flat and not _has_kink(points):
            break
        points = points[1:]
    return points


def _has_kink(points: list[Point]) -> bool:
    (first, first_used), (second, second_used), (last, last_used) = points[0], points[1], points[-1]
    if last < PARAMETERS.kink_size_ratio * second:
        return False
    later = (last_used - second_used) / (last - second)
    return (second_used - first_used) / (second - first) < PARAMETERS.kink_slope_ratio * later


def _log_uniform(start: float, end: float) -> Survival:
    """The survival function of a threshold that is log-uniform between ``start`` and ``end``."""
    return lambda size: 1.0 if size <= start else max(0.0, math.log(end / size) / math.log(end / start))


def _cauchy(deviations: float) -> float:
    """The Cauchy distribution function: heavy tails make the step after a surprise proportionally longer."""
    return 0.5 + math.atan(deviations) / math.pi


def _normalised(posterior: Posterior) -> Posterior:
    total = math.fsum(weight for weight, _ in posterior)
    return [
        ((1 - PARAMETERS.uninformed_weight) * weight / total, survival) for weight, survival in posterior if total > 0
    ]


def _lines(points: Sequence[Point], limit: int) -> Iterator[tuple[float, Survival]]:
    """Hypotheses on where the least-squares line through the points meets the limit, by noise and limit error.

    The weight of a noise level is how well it explains the misfit. All memory is in shares of the limit.
    """
    count, centre = len(points), fmean(size for size, _ in points)
    mean = fmean(used / limit for _, used in points)
    spread = math.fsum((size - centre) ** 2 for size, _ in points)
    slope = math.fsum((size - centre) * (used / limit - mean) for size, used in points) / spread
    misfit = math.fsum((used / limit - mean - slope * (size - centre)) ** 2 for size, used in points)

    def survival(noise: float, limit_error: float) -> Survival:
        def fits(size: float) -> float:
            variance = noise**2 * (1 / count + (size - centre) ** 2 / spread) + limit_error**2
            return _cauchy((1 - mean - slope * (size - centre)) / math.sqrt(variance))

        return fits

    finest = PARAMETERS.noise_levels[0][0]
    for noise, prior in PARAMETERS.noise_levels:
        evidence = noise / finest * ((finest**2 + misfit) / (noise**2 + misfit)) ** ((count - 1) / 2)
        for limit_error, share in PARAMETERS.limit_errors:
            yield prior * evidence * share, survival(noise, limit_error)


def _clipped(ratio: float) -> float:
    """Clip a ratio of peak to limit: a wild estimate may expect any number, also below 0."""
    return max(-PARAMETERS.clipped_ratio, min(ratio, PARAMETERS.clipped_ratio))


@dataclass(frozen=True)
class _Calibration:
    """Normal distribution of the coefficients in ``used = level + slope * (curve - 1)``, in shares of the limit.

    ``level`` is the real use where the estimate's curve meets the limit. ``slope`` is the ratio of the real slope to
    the estimated slope.
    """

    level: float
    slope: float
    var_level: float
    var_slope: float
    covariance: float = 0.0
    log_evidence: float = 0.0

    def updated(self, curve: float, used: float, noise: float) -> _Calibration:
        """The calibration after one more measurement (a Kalman filter's step)."""
        offset = curve - 1
        gain_level = self.var_level + offset * self.covariance
        gain_slope = self.covariance + offset * self.var_slope
        variance = max(gain_level + offset * gain_slope, 0.0) + noise**2
        innovation = used - self.level - offset * self.slope
        return replace(
            self,
            level=self.level + gain_level / variance * innovation,
            slope=self.slope + gain_slope / variance * innovation,
            var_level=max(0.0, self.var_level - gain_level**2 / variance),
            var_slope=max(0.0, self.var_slope - gain_slope**2 / variance),
            covariance=self.covariance - gain_level * gain_slope / variance,
            log_evidence=self.log_evidence - 0.5 * (math.log(variance) + innovation**2 / variance),
        )

    def free(self, curve: float) -> tuple[float, float]:
        """The share of the limit that stays free where the estimate is ``curve``, and its variance."""
        offset = curve - 1
        variance = self.var_level + 2 * offset * self.covariance + offset**2 * self.var_slope
        return 1 - self.level - offset * self.slope, max(0.0, variance)


@dataclass(frozen=True)
class _Measurement:
    """One measured peak, in shares of the limit.

    Attributes:
        curve: the estimate for the same size.
        used: the measured peak.
        noise: noise of this measurement alone, added to the common noise.
        saturated: whether the limit may have cut off the peak, where memory is reclaimable.
    """

    curve: float
    used: float
    noise: float = 0.0
    saturated: bool = False

    def apply(self, calibration: _Calibration, noise: float, *, elastic: bool) -> _Calibration:
        """``calibration`` after this measurement; a saturated peak below the expected one changes only the evidence."""
        curve = _clipped(self.curve)
        if elastic and self.saturated and 1 - calibration.free(curve)[0] >= self.used:
            evidence = calibration.log_evidence + PARAMETERS.saturated_log_likelihood
            return replace(calibration, log_evidence=evidence)
        return calibration.updated(curve, _clipped(self.used), math.hypot(noise, self.noise))


@dataclass(frozen=True)
class _ErrorModel:
    """One error model of the estimate.

    Attributes:
        prior: its probability before any measurement.
        noise: noise of a measured peak, as a share of the limit.
        usable: the peak at which memory runs out less 1, as a share of the limit: reclaimable memory if above 0.
        limit_errors: errors of the limit, each with its probability.
        calibration: the estimate's level and slope, and their errors.
    """

    prior: float
    noise: float
    usable: float
    limit_errors: Levels
    calibration: _Calibration

    def updated(self, measurements: Sequence[_Measurement]) -> _ErrorModel:
        """The model after all measurements."""
        calibration = self.calibration
        for measurement in measurements:
            calibration = measurement.apply(calibration, self.noise, elastic=self.usable > 0)
        return replace(self, calibration=calibration)

    def survival(self, curve: Curve, limit: int, limit_error: float) -> Survival:
        """The probability that a size stays below the usable memory, by the calibrated curve."""

        def fits(size: float) -> float:
            free, variance = self.calibration.free(_clipped(curve(size) / limit))
            return _cauchy((free + self.usable) / math.sqrt(variance + self.noise**2 + limit_error**2))

        return fits


def _default_models(*, beyond_replays: int | None, elastic: bool) -> Iterator[_ErrorModel]:
    """An error model for each combination of estimate error, noise and reclaimable share.

    ``beyond_replays`` is the number of fits where replays ran out of memory, or None without replays.
    """
    if beyond_replays is None:
        errors, limit_errors = PARAMETERS.estimate_errors, PARAMETERS.limit_errors
    else:
        by_number = PARAMETERS.replay_limit_errors
        errors, limit_errors = PARAMETERS.replay_errors, by_number[min(beyond_replays, len(by_number) - 1)]
    for level_error, slope_error, probability in errors:
        calibration = _Calibration(level=1.0, slope=1.0, var_level=level_error**2, var_slope=slope_error**2)
        for noise, prior in PARAMETERS.noise_levels:
            for usable, share in PARAMETERS.elastic_levels if elastic else ((0.0, 1.0),):
                yield _ErrorModel(probability * prior * share, noise, usable, limit_errors, calibration)


def _learned_models(correction: EstimateCorrection | None, *, elastic: bool) -> Iterator[_ErrorModel]:
    """Error models around a learned correction. They join the default ones and outweigh them by ``learned_odds``.

    The learned level is that at which a size fails. The peaks are above this level by as much as can be reclaimed, or
    below by as much as cannot be used.
    """
    if correction is None:
        return
    odds = PARAMETERS.learned_odds * correction.weight / (1.0 + correction.weight)
    for usable, usable_error, share in _usable_levels(correction, elastic=elastic):
        variance = max(correction.level_error**2 - usable_error**2, correction.level_error**2 / 4)
        calibration = _Calibration(correction.level + usable, correction.slope, variance, correction.slope_error**2)
        for noise, prior in PARAMETERS.noise_levels:
            yield _ErrorModel(odds * prior * share, noise, usable, ((usable_error, 1.0),), calibration)


def _usable_levels(correction: EstimateCorrection, *, elastic: bool) -> Iterator[tuple[float, float, float]]:
    """The peak at which memory runs out less 1, as a share of the limit, its error and its probability."""
    if correction.usable is None:
        for usable, share in PARAMETERS.elastic_levels if elastic else ((0.0, 1.0),):
            yield usable, 0.0, share
        return
    yield 0.0, 0.0, correction.whole_limit
    yield correction.usable - 1.0, correction.usable_error, 1.0 - correction.whole_limit


def _calibrated_curves(
    models: Sequence[_ErrorModel], measurements: Sequence[_Measurement], limit: int, curve: Curve
) -> Iterator[tuple[float, Survival]]:
    """Weighted hypotheses, one for each error model and limit error, weighted by how well they explain the peaks."""
    updated = [model.updated(measurements) for model in models]
    largest = max(model.calibration.log_evidence for model in updated)
    for model in updated:
        for limit_error, share in model.limit_errors:
            weight = model.prior * math.exp(model.calibration.log_evidence - largest) * share
            yield weight, model.survival(curve, limit, limit_error)
