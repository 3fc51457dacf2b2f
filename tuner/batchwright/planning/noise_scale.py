"""The gradient noise scale: the effective batch that the gradients of a run suggest. Pure arithmetic, no torch.

Source: McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training" (2018, arXiv
1812.06162). With ``G`` the expected gradient and ``Sigma`` the covariance of the gradient of one sample, the simple
noise scale is ``B = tr(Sigma) / |G|^2`` (equation 2.9): the batch, in samples, whose gradient has as much noise as
signal. A run with a much smaller effective batch needs about as many samples whatever the batch, so a larger batch
saves updates; far above ``B`` a larger batch saves hardly any update and costs samples. At ``B`` a run takes about
twice the fewest updates and twice the fewest samples (section 2.3). Section 2.2 says what ``B`` leaves out: curvature.

**One update.** A batch of ``b`` samples has a mean gradient ``g`` with ``E|g|^2 = |G|^2 + tr(Sigma) / b``: two sizes of
batch give both unknowns (appendix A.1). The large batch is the whole update, of ``n`` samples, whose mean gradient
``g`` the run computes. The small batches are parts of the update. Part ``i`` has the share ``f_i`` of the update's
weight (of its samples, or of its target tokens) and contributes ``c_i`` to ``g``, where the contributions of all parts
of the update add up to ``g``. Parts of unequal weight need unequal factors::

    E|c_i|^2 = f_i^2 |G|^2 + f_i tr(Sigma) / n          E|g|^2 = |G|^2 + tr(Sigma) / n

    tr(Sigma) = n * (sum |c_i|^2 / f_i  -  F |g|^2) / (m - F)      m parts, F = sum f_i
    |G|^2     = |g|^2 - tr(Sigma) / n

Both are unbiased for any division: ``E[sum |c_i|^2 / f_i] = F |G|^2 + m tr(Sigma) / n``, and the first term cancels.
With parts of equal size they are the estimators of appendix A.1. Not all parts need to be measured. If all are, so that
``F = 1``, the first is the between-groups mean square of an analysis of variance. If a single one of ``M`` equal parts
is, the variance of the estimated ``|G|^2`` is twice as large where noise dominates (``4 tr(Sigma^2) / (M (M - 1))``
instead of ``2``, for normal gradients and parts of one sample), for a single pass over the gradients instead of ``M``.

The weights count as known, and the noise of a part as proportional to its weight. That is exact for samples of equal
weight, and for tokens that add noise independently. If the noise of a sequence grows faster than its tokens, the
estimated ``tr(Sigma)`` is too small. It is so by about ``v^2 / b`` of itself, where ``v`` is the coefficient of
variation of a sequence's tokens and ``b`` the number of sequences in a part, if all tokens of a sequence have the same
noise.
Samples are taken to be drawn independently, as from an endless source. An update draws from ``N`` samples without
replacement: both expectations are then smaller by ``tr(Sigma) / N`` and ``f_i^2 tr(Sigma) / N``, with ``G`` the mean
gradient of the ``N`` samples and ``Sigma`` their covariance (divisor ``N - 1``), so that the second estimate is one of
``|G|^2 - tr(Sigma) / N``. ``NoiseMeasurement.within`` adds the missing term: a run minimizes the loss of its own data.

**Many updates.** One update says little, and the ratio of two estimates is biased. So numerator and denominator are
averaged over the newest updates (a run's noise scale grows as its loss falls) before they are divided. The interval is
Fieller's (1954, "Some Problems in Interval Estimation", Journal of the Royal Statistical Society B 16:175-185), from
the variances and the covariance of the pairs over the updates: all ``B`` for which the mean of ``tr(Sigma) - B |G|^2``
is not significantly different from zero by Student's t. It has no upper end where ``|G|^2`` is not significantly
positive, which no interval around an estimate can say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from batchwright.schemas.training import NoiseScale
from batchwright.units import format_share

CONFIDENCE = 0.95
"""Coverage of the interval."""
FEWEST_UPDATES = 10
"""Measured updates below which nothing is said: Student's t is for normal pairs, and these are skewed."""
MOST_UPDATES = 200
"""Measured updates that are averaged, the newest."""
_ONE_SHARE = 1e-9
"""Parts that are all of the update, and a single one, leave nothing to compare; rounding leaves less than this."""
_SHARE_TOLERANCE = 0.01
"""Relative difference of a part's shares of several loss terms, above which the part has no share of the gradient."""


