"""The search for the largest micro-batch that fits. Pure ask/tell: sizes and outcomes in, the next size out.

**Assumption.** Fitting is monotone: if a size fits, every smaller one does. A fit at one candidate and a failure at the
next then prove the answer. Results are checked against this: after a contradiction the search warns, and answers below
the smallest failure. A size of one that fails by an error is taken for a special case (BatchNorm over a single
value) until a larger one fails likewise. A size above a fit that cannot be judged (its probe times out, fails by an
error, or is lost again and again) bounds the search: the largest fit is the answer, and the proof says where it ends.

**Posterior.** Peak memory is taken to be affine in the size (intercept: parameters, gradients, optimizer state; slope:
activations of a sample) above a floor that does not depend on it, or to follow the curve of an estimate where there is
one. The fits measured so far give a line, or calibrate the estimate; the place where the curve meets the limit is the
likely answer, and the misfit says how likely (``tuner.planning.posterior``).

**Choice.** The next size is the one whose probability to fit is nearest to what pays best when an OOM costs three fits.
A sharp posterior thus asks for the expected answer and then for the size above it; a vague one takes long, cautious
steps.

**Guarantee.** The answer is exact for every monotone workload, whatever the memory figures say: they only choose the
order of probes, and only while doubling and halving could still end within ``2 * ceil(log2(candidates)) + 7`` probes.

All state is a function of the results told, so a search is rebuilt by telling a new one what was recorded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tuner.planning.parameters import DEFAULT_PARAMETERS, SearchParameters
from tuner.planning.posterior import (
    BracketedPosterior,
    Point,
    Posterior,
    fit_probability,
    from_estimate,
    from_measurements,
    last_affine_piece,
)
from tuner.planning.search_space import SearchSpace
from tuner.schemas.recommendation import Proof
from tuner.schemas.results import ExpectedPeaks, Outcome, Phase, ProbeResult


@dataclass(frozen=True)
class Failure:
    """The search cannot end: a probe failed for a reason that is no matter of size."""

    reason: str
    message: str


class MicroBatchSearch:
    """Search for the largest size of a space that fits, with a proof.

    Ask, probe, tell, until ``ask`` returns none: ``verdict`` then holds. Recorded results may be told without asking,
    to rebuild a search: the next ask depends on nothing but the results told.
    """

    def __init__(self, space: SearchSpace, parameters: SearchParameters = DEFAULT_PARAMETERS) -> None:
        self.space = space
        self._parameters = parameters
        self._fits: dict[int, ProbeResult] = {}
        self._failures: dict[int, ProbeResult] = {}
        self._lost: Counter[int] = Counter()
        self._ended: dict[int, ProbeResult] = {}
        """Probes above a fit that could not tell whether their size fits: out of time, in an error, or lost twice."""
        self._failure: Failure | None = None
        self._failed_at_one: ProbeResult | None = None
        self._budget = _Bracket(0, space.count + 1, failed=False).worst_case() + parameters.slack_probes

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
        """Keep the first error of a size of one, which says nothing of larger sizes; return whether this is it."""
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
        """Results that contradict the assumption that fitting is monotone."""
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
        near = self.space.size(bracket.low) >= self._parameters.near_enough * self.space.size(bracket.high)
        return near or len(self._ended) >= self._parameters.most_unjudged

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
        """The size that the posterior asks for, unless the probes that may then be needed exceed the budget."""
        bracket = self._bracket
        wanted = self._wanted_index(bracket)
        spent = len(self._fits) + len(self._failures) + len(self._ended) + 1
        return wanted if spent + bracket.worst_case_after(wanted) <= self._budget else bracket.middle

    def _wanted_index(self, bracket: _Bracket) -> int:
        if self.space.limit_bytes and self.space.expected is not None:
            return self._index_by_estimate(bracket, self.space.expected, self.space.limit_bytes)
        if not self._fits:
            return bracket.low + 1 if bracket.failed or bracket.low else self._first_index()
        return self._index_by_measurements(bracket)

    def _index_by_measurements(self, bracket: _Bracket) -> int:
        """The next candidate where there is no estimate: a jump that surely fits, or what the line says."""
        parameters = self._parameters
        points = last_affine_piece(self._measured(bracket.low), parameters)
        start = self._sure_size(points[0]) if points else None
        if len(points) == 1 and start and parameters.good_jump * points[0][0] <= start:
            jump = self.space.at_most(start)
            if bracket.low < jump < bracket.high:
                return jump
        posterior = from_measurements(points, self.space.limit_bytes, 2 * self.space.bound, start, parameters)
        return self._bracketed(bracket, posterior).nearest_to(parameters.target_fit_probability)

    def _index_by_estimate(self, bracket: _Bracket, estimate: ExpectedPeaks, limit: int) -> int:
        """The next candidate by an estimate: one that likely fits; a far smaller one when two of them did not.

        Not the smallest, unless nothing else is likely: it has least to tell, and BatchNorm may not take it.
        """
        parameters = self._parameters
        posterior = from_estimate(
            self._measured(bracket.low),
            limit,
            2 * self.space.bound,
            estimate.used_bytes,
            self._surplus(estimate),
            elastic=self.space.elastic,
            parameters=parameters,
        )
        bracketed, target = self._bracketed(bracket, posterior), parameters.target_fit_probability
        if self._fits:
            return bracketed.nearest_to(target)
        smallest = bracket.low + 1
        if fit_probability(posterior, self.space.size(smallest)) < target:
            return smallest
        if len(self._failures) > 1:
            return max(smallest, bracket.high // parameters.good_jump)
        return bracketed.nearest_to(target if self._failures else parameters.first_fit_probability)

    def _bracketed(self, bracket: _Bracket, posterior: Posterior) -> BracketedPosterior:
        return BracketedPosterior(bracket.low, bracket.high, bracket.failed, posterior, self.space.size)

    def _first_index(self) -> int:
        """The smallest size: it tells at once whether any fits. Of two sizes, the larger."""
        return 1 if self.space.count > 2 else self.space.count  # noqa: PLR2004

    def _measured(self, low: int) -> list[Point]:
        """Sizes up to the candidate ``low``, and their memory."""
        measured = {self.space.size(index): fit.used_bytes for index, fit in self._fits.items() if index <= low}
        return sorted((size, used) for size, used in measured.items() if used)

    def _surplus(self, estimate: ExpectedPeaks) -> int | None:
        """Bytes held between updates beyond those of the estimate."""
        known = [fit.resident_bytes for fit in self._fits.values() if fit.resident_bytes is not None]
        return min(known) - estimate.resident_bytes if known and estimate.resident_bytes is not None else None

    def _sure_size(self, point: Point) -> float:
        """The size that fills the sure share if all memory that is not known to be resident grows with the size."""
        size, used = point
        known = [fit.resident_bytes for fit in self._fits.values() if fit.resident_bytes is not None]
        resident = min(known, default=0)
        return max(
            size * (self._parameters.sure_share * (self.space.limit_bytes or 0) - resident) / max(used - resident, 1),
            size,
        )


@dataclass(frozen=True)
class _Bracket:
    """Bounds of the answer: at least ``low`` (0: none may fit), below ``high`` (failed, or past the last candidate)."""

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
        """The most probes after one of ``index``, by the worse outcome; below the bracket a probe changes nothing."""
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
"""Stops of a search by a probe above a fit: the word in the proof, the event, and the remedy."""

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
    message = ": ".join(part for part in (result.error_type, result.message) if part) or "it left no message"
    where = f"in phase {result.phase} after {result.seconds.total:.0f} s"
    return Failure(reason, f"The probe of micro-batch {result.micro_batch_size} {event} {where}: {message}. {remedy}")
