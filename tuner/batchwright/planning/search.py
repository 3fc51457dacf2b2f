"""The search for the largest micro-batch that fits. Pure ask/tell: sizes and outcomes in, the next size out.

**Assumption.** Fitting is monotone: if a size fits, every smaller one does. A fit at one candidate and a failure at the
next then prove the answer. Results are checked against this: after a contradiction the search warns, and its answer is
below the smallest failure. A size of one that fails by an error is taken for a special case (BatchNorm over a single
value) until a larger one fails likewise. Any other size that fails by an error although another one ran is left out, as
one that the program refuses; the proof names it. A size above a fit whose probe is inconclusive (it times out, is lost
twice, or fails by an error after several that were left out) bounds the search: the largest fit is the answer.

**Posterior.** Peak memory is taken to be affine in the size (intercept: parameters, gradients, optimizer state; slope:
activations of a sample) above a floor that does not depend on it, or to follow the curve of an estimate where there is
one. The fits measured so far give a line, or calibrate the estimate; the place where the curve meets the limit is the
likely answer, and the misfit shows how likely (``batchwright.planning.posterior``). On a card this place is the one at
which replays in a simulation of the allocator ran out of memory (``ExpectedPeaks.usable_bytes``).

**Choice.** The next size is the one whose probability to fit is nearest to the optimum when an OOM costs three fits.
A sharp posterior thus leads to the expected answer and then to the size above it; a vague one to long, cautious steps.
The first size by replays, or by what earlier tunings taught, is the one from which the fewest probes are expected.

**Brackets.** A probe that made one update only (``ProbeResult.brackets``) narrows the search like any other. The size
that the search ends with is probed again if its fit was such a one: what is proven has made its two updates. A search
that is stopped before its end proves the largest size that has. Once two updates refute such a fit, no further probe
brackets, and after a second time with an OOM all fits of one update are dropped.

**Guarantee.** The answer is exact for every monotone workload, whatever the memory figures are: they only choose the
order of probes, and only while doubling and halving could still end within ``2 * ceil(log2(candidates)) + 7`` sizes.

All state is a function of the recorded results, so a search is rebuilt by telling a new one these results.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from batchwright.planning.parameters import PARAMETERS
from batchwright.planning.posterior import (
    BracketedPosterior,
    Point,
    Posterior,
    fit_probability,
    from_estimate,
    from_measurements,
    last_affine_piece,
)
from batchwright.planning.search_space import SearchSpace
from batchwright.schemas.recommendation import Proof, StopReason
from batchwright.schemas.residuals import EstimateCorrection
from batchwright.schemas.results import NEARLY_FULL, ExpectedPeaks, Outcome, Phase, ProbeResult
from batchwright.units import format_share


@dataclass(frozen=True)
class Failure:
    """The search failed: a probe failed for a reason unrelated to the size."""

    reason: str
    message: str


class MicroBatchSearch:
    """Search for the largest size of a space that fits, with a proof.

    Call ``ask``, probe, and call ``tell``, until ``ask`` returns none: ``verdict`` is then set. To rebuild a search,
    pass recorded results to ``tell`` without ``ask``: the next size depends only on the results.

    Args:
        space: the sizes.
        of_command: whether programs are probed, which may refuse a size of one before their first update.
    """

    def __init__(self, space: SearchSpace, *, of_command: bool = False) -> None:
        self.space = space
        self._of_command = of_command
        self._fits: dict[int, ProbeResult] = {}
        self._failures: dict[int, ProbeResult] = {}
        self._lost: Counter[int] = Counter()
        self._inconclusive: dict[int, ProbeResult] = {}
        """Inconclusive probes above a fit: timed out, lost twice, or failed by an error."""
        self._left_out: dict[int, ProbeResult] = {}
        """Probes that failed by an error, though another size ran."""
        self._refuted_brackets = 0
        self._failure: Failure | None = None
        self._failed_at_one: ProbeResult | None = None
        self.stopped_by: StopReason | Literal["quick"] | None = None
        """What ended the search before its end. Its answer is the largest fit so far, where there is one."""
        self._budget = _Bracket(0, space.count + 1, failed=False).worst_case() + PARAMETERS.slack_probes

    def ask(self) -> int | None:
        """The next size to probe, or none when the search is over. Repeated calls return the same size."""
        if self.verdict is not None:
            return None
        bracket = self._bracket
        if self._is_closed:
            return self.space.size(bracket.low)
        wanted = self._wanted_index(bracket)
        spent = len(self._fits) + len(self._failures) + len(self._inconclusive) + 1
        is_affordable = spent + bracket.worst_case_after(wanted) <= self._budget
        chosen = wanted if is_affordable else bracket.middle
        near = range(chosen - len(self._left_out), chosen + len(self._left_out) + 1)
        open_ = [index for index in near if bracket.low < index < bracket.high and index not in self._left_out]
        return self.space.size(min(open_, key=lambda index: abs(index - chosen), default=chosen))

    def tell(self, result: ProbeResult) -> None:
        """Record the result of a probe.

        Raises:
            SearchError: when the size is not a candidate of the space.
        """
        index = self.space.index(result.micro_batch_size)
        if result.outcome is Outcome.FIT:
            if not result.brackets or index not in self._fits:
                self._fits[index] = result
            return
        if result.outcome is not Outcome.LOST and index in self._fits and self._fits[index].brackets:
            del self._fits[index]  # two updates show more than one
            self._refuted_brackets += 1
            if self._refuted_brackets > 1 and result.outcome is Outcome.OOM:  # else smaller ones would end one by one
                self._fits = {at: fit for at, fit in self._fits.items() if not fit.brackets}
        if result.outcome in (Outcome.OOM, Outcome.INVALID_SIZE):
            self._failures.setdefault(index, result)
        elif result.outcome is Outcome.LOST:
            self._lost[index] += 1
            if self._lost[index] >= PARAMETERS.most_lost_probes:
                self._record_inconclusive(index, result)
        elif not self._is_special(result):
            self._record_inconclusive(index, result)

    def _record_inconclusive(self, index: int, result: ProbeResult) -> None:
        """Leave a size out, or bound the search by it where a smaller one fits; otherwise fail the search."""
        is_refused = result.outcome is Outcome.ERROR and not result.is_device_error and bool(self._fits)
        if is_refused and len(self._left_out) < PARAMETERS.most_inconclusive_sizes:
            self._left_out.setdefault(index, result)
        elif not result.is_device_error and any(fit < index for fit in self._fits):
            self._inconclusive.setdefault(index, result)
        elif self._failure is None:
            self._failure = _failure(result)

    def _is_special(self, result: ProbeResult) -> bool:
        """Keep the first error of a size of one, which does not bound larger sizes; return whether this is the one."""
        runs = result.phase in {Phase.WARMUP, Phase.MEASURE} or (self._of_command and result.phase is Phase.BUILD)
        first = self._failed_at_one is None and result.micro_batch_size == 1 and self.space.count > 1
        if runs and first and result.outcome is Outcome.ERROR and not result.fails_at_any_size:
            self._failed_at_one = result
        return result is self._failed_at_one

    @property
    def may_bracket(self) -> bool:
        """True while fits of one update narrow the search: until two updates refuted one."""
        return self._refuted_brackets == 0

    def may_end_with(self, size: int) -> bool:
        """Return whether a fit of a size would likely end the search: no larger one is expected to fit.

        That is so where the next size is known not to fit, or is beyond the limit by the line through the two largest
        fits. After one fit the line begins at what is resident, where that was measured; before one, an estimate tells.
        """
        index, bracket, limit = self.space.index(size), self._bracket, self.space.limit_bytes
        if index + 1 >= bracket.high or index <= bracket.low:
            return True
        points, estimate = self._measured(bracket.low)[-2:], self.space.expected
        if not points and estimate is not None and limit is not None:
            posterior = self._posterior_of(bracket, estimate, limit)
            return fit_probability(posterior, self.space.size(index + 1)) < PARAMETERS.last_size_probability
        if len(points) == 1 and self._resident_bytes:
            points.insert(0, (0, self._resident_bytes))
        if limit is None or len(points) < 2:  # noqa: PLR2004 - two points make a line
            return False
        (low, low_used), (high, high_used) = points
        slope = (high_used - low_used) / (high - low)
        return high_used + slope * (self.space.size(index + 1) - high) > limit

    @property
    def verdict(self) -> Proof | Failure | None:
        """The proof or the failure that ended the search; none while the search continues."""
        if self._failure is not None:
            return self._failure
        proven = [index for index, fit in self._fits.items() if index < self._bracket.high and not fit.brackets]
        is_open = not self._is_closed or (self._bracket.low in self._fits and self._bracket.low not in proven)
        if is_open and self.stopped_by and proven:
            fits = self.space.size(max(proven))
            early = "" if self.stopped_by == "quick" else "the tuning was stopped before "
            statement = f"{fits} fits, and {early}larger sizes were {'' if early else 'not '}tried."
            return Proof(fits=fits, stopped_by=self.stopped_by, statement=statement)
        if is_open:
            return None
        if self._failed_at_one is not None and not self._fits:
            failure = _failure(self._failed_at_one)
            also = f" No larger size works instead: {self.space.size(self._bracket.high)} does not fit."
            return Failure(failure.reason, failure.message + also) if self._failures else failure
        return self._proof()

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
            f"({self._failures[smallest].outcome}): memory does not grow with the size, or another process "
            "took memory for a while. The result stays below the smallest size that failed."
            for index in sorted(self._fits)
            if index >= smallest
        )

    @property
    def _bracket(self) -> _Bracket:
        """Bracket from the largest fit to the smallest size above it that failed or was inconclusive."""
        high = min((*self._failures, *self._inconclusive), default=self.space.count + 1)
        low = max((index for index in self._fits if index < high), default=int(self._failed_at_one is not None))
        return _Bracket(low, high, failed=bool(self._failures or self._inconclusive))

    @property
    def _is_closed(self) -> bool:
        """Return whether no size is left to try above the largest fit."""
        low, high = self._bracket.low, self._bracket.high
        return self._gives_up or high - low - 1 == sum(low < index < high for index in self._left_out)

    @property
    def _gives_up(self) -> bool:
        """Return whether the inconclusive size is close enough to the largest fit, or there are too many."""
        bracket = self._bracket
        if bracket.high not in self._inconclusive or bracket.low not in self._fits:
            return False
        is_near = self.space.size(bracket.low) >= PARAMETERS.near_enough * self.space.size(bracket.high)
        return is_near or len(self._inconclusive) >= PARAMETERS.most_inconclusive_sizes

    def _proof(self) -> Proof:
        low, high = self._bracket.low, self._bracket.high
        fits = self.space.size(low) if low else 0
        if high in self._inconclusive:
            return self._inconclusive_proof(low, high, self._inconclusive[high])
        refused = {self.space.size(index): result for index, result in sorted(self._left_out.items())}
        named = "".join(
            f" {size} was left out: {result.message or 'its probe failed'}." for size, result in refused.items()
        )
        if high not in self._failures:
            above = min((size for size in refused if size > fits), default=None)
            statement = f"{fits} fits, and larger sizes were not tried: the bound is {self.space.bound}"
            statement = f"{statement} ({self.space.bound_reason}).{named}"
            return Proof(
                fits=fits, stopped_by="invalid-size" if above else "bound", next_size=above, statement=statement
            )
        failure = self._failures[high]
        invalid = failure.outcome is Outcome.INVALID_SIZE
        failed = f"{self.space.size(high)}, {'is not a valid size' if invalid else 'ran out of memory'}"
        start = f"{fits} fits and the next size, " if fits else "No micro-batch fits: the smallest size, "
        return Proof(
            fits=fits,
            stopped_by="invalid-size" if invalid else "oom",
            next_size=self.space.size(high),
            statement=f"{start}{failed}{f' ({failure.message})' if failure.message else ''}.{named}",
        )

    def _inconclusive_proof(self, low: int, high: int, ended: ProbeResult) -> Proof:
        """The proof of the largest fit below a size whose probe was inconclusive."""
        stopped_by, event, remedy = _INCONCLUSIVE_STOPS[ended.outcome]
        between = f" Sizes between {self.space.size(low)} and {self.space.size(high)} were not tried."
        statement = (
            f"{self.space.size(low)} fits. It is not known whether {self.space.size(high)} fits: its probe "
            f"{event}{f' ({ended.message})' if ended.message else ''}.{between if high - low > 1 else ''} "
            f"{remedy}"
        )
        return Proof(
            fits=self.space.size(low), stopped_by=stopped_by, next_size=self.space.size(high), statement=statement
        )

    def _wanted_index(self, bracket: _Bracket) -> int:
        if self.space.limit_bytes and self.space.expected is not None:
            return self._index_by_estimate(bracket, self.space.expected, self.space.limit_bytes)
        if self._fits:
            return self._index_by_measurements(bracket)
        if bracket.failed or bracket.low:
            return bracket.low + 1
        return 2 if self.space.count == 2 else 1  # noqa: PLR2004 - the smallest shows at once whether any fits

    def _index_by_measurements(self, bracket: _Bracket) -> int:
        """The next candidate without an estimate: a jump that surely fits, or a candidate by the line."""
        points = last_affine_piece(self._measured(bracket.low))
        start = self._size_at(PARAMETERS.sure_share, points[0]) if points else None
        if len(points) == 1 and start:
            jump, likely = self.space.at_most(start), self.space.at_most(self._size_at(1.0, points[0]))
            jump = likely if likely == jump + 1 else jump  # only the room for noise keeps it out
            if bracket.low < jump < bracket.high and PARAMETERS.good_jump * points[0][0] <= start:
                return jump
            if bracket.failed and jump >= bracket.high:
                start = PARAMETERS.failed_jump_share * self.space.size(bracket.high)
        posterior = from_measurements(points, self.space.limit_bytes, 2 * self.space.bound, start)
        return self._bracketed(bracket, posterior).nearest_to(self._target_probability)

    def _index_by_estimate(self, bracket: _Bracket, estimate: ExpectedPeaks, limit: int) -> int:
        """The next candidate by an estimate: one that likely fits.

        The first is the one from which the fewest probes are expected, where replays or earlier tunings tell more than
        the curve alone.

        The smallest candidate is avoided unless no other is likely to fit: it is the least informative, and BatchNorm
        may reject it.
        """
        posterior = self._posterior_of(bracket, estimate, limit)
        bracketed, target = self._bracketed(bracket, posterior), self._target_probability
        smallest = bracket.low + 1
        if not self._fits and fit_probability(posterior, self.space.size(smallest)) < target:
            return smallest
        if self._fits or self._failures:
            return bracketed.nearest_to(target)
        if estimate.correction is None and estimate.usable_bytes is None:
            return bracketed.nearest_to(PARAMETERS.first_fit_probability)
        return bracketed.fewest_probes(PARAMETERS.first_fit_probability)

    @property
    def fits_far_below_failure(self) -> bool:
        """Whether the largest fit is less than half of the smallest size that does not fit."""
        bracket = self._bracket
        return bracket.failed and bracket.low > 0 and 2 * self.space.size(bracket.low) < self.space.size(bracket.high)

    def surest_size(self) -> int | None:
        """The largest size that an estimate is sure of; none without one, and after the end of the search.

        Once a size far below one that ran out of memory fits, its peak tells the next one, and then halving.
        """
        bracket, estimate, limit = self._bracket, self.space.expected, self.space.limit_bytes
        if limit is None or estimate is None or self.verdict is not None:
            return None
        if self.fits_far_below_failure:
            is_new = len(self._failures) == 1  # the measurements have not been wrong yet
            return self.space.size(self._index_by_measurements(bracket) if is_new else bracket.middle)
        if self._is_closed:  # at a fit of one update
            return self.ask()
        bracketed = self._bracketed(bracket, self._posterior_of(bracket, estimate, limit))
        return self.space.size(bracketed.nearest_to(PARAMETERS.quick_fit_probability))

    def _posterior_of(self, bracket: _Bracket, estimate: ExpectedPeaks, limit: int) -> Posterior:
        """The posterior by an estimate and the probes so far."""
        limit = estimate.usable_of(self._reservable_bytes) or limit
        known = [fit.resident_bytes for fit in self._fits.values() if fit.resident_bytes is not None]
        return from_estimate(
            self._measured(bracket.low),
            limit,
            2 * self.space.bound,
            estimate.used_bytes,
            min(known) - estimate.resident_bytes if known and estimate.resident_bytes is not None else None,
            elastic=self.space.elastic,
            replayed=estimate.usable_bytes is not None,
            correction=self._standing_correction(estimate, limit),
        )

    def _standing_correction(self, estimate: ExpectedPeaks, limit: int) -> EstimateCorrection | None:
        """The learned correction of an estimate; with replays, until a probe contradicts its interval.

        Replays have an order of probes of their own to return to. Without them, to drop a correction saves nothing
        (``benchmarks/learned.py``).
        """
        correction = estimate.correction
        if correction is None or estimate.usable_bytes is None:
            return correction
        error = PARAMETERS.contradicting_errors * correction.level_error

        def use(index: int) -> float:
            return correction.level + correction.slope * (estimate.used_bytes(self.space.size(index)) / limit - 1.0)

        wrong = any(use(index) > 1.0 + error for index in self._fits)
        wrong = wrong or any(use(index) < 1.0 - error for index in self._failures)
        return None if wrong else correction

    @property
    def _target_probability(self) -> float:
        """The probability to fit of the next size: a higher one where each probe waits long for its model to load."""
        slow = any(fit.seconds.start + fit.seconds.build > PARAMETERS.slow_start_seconds for fit in self._fits.values())
        return PARAMETERS.slow_start_fit_probability if slow else PARAMETERS.target_fit_probability

    def _bracketed(self, bracket: _Bracket, posterior: Posterior) -> BracketedPosterior:
        return BracketedPosterior(bracket.low, bracket.high, bracket.failed, posterior, self.space.size)

    def _measured(self, low: int) -> list[Point]:
        """Measured sizes up to the candidate ``low``, with their peaks."""
        measured = {self.space.size(index): fit.used_bytes for index, fit in self._fits.items() if index <= low}
        return sorted((size, used) for size, used in measured.items() if used)

    @property
    def _reservable_bytes(self) -> int | None:
        """Bytes that the allocator could really reserve in the probes so far, also in those that ran out of memory."""
        known = (result.limit_bytes for results in (self._fits, self._failures) for result in results.values())
        return min(filter(None, known), default=None)

    @property
    def _resident_bytes(self) -> int:
        return min((fit.resident_bytes for fit in self._fits.values() if fit.resident_bytes is not None), default=0)

    def _size_at(self, share: float, point: Point) -> float:
        """The size that fills a share of the limit if all memory that is not known to be resident grows with it."""
        (size, used), resident = point, self._resident_bytes
        return max(size * (share * (self.space.limit_bytes or 0) - resident) / max(used - resident, 1), size)


@dataclass(frozen=True)
class _Bracket:
    """Bounds of the answer: at least ``low`` (0 if none is known to fit), below ``high`` (failed, or past the last)."""

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
        """The most probes that doubling and halving still take."""
        halvings = (self.high - self.low - 1).bit_length()
        if self.failed or self.closed:
            return halvings
        last = self.high - 1
        doublings = (-(-last // max(self.low, 1)) - 1).bit_length()
        return (self.low == 0) + doublings + (last - 1).bit_length()

    def worst_case_after(self, index: int) -> int:
        """The most probes after a probe of ``index``, by its worse outcome."""
        if index <= self.low:
            return self.worst_case()
        fit = _Bracket(index, self.high, self.failed)
        return max(fit.worst_case(), _Bracket(self.low, index, failed=True).worst_case())


_INCONCLUSIVE_STOPS: dict[Outcome, tuple[Literal["timeout", "error", "lost"], str, str]] = {
    Outcome.TIMED_OUT: (
        "timeout",
        "was stopped",
        "Raise `probe_timeout_seconds` to try larger sizes.",
    ),
    Outcome.ERROR: (
        "error",
        "failed with an error",
        "Look at its error, and tune again to try larger sizes.",
    ),
    Outcome.LOST: (
        "lost",
        "was ended from outside, twice",
        "Find out what ends processes on this host, and tune again to try larger sizes.",
    ),
}
"""Reasons to stop at an inconclusive probe: the word in the proof, the event, and the remedy."""

_REMEDIES = {
    Outcome.ERROR: ("workload-error", "failed", ""),
    Outcome.TIMED_OUT: (
        "probe-timed-out",
        "was stopped",
        "If it is slow, raise `probe_timeout_seconds`; otherwise check what it is waiting for.",
    ),
    Outcome.LOST: (
        "probe-lost",
        "was ended from outside, twice",
        "Find out what ends processes on this host (a scheduler, the kernel, an operator), then tune again.",
    ),
}


def _failure(result: ProbeResult) -> Failure:
    reason, event, remedy = _REMEDIES[result.outcome]
    remedy = remedy or _remedy_of_error(result)
    error_type = None if result.outcome is Outcome.TIMED_OUT else result.error_type  # the signal that stopped it
    if error_type and error_type.rpartition(".")[2] in result.message:
        error_type = None  # the message names it
    message = ": ".join(part for part in (error_type, result.message) if part) or "it left no message"
    when = f"after {result.seconds.total:.0f} s"
    return Failure(reason, f"The probe of micro-batch {result.micro_batch_size} {event} {when}: {message}. {remedy}")


def _remedy_of_error(result: ProbeResult) -> str:
    """Say what the peak shows of the cause of an error, and what to do."""
    share = result.share_of_limit
    if share is None or result.fails_at_any_size:
        return "Fix the workload, then tune again."
    if share < NEARLY_FULL:
        used = f"At most {format_share(share)} of the limit was in use"
        return f"{used}, so memory is probably not the cause: fix the workload."
    return (
        f"Memory may be the cause: {format_share(share)} of the limit was in use. Tune with a larger memory limit to "
        "see whether the error remains, or fix the workload."
    )