@dataclass(frozen=True)
class GradientPart:
    """A measured part of an update: a micro-batch, or all micro-batches of a rank."""

    shares: tuple[float, ...]
    """The part's share of the weight of each loss term, from 0 to 1."""
    squared_norm: float
    """Squared L2 norm of the part's contribution to the gradient of the update."""

    @property
    def share(self) -> float | None:
        """The part's share of the update; None without a share, or where the shares of loss terms differ."""
        low, high = min(self.shares, default=0.0), max(self.shares, default=0.0)
        return high if low > 0.0 and high - low <= _SHARE_TOLERANCE * high else None


@dataclass(frozen=True)
class NoiseMeasurement:
    """Unbiased estimates from one update, either of which may be negative."""

    variance: float
    """Trace of the covariance of a sample's gradient."""
    squared_norm: float
    """Squared L2 norm of the expected gradient."""

    def within(self, samples: int) -> NoiseMeasurement:
        """The estimates for a data set of this many samples, of which the update drew without replacement."""
        return NoiseMeasurement(self.variance, self.squared_norm + self.variance / samples)


def measure(parts: Sequence[GradientPart], squared_norm: float, samples: int) -> NoiseMeasurement | None:
    """Estimate numerator and denominator of the noise scale from one update, by the formulas of this module.

    Args:
        parts: disjoint parts of the update.
        squared_norm: squared L2 norm of the gradient of the update's mean loss.
        samples: samples in the update.

    Returns:
        None when there is nothing to compare: a single part that is the whole update, parts without weight, loss terms
        that divide the update differently, or a gradient that is not finite.
    """
    known = [(part.squared_norm, part.share) for part in parts if part.share is not None]
    total = sum(share for _, share in known)
    if len(known) < len(parts) or len(known) - total <= _ONE_SHARE:
        return None
    parts_sum = sum(squared / share for squared, share in known)
    variance = samples * (parts_sum - total * squared_norm) / (len(known) - total)
    estimate = NoiseMeasurement(variance, squared_norm - variance / samples)
    return estimate if math.isfinite(variance) and math.isfinite(estimate.squared_norm) else None


@dataclass(frozen=True)
class Ratio:
    """The ratio of two means, with Fieller's interval."""

    estimate: float | None
    """The ratio; None where the denominator is not significantly positive."""
    lower: float | None
    """Lower end of the interval, at least 0; None where there is no interval."""
    upper: float | None
    """Upper end of the interval; None where it has none."""


