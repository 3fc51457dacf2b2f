"""The search for the largest micro-batch that fits. Pure ask/tell: sizes and outcomes in, the next size out.

**Assumption.** Fitting is monotone: if a size fits, every smaller one does. A fit at one candidate and a failure at the
next then prove the answer. What is told is checked against this: after a contradiction the search warns, and answers
below the smallest failure. A size of one that fails by an error is taken for a special case (BatchNorm over a single
value) until a larger one fails likewise. A size above a fit that cannot be judged (its probe times out, fails by an
error, or is lost again and again) bounds the search: what fits is an answer, and the proof says where it ends.

**Belief.** Peak memory is taken to be affine in the size (intercept: parameters, gradients, optimizer state; slope:
activations of a sample) above a floor that does not depend on it, or to follow the curve of an estimate where there is
one. The fits measured so far give a line, or bend the curve; the place where it meets the limit is the likely answer,
and the misfit says how likely (``tuner.planning.posterior``).

**Choice.** The next size is the one whose chance to fit is nearest to what pays best when an OOM costs three fits. A
sharp belief thus asks for the expected answer and then for the size above it; a vague one takes long, cautious steps.

**Guarantee.** The answer is exact for every monotone workload, whatever the memory figures say: they only choose the
order of probes, and only while doubling and halving could still end within ``2 * ceil(log2(candidates)) + 7`` probes.

All state is a function of the results told, so a search is rebuilt by telling a new one what was recorded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tuner.errors import SearchError
from tuner.planning.posterior import (
    FIRST_CHANCE,
    FIT_CHANCE,
    Belief,
    Bracketed,
    Point,
    believed,
    chance,
    expected,
    rising,
)
from tuner.schemas.recommendation import Proof
from tuner.schemas.results import ExpectedPeaks, Outcome, Phase, ProbeResult

_SURE_SHARE = 0.98
"""Share of the limit that a first jump may fill: leaves room for 2 % noise."""
_GOOD_JUMP = 4
"""A jump that surely fits is taken when it is at least this many times the measured size: it then gives the slope."""
_SLACK_PROBES = 6
"""Probes the memory figures may waste before doubling and halving take over."""
_NEAR_ENOUGH = 0.9
"""A fit of this share of a size that cannot be judged is an answer: each further try may cost the whole time limit."""
_MOST_ENDED = 3
"""Sizes that cannot be judged: after as many the largest fit is the answer."""


@dataclass(frozen=True)
class SearchSpace:
    """The sizes worth probing: multiples of ``granularity`` up to ``bound`` (``bound`` itself where it is smaller).

    Attributes:
        bound: the largest size that is of use.
        bound_reason: why, in words.
        granularity: see above.
        limit_bytes: the memory a probe may take, if known.
        expected: what an estimate says of the memory curve. A wrong one costs probes, never correctness.
        elastic: whether a part of what a probe measures may be given up where memory is short, as a process's libraries
            do. It changes the order of probes alone.
        sizes: the only sizes worth probing, by rising size up to ``bound`` at most; ``granularity`` is 1 then.

    Raises:
        SearchError: when a number is below 1, or the sizes are none, do not rise, or go beyond the bound.
    """

    bound: int
    bound_reason: str
    granularity: int = 1
    limit_bytes: int | None = None
    expected: ExpectedPeaks | None = None
    sizes: tuple[int, ...] | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.bound < 1 or self.granularity < 1:
            raise SearchError(f"bound and granularity must be at least 1, got {self.bound} and {self.granularity}")
        if self.sizes is None:
            return
        rises = all(low < high for low, high in pairwise((0, *self.sizes)))
        if not self.sizes or not rises or self.sizes[-1] > self.bound or self.granularity > 1:
            raise SearchError(
                f"sizes must rise from 1 or more to at most {self.bound}, with a granularity of 1, got "
                f"{list(self.sizes)} and {self.granularity}"
            )

    @property
    def count(self) -> int:
        """Number of candidates."""
        return len(self.sizes) if self.sizes else max(1, self.bound // self.granularity)

    def size(self, index: int) -> int:
        """The candidate of an index from 1 to ``count``; 0 for 0."""
        return (0, *self.sizes)[index] if self.sizes else min(index * self.granularity, self.bound)

    def index(self, size: int) -> int:
        """The index of a candidate.

        Raises:
            SearchError: when the size is no candidate.
        """
        index = bisect_left(self.sizes, size) + 1 if self.sizes else -(-size // self.granularity)
        if not 1 <= index <= self.count or self.size(index) != size:
            kinds = f"{self.count} sizes" if self.sizes else f"multiples of {self.granularity}"
            raise SearchError(
                f"micro-batch {size} is not among the sizes searched: {kinds} from {self.size(1)} to "
                f"{self.size(self.count)}"
            )
        return index

    def at_most(self, size: float) -> int:
        """The index of the largest candidate of at most ``size``; 0 when none is."""
        if self.sizes:
            return bisect_right(self.sizes, size)
        return min(int(size) // self.granularity, self.count) if size < self.bound else self.count


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
        self._ended: dict[int, ProbeResult] = {}
        """Probes above a fit that could not tell whether their size fits: out of time, in an error, or lost twice."""
        self._failure: Failure | None = None
        self._failed_at_one: ProbeResult | None = None
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
            if self._lost[index] > 1:
                self._end_at(index, result)
        elif not self._is_special(result):
            self._end_at(index, result)

    def _end_at(self, index: int, result: ProbeResult) -> None:
        """A size that cannot be judged bounds the search where a smaller one fits; else it is the end of the search."""
        if _may_be_of_its_size(result) and any(fit < index for fit in self._fits):
            self._ended.setdefault(index, result)
        elif self._failure is None:
            self._failure = _failure(result)

    def _is_special(self, result: ProbeResult) -> bool:
        """Whether an error is that of running a size of one, which says nothing of the larger ones; it is kept then."""
        runs = result.phase in {Phase.WARMUP, Phase.MEASURE}
        first = self._failed_at_one is None and result.micro_batch_size == 1 and self.space.count > 1
        if runs and first and result.outcome is Outcome.ERROR:
            self._failed_at_one = result
        return result is self._failed_at_one

    @property
    def verdict(self) -> Proof | Failure | None:
        """The proven answer, or why there is none; nothing while the search goes on."""
        if self._failure is not None:
            return self._failure
        if not self._bracket.closed and not self._gives_up:
            return None
        if self._failed_at_one is not None and not self._fits:
            return self._nothing_runs(self._failed_at_one)
        return self._proof()

    def _nothing_runs(self, at_one: ProbeResult) -> Failure:
        """A size of one raises, and no larger one fits."""
        failure = _failure(at_one)
        also = f" Nothing larger can stand in for it: {self.space.size(self._bracket.high)} does not fit."
        return Failure(failure.reason, failure.message + also) if self._failures else failure

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was told against the assumption that fitting is monotone."""
        found = []
        if self._failed_at_one is not None and self._fits:
            found.append(f"A micro-batch of 1 fails, though larger ones fit: {self._failed_at_one.message}")
        if not self._failures:
            return tuple(found)
        smallest = min(self._failures)
        return *found, *(
            f"Micro-batch {self.space.size(index)} fits although {self.space.size(smallest)} failed "
            f"({self._failures[smallest].outcome}): memory does not grow with the size, or something else takes memory "
            "from time to time. The answer stays below the smallest size that failed."
            for index in sorted(self._fits)
            if index >= smallest
        )

    @property
    def _bracket(self) -> _Bracket:
        """The largest fit below the smallest size that failed or cannot be judged; above a special size of one."""
        high = min((*self._failures, *self._ended), default=self.space.count + 1)
        low = max((index for index in self._fits if index < high), default=int(self._failed_at_one is not None))
        return _Bracket(low, high, failed=bool(self._failures or self._ended))

    @property
    def _gives_up(self) -> bool:
        """Return whether a size that cannot be judged is near enough to the largest fit, or one of too many."""
        bracket = self._bracket
        if bracket.high not in self._ended or bracket.low not in self._fits:
            return False
        near = self.space.size(bracket.low) >= _NEAR_ENOUGH * self.space.size(bracket.high)
        return near or len(self._ended) >= _MOST_ENDED

    def _proof(self) -> Proof:
        low, high = self._bracket.low, self._bracket.high
        fits = self.space.size(low) if low else 0
        if high in self._ended:
            return self._unjudged(low, high, self._ended[high])
        if high not in self._failures:
            statement = f"{fits} fits, and larger sizes were not tried: the bound is {self.space.bound}"
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

    def _unjudged(self, low: int, high: int, ended: ProbeResult) -> Proof:
        """The largest fit, below a size of which no probe could tell whether it fits."""
        stopped_by, event, remedy = _UNJUDGED[ended.outcome]
        between = f" Sizes between {self.space.size(low)} and {self.space.size(high)} were not tried."
        statement = (
            f"{self.space.size(low)} fits. Whether {self.space.size(high)} does is not known: its probe {event}"
            f"{f' ({ended.message})' if ended.message else ''}.{between if high - low > 1 else ''} {remedy}"
        )
        return Proof(
            fits=self.space.size(low), stopped_by=stopped_by, next_size=self.space.size(high), statement=statement
        )

    def _next_index(self) -> int:
        """What the belief asks for, unless the probes that may then be needed exceed the budget."""
        bracket = self._bracket
        wanted = self._wanted_index(bracket)
        spent = len(self._fits) + len(self._failures) + len(self._ended) + 1
        return wanted if spent + bracket.worst_case_after(wanted) <= self._budget else bracket.middle

    def _wanted_index(self, bracket: _Bracket) -> int:
        limit, end = self.space.limit_bytes, 2 * self.space.bound
        if limit and (estimate := self.space.expected) is not None:
            measured, surplus = self._measured(bracket.low), self._surplus(estimate)
            belief = expected(measured, limit, end, estimate.used_bytes, surplus, elastic=self.space.elastic)
            return self._led_by(self._bracketed(bracket, belief))
        if not self._fits:
            return bracket.low + 1 if bracket.failed or bracket.low else self._first_index()
        points = rising(self._measured(bracket.low))
        start = self._sure_size(points[0]) if points else None
        if len(points) == 1 and start and _GOOD_JUMP * points[0][0] <= start:
            jump = self.space.at_most(start)
            if bracket.low < jump < bracket.high:
                return jump
        return self._bracketed(bracket, believed(points, limit, end, start)).nearest_to(FIT_CHANCE)

    def _bracketed(self, bracket: _Bracket, belief: Belief) -> Bracketed:
        return Bracketed(bracket.low, bracket.high, bracket.failed, belief, self.space.size)

    def _led_by(self, estimate: Bracketed) -> int:
        """What an estimate leads to: first a size that likely fits; a far smaller one when two of them did not.

        Not the smallest, unless nothing else is likely: it has least to tell, and BatchNorm may not take it.
        """
        if self._fits:
            return estimate.nearest_to(FIT_CHANCE)
        smallest = estimate.low + 1
        if chance(estimate.belief, self.space.size(smallest)) < FIT_CHANCE:
            return smallest
        if len(self._failures) > 1:
            return max(smallest, estimate.high // _GOOD_JUMP)
        return estimate.nearest_to(FIT_CHANCE if self._failures else FIRST_CHANCE)

    def _first_index(self) -> int:
        """The smallest size: it tells at once whether any fits. Of two sizes, the larger."""
        return 1 if self.space.count > 2 else self.space.count  # noqa: PLR2004

    def _measured(self, low: int) -> list[Point]:
        """Sizes up to the candidate ``low``, and their memory."""
        measured = {self.space.size(index): fit.used_bytes for index, fit in self._fits.items() if index <= low}
        return sorted((size, used) for size, used in measured.items() if used)

    def _surplus(self, estimate: ExpectedPeaks) -> int | None:
        """How many bytes more are held between updates than the estimate said."""
        known = [fit.resident_bytes for fit in self._fits.values() if fit.resident_bytes is not None]
        return min(known) - estimate.resident_bytes if known and estimate.resident_bytes is not None else None

    def _sure_size(self, point: Point) -> float:
        """Where the memory fills its sure share if all of it that is not known to be resident grows with the size."""
        size, used = point
        known = [fit.resident_bytes for fit in self._fits.values() if fit.resident_bytes is not None]
        resident = min(known, default=0)
        return max(size * (_SURE_SHARE * (self.space.limit_bytes or 0) - resident) / max(used - resident, 1), size)


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


_UNJUDGED: dict[Outcome, tuple[Literal["timeout", "error", "lost"], str, str]] = {
    Outcome.TIMED_OUT: (
        "timeout",
        "did not end within its time",
        "Raise probe_timeout_seconds to try larger sizes.",
    ),
    Outcome.ERROR: (
        "error",
        "failed for another reason than memory",
        "Look at its error, and tune again to try larger sizes.",
    ),
    Outcome.LOST: (
        "lost",
        "was ended from outside, twice",
        "Look for what ends processes on this host, and tune again to try larger sizes.",
    ),
}
"""How a search is stopped by a probe above a fit: the word for it, the event, and the remedy."""

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


def _may_be_of_its_size(result: ProbeResult) -> bool:
    """Tell whether a smaller size may do although this probe failed: not for an error before the first update."""
    return result.outcome is not Outcome.ERROR or result.phase in {Phase.WARMUP, Phase.MEASURE}


def _failure(result: ProbeResult) -> Failure:
    reason, event, remedy = _REMEDIES[result.outcome]
    said = ": ".join(part for part in (result.error_type, result.message) if part) or "it left no message"
    where = f"in phase {result.phase} after {result.seconds.total:.0f} s"
    return Failure(reason, f"The probe of micro-batch {result.micro_batch_size} {event} {where}: {said}. {remedy}")
