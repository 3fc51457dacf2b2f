"""Where the largest size that fits may lie, by what was measured and what was expected. Pure, no torch.

A belief is a weighted list of ways the answer may lie; each tells, for a micro-batch size, the chance that it fits. No
figure is trusted absolutely: a part of the belief allows for a limit that is effectively lower or higher
(fragmentation, a biased measurement), a part knows nothing but the bracket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TypeAlias

FIT_CHANCE = 0.6823
"""Chance to fit of the size worth asking for when an OOM costs three fits. A search is a code with symbols that last 1
(fit) and 3 (OOM): it carries most when the chance ``p`` of the short one solves ``p + p**3 = 1`` (Shannon 1948)."""
FIRST_CHANCE = 0.85
"""The same for the first size that an estimate leads to. It is worth more when it fits: what it measures then bends the
curve, and a few percent below the answer do that as well as the answer itself."""
_NOISE_LEVELS = ((3e-5, 0.5), (3e-4, 0.2), (3e-3, 0.2), (3e-2, 0.1))
"""Noise of a measured peak as a share of the limit, and how likely each level is beforehand. CUDA peaks lie within
0.05 % (typically) to 0.34 % of a line and the peak of a CPU process within 0.9 %; many are exact."""
_LIMIT_DOUBT = ((0.0, 0.9), (0.05, 0.1))
"""How far the limit that counts may be from the nominal one, and how likely: fragmentation takes 0 to 12 %."""
_IGNORANCE = 0.02
"""Share of the belief that no memory figure can move: a cliff, a jump, a limit of another kind."""
_ESTIMATE_ERRORS = ((0.003, 0.005, 0.3), (0.03, 0.05, 0.5), (0.15, 0.3, 0.2))
"""How far an estimate may be off: where it meets the limit (as a share of the limit), in its slope (as a share of the
slope), and how likely. Published estimators reach a median error of 2.5 % to 3.6 %, some are far off."""
_ESTIMATE_SHARE = 0.7
"""Weight of the estimate's curve beside the straight line through the measurements, once there is one."""
_ANCHOR_NOISE = 2e-3
"""As a share of the limit: what one size shows between updates, against what the curve means at size 0."""
_GIVES = ((0.0, 0.4), (0.03, 0.2), (0.06, 0.2), (0.1, 0.2))
"""How much less, as a share of the limit, a process can do with than it asks for, and how likely. MKL does without its
packing buffers where these are refused: one a thread, of 4.7 MB in a GPT-2 of 128 MiB on two cores."""
_NO_GIVE = ((0.0, 1.0),)
SATURATED_SHARE = 0.97
"""Where something may be given up, a peak above this share of the limit may be cut off by the limit, and only tells
that no less was asked for."""
_CUT_OFF_EVIDENCE = 0.5 * math.log(2 * math.pi) - math.log(1 - SATURATED_SHARE)
"""Logarithm of how likely such a peak is: anywhere from there to the limit. Less what ``_Bend`` leaves out of a normal
density."""
_FAR = 4.0
"""Ratios of peak to limit are clipped here, and as far below 0: larger values carry no information."""
_FLAT = 1e-4
"""A rise below this share is none: the floor, or noise."""
_KINK = 0.8
"""A rise of less than this share of the later one belongs to another piece of the memory curve (a floor's end)."""
_LEVER = 1.1
"""How many times the size a later measurement must have for a kink to be told from noise."""

Survival: TypeAlias = Callable[[float], float]
"""The chance that a micro-batch of this size fits."""
Belief: TypeAlias = list[tuple[float, Survival]]
"""Weighted ways the answer may lie."""
Point: TypeAlias = tuple[int, int]
"""A size that fits, and its measured peak in bytes."""
Curve: TypeAlias = Callable[[float], float]
"""The bytes that an estimate expects at a size."""


def believed(points: Sequence[Point], limit: int | None, end: int, start: float | None = None) -> Belief:
    """Where the answer may lie by measurements alone, before the outcomes of the bracket are taken into account.

    Args:
        points: what was measured, by rising size, on one affine piece of the memory curve (``rising``).
        limit: bytes a probe may take.
        end: a size that the answer is surely below.
        start: with a single point, where the answer may begin.
    """
    ignorance: Belief = [(_IGNORANCE, _anywhere(0.5, end))]
    if not limit or not points:
        return ignorance
    if len(points) == 1:
        return [*ignorance, (1 - _IGNORANCE, _anywhere(min(start or points[0][0], end - 1), end))]
    return [*ignorance, *(((1 - _IGNORANCE) * weight, survival) for weight, survival in _lines(points, limit))]


