"""The search for the largest micro-batch that fits. Pure ask/tell: sizes and outcomes in, the next size out.

**Assumption.** Fitting is monotone: if a size fits, every smaller one does. A fit at one candidate and a failure at the
next then prove the answer. What is told is checked against this: after a contradiction the search warns, and answers
below the smallest failure.

**Belief.** Peak memory is taken to be affine in the size (intercept: parameters, gradients, optimizer state; slope:
activations of a sample) above a floor that does not depend on it. The fits measured so far give a line, the place where
it meets the limit is the likely answer, and the misfit of the line says how likely. No measurement is trusted
absolutely: a part of the belief allows for a limit that is effectively lower or higher (fragmentation, a biased
measurement), a part knows nothing but the bracket.

**Choice.** The next size is the one whose chance to fit is nearest to what pays best when an OOM costs three fits. A
sharp belief thus asks for the expected answer and then for the size above it; a vague one takes long, cautious steps.

**Guarantee.** The answer is exact for every monotone workload, whatever the memory figures say: they only choose the
order of probes, and only while doubling and halving could still end within ``2 * ceil(log2(candidates)) + 7`` probes.

All state is a function of the results told, so a search is rebuilt by telling a new one what was recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from tuner.errors import SearchError
from tuner.results import Outcome, ProbeResult, Proof

_FIT_CHANCE = 0.6823
"""Chance to fit of the size worth asking for when an OOM costs three fits. A search is a code with symbols that last 1
(fit) and 3 (OOM): it carries most when the chance ``p`` of the short one solves ``p + p**3 = 1`` (Shannon 1948)."""
_NOISE_LEVELS = ((3e-5, 0.5), (3e-4, 0.2), (3e-3, 0.2), (3e-2, 0.1))
"""Noise of a measured peak as a share of the limit, and how likely each level is beforehand. CUDA peaks lie within
0.05 % (typically) to 0.34 % of a line and the peak of a CPU process within 0.9 %; many are exact."""
_LIMIT_DOUBT = ((0.0, 0.9), (0.05, 0.1))
"""How far the limit that counts may be from the nominal one, and how likely: fragmentation takes 0 to 12 %."""
_IGNORANCE = 0.02
"""Share of the belief that no memory figure can move: a cliff, a jump, a limit of another kind."""
_PREDICTION_SHARE, _PREDICTION_ERROR = 0.3, 0.03
"""Weight of a prediction, and its typical relative error (published estimators reach a median of 2.5 % to 3.6 %)."""
_SURE_SHARE = 0.98
"""Share of the limit that a first jump may fill: leaves room for 2 % noise."""
_GOOD_JUMP = 4
"""A jump that surely fits is taken when it is at least this many times the measured size: it then gives the slope."""
_FLAT = 1e-4
"""A rise below this share is none: the floor, or noise."""
_KINK = 0.8
"""A rise of less than this share of the later one belongs to another piece of the memory curve (a floor's end)."""
_LEVER = 1.1
"""How many times the size a later measurement must have for a kink to be told from noise."""
_SLACK_PROBES = 6
"""Probes the memory figures may waste before doubling and halving take over."""

_Survival = Callable[[float], float]
"""The chance that the candidate of this index fits."""
_Belief = list[tuple[float, _Survival]]
"""Weighted ways the answer may lie."""
_Point = tuple[int, int]
"""Index of a candidate that fits, and its measured peak in bytes."""


@dataclass(frozen=True)
class SearchSpace:
    """The sizes worth probing: multiples of ``granularity`` up to ``bound`` (``bound`` itself where it is smaller).

    ``limit_bytes`` is the memory a probe may take, if known. ``prediction`` is the largest size an estimate expects to
    fit: it is probed first. A wrong one costs probes, never correctness.

    Raises:
        SearchError: when a number is below 1.
    """

    bound: int
    bound_reason: str
    granularity: int = 1
    limit_bytes: int | None = None
    prediction: int | None = None

    def __post_init__(self) -> None:
        if self.bound < 1 or self.granularity < 1:
            raise SearchError(f"bound and granularity must be at least 1, got {self.bound} and {self.granularity}")

    @property
    def count(self) -> int:
        """Number of candidates."""
        return max(1, self.bound // self.granularity)

    def size(self, index: int) -> int:
        """The candidate of an index from 1 to ``count``."""
        return min(index * self.granularity, self.bound)

    def index(self, size: int) -> int:
        """The index of a candidate.

        Raises:
            SearchError: when the size is no candidate.
        """
        index = -(-size // self.granularity)
        if not 1 <= index <= self.count or self.size(index) != size:
            raise SearchError(
                f"micro-batch {size} is not among the sizes searched: multiples of {self.granularity} from "
                f"{self.size(1)} to {self.size(self.count)}"
            )
        return index

    @property
    def predicted_index(self) -> int | None:
        """The candidate at or below the prediction, or the nearest one."""
        if self.prediction is None:
            return None
        return min(max(self.prediction // self.granularity, 1), self.count)


@dataclass(frozen=True)
class Failure:
    """The search cannot end: a probe failed for a reason that is no matter of size."""

    reason: str
    message: str


class MicroBatchSearch:
    """Finds the largest size of a space that fits, and proves it.

    Ask, probe, tell, until ``ask`` returns none: ``verdict`` then holds. Recorded results may be told without asking,
    to rebuild a search: the next ask depends on nothing but what was told.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self._fits: dict[int, ProbeResult] = {}
        self._failures: dict[int, ProbeResult] = {}
        self._lost: Counter[int] = Counter()
        self._failure: Failure | None = None
        self._budget = _Bracket(0, space.count + 1, failed=False).worst_case() + _SLACK_PROBES

    def ask(self) -> int | None:
        """The next size to probe, or none when the search is over. Asking again without telling gives the same."""
        return None if self.verdict is not None else self.space.size(self._next_index())

    def tell(self, result: ProbeResult) -> None:
        """Take in what a probe found.

        Raises:
            SearchError: when the size is none of the space's.
        """
        index = self.space.index(result.micro_batch_size)
        if result.outcome is Outcome.FIT:
            self._fits[index] = result
        elif result.outcome in (Outcome.OOM, Outcome.INVALID_SIZE):
            self._failures.setdefault(index, result)
        elif result.outcome is Outcome.LOST:
            self._lost[index] += 1
            if self._lost[index] > 1 and self._failure is None:
                self._failure = _failure(result)
        elif self._failure is None:
            self._failure = _failure(result)

    @property
    def verdict(self) -> Proof | Failure | None:
        """The proven answer, or why there is none; nothing while the search goes on."""
        if self._failure is not None:
            return self._failure
        return self._proof() if self._bracket.closed else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was told against the assumption that fitting is monotone."""
        if not self._failures:
            return ()
        smallest = min(self._failures)
        return tuple(
            f"Micro-batch {self.space.size(index)} fits although {self.space.size(smallest)} failed "
            f"({self._failures[smallest].outcome}): memory does not grow with the size, or something else takes memory "
            "from time to time. The answer stays below the smallest size that failed."
            for index in sorted(self._fits)
            if index >= smallest
        )

    @property
    def _bracket(self) -> _Bracket:
        """The largest fit below the smallest failure, and that failure."""
        high = min(self._failures, default=self.space.count + 1)
        low = max((index for index in self._fits if index < high), default=0)
        return _Bracket(low, high, failed=bool(self._failures))

    def _proof(self) -> Proof:
        low, high = self._bracket.low, self._bracket.high
        fits = self.space.size(low) if low else 0
        if high not in self._failures:
            statement = f"{fits} fits, and no larger size is searched: the bound is {self.space.bound}"
            return Proof(fits=fits, stopped_by="bound", statement=f"{statement} ({self.space.bound_reason}).")
        failure = self._failures[high]
        invalid = failure.outcome is Outcome.INVALID_SIZE
        failed = f"{self.space.size(high)}, {'is not a valid size' if invalid else 'ran out of memory'}"
        start = f"{fits} fits and the next size, " if fits else "No micro-batch fits: the smallest size, "
        return Proof(
            fits=fits,
            stopped_by="invalid-size" if invalid else "oom",
            next_size=self.space.size(high),
            statement=f"{start}{failed}{f' ({failure.message})' if failure.message else ''}.",
        )

    def _next_index(self) -> int:
        """What the belief asks for, unless the probes that may then be needed exceed the budget."""
        bracket = self._bracket
        wanted = self._wanted_index(bracket)
        spent = len(self._fits) + len(self._failures) + 1
        return wanted if spent + bracket.worst_case_after(wanted) <= self._budget else bracket.middle

    def _wanted_index(self, bracket: _Bracket) -> int:
        if not self._fits:
            return 1 if self._failures else self._first_index()
        points = self._points(bracket.low)
        if len(points) == 1 and _GOOD_JUMP * bracket.low <= (jump := self._sure_index(points[0])) < bracket.high:
            return int(jump)
        index = _nearest_to_fit_chance(bracket, self._belief(points))
        unanchored = self.space.limit_bytes and len(self._fits) == len(points) == 1 and 1 not in self._fits
        return 1 if unanchored and index > bracket.low + 1 else index

    def _first_index(self) -> int:
        """The prediction, or the smallest size: it tells at once whether any fits. Of two sizes, the larger."""
        return self.space.predicted_index or (1 if self.space.count > 2 else self.space.count)  # noqa: PLR2004

    def _points(self, low: int) -> list[_Point]:
        """The rising part of the measured memory, by size."""
        measured = {index: fit.used_bytes for index, fit in self._fits.items() if index <= low}
        return _rising(sorted((index, used) for index, used in measured.items() if used))

    def _sure_index(self, point: _Point) -> float:
        """Where the memory fills its sure share if all of it that is not known to be resident grows with the size."""
        index, used = point
        known = [fit.resident_bytes for fit in self._fits.values() if fit.resident_bytes is not None]
        resident = min(known, default=0)
        return index * (_SURE_SHARE * (self.space.limit_bytes or 0) - resident) / max(used - resident, 1)

    def _belief(self, points: list[_Point]) -> _Belief:
        """Where the answer may lie, before the outcomes of the bracket are taken into account."""
        limit, end = self.space.limit_bytes, 2 * self.space.count
        belief: _Belief = [(_IGNORANCE, _anywhere(0.5, end))]
        if limit and len(points) == 1:
            start = max(self._sure_index(points[0]), points[0][0])
            belief.append((1 - _IGNORANCE, _anywhere(min(start, end - 1), end)))
        elif limit and points:
            belief.extend(((1 - _IGNORANCE) * weight, survival) for weight, survival in _lines(points, limit))
        predicted = self.space.predicted_index
        if predicted is None:
            return belief
        weighted = [((1 - _PREDICTION_SHARE) * weight, survival) for weight, survival in belief]
        return [*weighted, (_PREDICTION_SHARE, _near(predicted))]


@dataclass(frozen=True)
class _Bracket:
    """The answer is at least ``low`` (0: none may fit) and below ``high``: it failed, or is past the last candidate."""

    low: int
    high: int
    failed: bool

    @property
    def closed(self) -> bool:
        return self.high - self.low == 1

    @property
    def middle(self) -> int:
        """The next probe of doubling and halving."""
        return (self.low + self.high) // 2 if self.failed else min(max(2 * self.low, 1), self.high - 1)

    def worst_case(self) -> int:
        """The most probes that doubling and halving take from here."""
        halvings = (self.high - self.low - 1).bit_length()
        if self.failed or self.closed:
            return halvings
        last = self.high - 1
        doublings = (-(-last // max(self.low, 1)) - 1).bit_length()
        return (self.low == 0) + doublings + (last - 1).bit_length()

    def worst_case_after(self, index: int) -> int:
        """The same once ``index`` was probed, for the worse outcome. Below the bracket a probe does not change it."""
        if index <= self.low:
            return self.worst_case()
        fit = _Bracket(index, self.high, self.failed)
        return max(fit.worst_case(), _Bracket(self.low, index, failed=True).worst_case())


def _nearest_to_fit_chance(bracket: _Bracket, belief: _Belief) -> int:
    """The index inside the bracket whose chance to fit, given the bracket, is nearest to the one that pays best."""
    beyond = [survival(bracket.high) if bracket.failed else 0.0 for _, survival in belief]

    def mass_from(index: int) -> float:
        return sum(
            weight * max(0.0, survival(index) - rest) for (weight, survival), rest in zip(belief, beyond, strict=True)
        )

    target = _FIT_CHANCE * mass_from(bracket.low)
    low, high = bracket.low, bracket.high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if mass_from(middle) >= target else (low, middle)
    inside = [index for index in (low, high) if bracket.low < index < bracket.high]
    return min(inside, key=lambda index: abs(mass_from(index) - target))


def _anywhere(start: float, end: float) -> _Survival:
    """The answer is at least ``start``, and then of any order of magnitude up to ``end``."""
    return lambda index: 1.0 if index <= start else max(0.0, math.log(end / index) / math.log(end / start))


def _near(predicted: int) -> _Survival:
    """The answer is near a prediction."""
    return lambda index: _heavy_tailed(math.log(predicted / max(index, 0.5)) / _PREDICTION_ERROR)


def _heavy_tailed(deviations: float) -> float:
    """The Cauchy distribution: after a surprise the next step is longer, in proportion to the surprise."""
    return 0.5 + math.atan(deviations) / math.pi


def _rising(points: list[_Point]) -> list[_Point]:
    """The points of the last affine piece: without those that lie on a floor, or before a kink of the memory curve."""
    while len(points) > 1 and (_is_flat(points) or _has_kink(points)):
        points = points[1:]
    return points


def _is_flat(points: list[_Point]) -> bool:
    return min(points[1][1], points[-1][1]) <= points[0][1] * (1 + _FLAT)


def _has_kink(points: list[_Point]) -> bool:
    (first, first_used), (second, second_used), (last, last_used) = points[0], points[1], points[-1]
    if last < _LEVER * second:
        return False
    return (second_used - first_used) / (second - first) < _KINK * (last_used - second_used) / (last - second)


def _lines(points: list[_Point], limit: int) -> Iterator[tuple[float, _Survival]]:
    """Where the line through the points meets the limit, for each level of noise and of doubt in the limit.

    A least-squares line; a level's weight is how well it explains the misfit. In shares of the limit throughout.
    """
    count, centre = len(points), fmean(index for index, _ in points)
    mean = fmean(used / limit for _, used in points)
    spread = math.fsum((index - centre) ** 2 for index, _ in points)
    slope = math.fsum((index - centre) * (used / limit - mean) for index, used in points) / spread
    misfit = math.fsum((used / limit - mean - slope * (index - centre)) ** 2 for index, used in points)

    def survival(noise: float, doubt: float) -> _Survival:
        def chance(index: float) -> float:
            variance = noise**2 * (1 / count + (index - centre) ** 2 / spread) + doubt**2
            return _heavy_tailed((1 - mean - slope * (index - centre)) / math.sqrt(variance))

        return chance

    finest = _NOISE_LEVELS[0][0]
    for noise, prior in _NOISE_LEVELS:
        evidence = noise / finest * ((finest**2 + misfit) / (noise**2 + misfit)) ** ((count - 1) / 2)
        for doubt, share in _LIMIT_DOUBT:
            yield prior * evidence * share, survival(noise, doubt)


_REMEDIES = {
    Outcome.ERROR: ("workload-error", "failed", "This is no matter of memory: mend the workload, then tune again."),
    Outcome.TIMED_OUT: (
        "probe-timed-out",
        "did not end within its time",
        "Raise probe_timeout_seconds if the workload is slow; otherwise look for what it waits for.",
    ),
    Outcome.LOST: (
        "probe-lost",
        "was ended from outside, twice",
        "Look for what ends processes on this host (a scheduler, the kernel, an operator), then tune again.",
    ),
}


def _failure(result: ProbeResult) -> Failure:
    reason, event, remedy = _REMEDIES[result.outcome]
    said = ": ".join(part for part in (result.error_type, result.message) if part) or "it left no message"
    where = f"in phase {result.phase} after {result.seconds.total:.0f} s"
    return Failure(reason, f"The probe of micro-batch {result.micro_batch_size} {event} {where}: {said}. {remedy}")