def fieller_interval(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The ratio of the means of a numerator and a denominator that is known not to be negative.

    Args:
        pairs: independent pairs of numerator and denominator, at least two.
    """
    count = len(pairs)
    tops, bottoms = [top for top, _ in pairs], [bottom for _, bottom in pairs]
    top, bottom = fmean(tops), fmean(bottoms)
    squared_t = student_t((1.0 + CONFIDENCE) / 2.0, count - 1) ** 2 / (count * (count - 1))
    of_top = squared_t * sum((value - top) ** 2 for value in tops)
    of_bottom = squared_t * sum((value - bottom) ** 2 for value in bottoms)
    of_both = squared_t * sum((a - top) * (b - bottom) for a, b in pairs)
    # (top - B bottom)^2 <= of_top - 2 B of_both + B^2 of_bottom, a quadratic inequality in B
    square, linear, constant = bottom**2 - of_bottom, top * bottom - of_both, top**2 - of_top
    root = math.sqrt(max(0.0, linear**2 - square * constant))
    if square > 0.0 and bottom > 0.0 and linear + root > 0.0:
        return Ratio(max(0.0, top / bottom), max(0.0, (linear - root) / square), (linear + root) / square)
    if square <= 0.0 and top > 0.0 and constant > 0.0 and linear + root > 0.0:
        # B = 0 is outside: the interval begins at the positive root, and goes on without an end.
        return Ratio(None, constant / (linear + root), None)
    return Ratio(None, None, None)  # also if significantly negative: the parts are no independent samples


def student_t(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, by Cornish and Fisher's expansion.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5. The error is below 0.001 from 9 degrees
    of freedom on, for probabilities up to 0.975.

    Args:
        probability: of a smaller value, between 0 and 1.
        degrees: degrees of freedom.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))


def noise_scale(
    measurements: Sequence[NoiseMeasurement], effective_batch_size: int, data_samples: int | None = None
) -> NoiseScale:
    """Average the measurements of several updates, and say which effective batch they suggest.

    Args:
        measurements: of updates of one size, the newest last; the newest ``MOST_UPDATES`` are averaged.
        effective_batch_size: samples of these updates.
        data_samples: samples in the data, which no update can exceed; None where their number is not known.
    """
    newest = measurements[-MOST_UPDATES:]
    ratio = Ratio(None, None, None)
    if len(newest) >= FEWEST_UPDATES:
        ratio = fieller_interval([(each.variance, each.squared_norm) for each in newest])
    return NoiseScale(
        measured_updates=len(newest),
        effective_batch_size=effective_batch_size,
        gradient_variance=fmean(each.variance for each in newest) if newest else None,
        squared_gradient_norm=fmean(each.squared_norm for each in newest) if newest else None,
        samples=ratio.estimate,
        lower_samples=ratio.lower,
        upper_samples=ratio.upper,
        suggested_effective_batch_size=None if ratio.estimate is None else max(1, round(ratio.estimate)),
        message=_in_words(ratio, len(newest), effective_batch_size) + _beyond_data(ratio, data_samples),
    )


def _in_words(ratio: Ratio, updates: int, effective_batch_size: int) -> str:
    if not updates:
        return (
            "The gradient noise scale was not measured: that needs at least two micro-batches per update, with finite "
            "gradients and weights that divide all loss terms alike. Tune with a smaller `max_micro_batch_size`"
        )
    if updates < FEWEST_UPDATES:
        return f"The gradient noise scale needs {FEWEST_UPDATES} measured updates; the run has {updates}"
    if ratio.lower is None:
        return (
            f"The gradient noise scale cannot be determined from the {updates} measured updates: their gradients show "
            "neither signal nor noise beyond chance, or the samples of an update are not independent"
        )
    if ratio.estimate is None or ratio.upper is None:
        return (
            f"The gradient noise scale is at least {_samples(ratio.lower)}: noise dominates the gradients of "
            f"the {updates} measured updates, so there is no upper bound ({format_share(CONFIDENCE)} confidence). "
            f"{_advice(ratio.lower, math.inf, effective_batch_size)}; measure more or larger updates to find "
            "one"
        )
    return (
        f"The gradient noise scale suggests an effective batch of about {_samples(ratio.estimate)} "
        f"({format_share(CONFIDENCE)} between {ratio.lower:,.0f} and {ratio.upper:,.0f}, {updates} measured updates). "
        f"{_advice(ratio.lower, ratio.upper, effective_batch_size)}"
    )


def _samples(count: float) -> str:
    whole = max(1, round(count))
    return f"{whole:,} sample" if whole == 1 else f"{whole:,} samples"


def _advice(lower: float, upper: float, effective_batch_size: int) -> str:
    own = f"The effective batch of {effective_batch_size:,}"
    if effective_batch_size < lower:
        return f"{own} is below it: a larger batch would take fewer updates and about as many samples"
    if effective_batch_size > upper:
        return f"{own} is above it: a smaller batch would take fewer samples and about as many updates"
    return f"{own} is within this interval"


def _beyond_data(ratio: Ratio, data_samples: int | None) -> str:
    """A sentence that no update can be as large as the noise scale, where that exceeds the data; else an empty text."""
    least = ratio.lower if ratio.estimate is None else ratio.estimate
    if data_samples is None or least is None or round(least) <= data_samples:
        return ""
    return (
        f". The data has only {_samples(data_samples)}, so the largest possible effective batch is the whole data set"
    )