def expected(  # noqa: PLR0913 - all that a belief rests on
    points: Sequence[Point],
    limit: int,
    end: int,
    curve: Curve,
    surplus: int | None = None,
    *,
    elastic: bool = False,
) -> Belief:
    """The same with an estimate's ``curve``: bent to what was measured, and not trusted alone once there is a line.

    Args:
        points: what was measured, by rising size.
        limit: bytes a probe may take.
        end: a size that the answer is surely below.
        curve: the estimate's.
        surplus: by how much more is held between updates than the estimate said: what the curve is off at size 0.
        elastic: whether a part of what is measured may be given up where memory is short.
    """
    uncut = [(size, used) for size, used in points if not elastic or used <= SATURATED_SHARE * limit]
    straight = rising(uncut)
    lines = [(weight, survival) for weight, survival in _lines(straight, limit)] if len(straight) > 1 else []
    seen = [_Seen(curve(size) / limit, used / limit, cut_off=used > SATURATED_SHARE * limit) for size, used in points]
    if points and surplus is not None:
        seen.insert(0, _Seen(curve(0) / limit, (curve(0) + surplus) / limit, _ANCHOR_NOISE))
    bent = list(_bent_curves(seen, limit, curve, _GIVES if elastic else _NO_GIVE))
    share = _ESTIMATE_SHARE if lines else 1.0
    return [
        (_IGNORANCE, _anywhere(0.5, end)),
        *((share * weight, survival) for weight, survival in _normalised(bent)),
        *(((1 - share) * weight, survival) for weight, survival in _normalised(lines)),
    ]


def chance(belief: Belief, size: int) -> float:
    """How likely it is that ``size`` fits."""
    return math.fsum(weight * survival(size) for weight, survival in belief)


@dataclass(frozen=True)
class Bracketed:
    """A belief, given that the answer is at least the candidate ``low`` and below ``high``.

    Attributes:
        low: index of a candidate that fits; 0 when none is known.
        high: index of one that fails, or past the last one.
        failed: whether ``high`` is a candidate, and fails.
        belief: where the answer may lie.
        size_of: the candidates' sizes, by index; 0 for index 0.
    """

    low: int
    high: int
    failed: bool
    belief: Belief
    size_of: Callable[[int], int]

    def mass_from(self, index: int) -> float:
        """How likely it is that the candidate ``index`` fits, and ``high`` does not; not normalised."""
        size = self.size_of(index)
        pairs = zip(self.belief, self._beyond, strict=True)
        return sum(weight * max(0.0, survival(size) - rest) for (weight, survival), rest in pairs)

    @cached_property
    def _beyond(self) -> list[float]:
        return [survival(self.size_of(self.high)) if self.failed else 0.0 for _, survival in self.belief]

    def nearest_to(self, wanted: float) -> int:
        """The candidate inside the bracket whose chance to fit is nearest to ``wanted``."""
        target = wanted * self.mass_from(self.low)
        below, above = self.low, self.high
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if self.mass_from(middle) >= target else (below, middle)
        inside = [index for index in (below, above) if self.low < index < self.high]
        return min(inside, key=lambda index: abs(self.mass_from(index) - target))


def rising(points: list[Point]) -> list[Point]:
    """The points of the last affine piece: without those that lie on a floor, or before a kink of the memory curve."""
    while len(points) > 1 and (_is_flat(points) or _has_kink(points)):
        points = points[1:]
    return points


def _is_flat(points: list[Point]) -> bool:
    return min(points[1][1], points[-1][1]) <= points[0][1] * (1 + _FLAT)


def _has_kink(points: list[Point]) -> bool:
    (first, first_used), (second, second_used), (last, last_used) = points[0], points[1], points[-1]
    if last < _LEVER * second:
        return False
    return (second_used - first_used) / (second - first) < _KINK * (last_used - second_used) / (last - second)


def _anywhere(start: float, end: float) -> Survival:
    """The answer is at least ``start``, and then of any order of magnitude up to ``end``."""
    return lambda size: 1.0 if size <= start else max(0.0, math.log(end / size) / math.log(end / start))


def _heavy_tailed(deviations: float) -> float:
    """The Cauchy distribution: after a surprise the next step is longer, in proportion to the surprise."""
    return 0.5 + math.atan(deviations) / math.pi


def _normalised(belief: Belief) -> Belief:
    total = math.fsum(weight for weight, _ in belief)
    return [((1 - _IGNORANCE) * weight / total, survival) for weight, survival in belief if total > 0]


def _lines(points: Sequence[Point], limit: int) -> Iterator[tuple[float, Survival]]:
    """Where the line through the points meets the limit, for each level of noise and of doubt in the limit.

    A least-squares line; a level's weight is how well it explains the misfit. In shares of the limit throughout.
    """
    count, centre = len(points), fmean(size for size, _ in points)
    mean = fmean(used / limit for _, used in points)
    spread = math.fsum((size - centre) ** 2 for size, _ in points)
    slope = math.fsum((size - centre) * (used / limit - mean) for size, used in points) / spread
    misfit = math.fsum((used / limit - mean - slope * (size - centre)) ** 2 for size, used in points)

    def survival(noise: float, doubt: float) -> Survival:
        def fits(size: float) -> float:
            variance = noise**2 * (1 / count + (size - centre) ** 2 / spread) + doubt**2
            return _heavy_tailed((1 - mean - slope * (size - centre)) / math.sqrt(variance))

        return fits

    finest = _NOISE_LEVELS[0][0]
    for noise, prior in _NOISE_LEVELS:
        evidence = noise / finest * ((finest**2 + misfit) / (noise**2 + misfit)) ** ((count - 1) / 2)
        for doubt, share in _LIMIT_DOUBT:
            yield prior * evidence * share, survival(noise, doubt)


def _clipped(share: float) -> float:
    """A share of the limit within bounds that arithmetic stands: a wild estimate may expect anything, also below 0."""
    return max(-_FAR, min(share, _FAR))


@dataclass(frozen=True)
class _Bend:
    """What is known of ``used = level + tilt * (curve - 1)``, in shares of the limit: a normal distribution of both.

    ``level`` is what is really used where the estimate's curve meets the limit, ``tilt`` how much steeper the real
    curve is.
    """

    level: float
    tilt: float
    var_level: float
    var_tilt: float
    covariance: float = 0.0
    log_evidence: float = 0.0

    def told(self, curve: float, used: float, noise: float) -> _Bend:
        """The same after one more measurement (a Kalman filter's step)."""
        arm = curve - 1
        gain_level = self.var_level + arm * self.covariance
        gain_tilt = self.covariance + arm * self.var_tilt
        variance = max(gain_level + arm * gain_tilt, 0.0) + noise**2
        surprise = used - self.level - arm * self.tilt
        return replace(
            self,
            level=self.level + gain_level / variance * surprise,
            tilt=self.tilt + gain_tilt / variance * surprise,
            var_level=max(0.0, self.var_level - gain_level**2 / variance),
            var_tilt=max(0.0, self.var_tilt - gain_tilt**2 / variance),
            covariance=self.covariance - gain_level * gain_tilt / variance,
            log_evidence=self.log_evidence - 0.5 * (math.log(variance) + surprise**2 / variance),
        )

    def free(self, curve: float) -> tuple[float, float]:
        """The share of the limit that stays free where the estimate says ``curve``, and its variance."""
        arm = curve - 1
        variance = self.var_level + 2 * arm * self.covariance + arm**2 * self.var_tilt
        return 1 - self.level - arm * self.tilt, max(0.0, variance)


@dataclass(frozen=True)
class _Seen:
    """One measurement, in shares of the limit.

    Attributes:
        curve: what the estimate says there.
        used: what was measured.
        noise: of this measurement, besides that of all.
        cut_off: whether the limit may have cut the peak off, where something may be given up.
    """

    curve: float
    used: float
    noise: float = 0.0
    cut_off: bool = False

    def tell(self, bend: _Bend, noise: float) -> _Bend:
        """``bend`` after this measurement."""
        return bend.told(_clipped(self.curve), _clipped(self.used), math.hypot(noise, self.noise))

    def tell_elastic(self, bend: _Bend, noise: float) -> _Bend:
        """``bend`` after this measurement, which adds nothing where less was taken than the work asked for."""
        if self.cut_off and 1 - bend.free(_clipped(self.curve))[0] >= self.used:
            return replace(bend, log_evidence=bend.log_evidence + _CUT_OFF_EVIDENCE)
        return self.tell(bend, noise)


@dataclass(frozen=True)
class _Way:
    """One way the estimate may be off: its weight, the noise of measurements, what is given up, and the bent curve."""

    prior: float
    noise: float
    give: float
    bend: _Bend

    def survival(self, curve: Curve, limit: int, doubt: float) -> Survival:
        """Where this curve meets the limit, and what can be given up beyond it."""

        def fits(size: float) -> float:
            free, variance = self.bend.free(_clipped(curve(size) / limit))
            return _heavy_tailed((free + self.give) / math.sqrt(variance + self.noise**2 + doubt**2))

        return fits


def _bent_curves(
    seen: Sequence[_Seen], limit: int, curve: Curve, gives: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, Survival]]:
    """Where the curve, bent to what was seen, meets the limit: for each level of noise, error, doubt and give."""
    ways = [
        _Way(likely * prior * share, noise, give, _bent(seen, off, tilted, noise, elastic=give > 0))
        for off, tilted, likely in _ESTIMATE_ERRORS
        for noise, prior in _NOISE_LEVELS
        for give, share in gives
    ]
    most = max(way.bend.log_evidence for way in ways)
    for way in ways:
        for doubt, share in _LIMIT_DOUBT:
            yield way.prior * math.exp(way.bend.log_evidence - most) * share, way.survival(curve, limit, doubt)


def _bent(seen: Sequence[_Seen], off: float, tilted: float, noise: float, *, elastic: bool) -> _Bend:
    bend = _Bend(level=1.0, tilt=1.0, var_level=off**2, var_tilt=tilted**2)
    for one in seen:
        bend = one.tell_elastic(bend, noise) if elastic else one.tell(bend, noise)
    return bend
