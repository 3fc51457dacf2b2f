"""Warm starts: a stored recommendation seeds the tuning of the same request. Pure, no torch.

The stored recommendation was made under other versions or another limit, or at another commit of a model. Where
nothing speaks against it, one probe of its size confirms it: the size fits and takes as much memory as before, within
1 %, so the next size, which failed under a limit that was not lower, is taken to fail again. On the CPU, where equal
probes differ by more than that beside other work, 3 % count as the same where the next size exceeds the limit by the
memory curve all the same. A plan of two sizes is run again too (``batchwright.planning.proofs.plan_proof``). In any
other case the tuning searches as usual, with the stored memory curve as its estimate.

A tuning under a larger limit is searched, because more may fit, unless the stored size was the bound: a fit there is a
proof. A recommendation that was itself only confirmed by one probe cannot warm-start another tuning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from batchwright.errors import FieldProblem, SpecError
from batchwright.planning.fingerprint import (
    commit_of,
    differences,
    fingerprint,
    fingerprinted_versions,
    request_content,
)
from batchwright.planning.parameters import PARAMETERS
from batchwright.planning.posterior import last_affine_piece
from batchwright.planning.tuning_conditions import TuningConditions
from batchwright.schemas.recommendation import Proof, Recommendation, WarmStart
from batchwright.schemas.results import ExpectedPeak, ExpectedPeaks, Outcome, ProbeResult
from batchwright.units import format_bytes

_FAILED = (Outcome.OOM, Outcome.INVALID_SIZE)


@dataclass(frozen=True)
class PossibleWarmStart:
    """A possible warm start of a tuning.

    Attributes:
        stored: the recommendation that seeds the search.
        size: the size to probe first, since that probe alone may confirm ``stored``; none when a full search is needed.
        peaks: the measured memory curve; with fewer than two fits, the curve that the stored tuning started from.
    """

    stored: Recommendation
    size: int | None
    peaks: ExpectedPeaks | None

    @property
    def is_useful(self) -> bool:
        """Return whether the warm start changes the tuning at all."""
        return self.size is not None or self.peaks is not None

    @property
    def ran_plan(self) -> bool:
        """Return whether the stored fit was a run of the plan, to which only another such run compares."""
        fit = _fit(self.stored)
        return fit is not None and fit.runs_plan

    @property
    def evidence(self) -> WarmStart:
        """The stored recommendation, for the evidence of the new one."""
        return WarmStart(
            recommendation_id=self.stored.id,
            created_at=self.stored.created_at,
            fingerprint=self.stored.fingerprint,
            versions=self.stored.versions,
            memory_limit_bytes=_limit(self.stored),
            proof=self.stored.evidence.proof,
        )


def warm_start_from(stored: Recommendation, now: TuningConditions) -> PossibleWarmStart:
    """The warm start that ``stored`` gives a tuning under the conditions ``now``.

    Raises:
        SpecError: when ``stored`` is for another request, with every difference, or has no full proof of its own.
    """
    before = request_content(stored.request, stored.device, stored.environment, _ranks(stored))
    today = request_content(now.request, now.device, now.environment, len(now.rank_devices))
    problems = [
        FieldProblem(name, f"is {then} in the warm start, which was made for another request", here)
        for name, (then, here) in differences(before, today).items()
    ]
    problems += _unproven(stored)
    if problems:
        raise SpecError(problems, f"warm start from {stored.id}")
    has_fit = any(probe.outcome is Outcome.FIT for probe in stored.evidence.probes)
    peaks = measured_peaks(stored) or (stored.evidence.expected if has_fit else None)
    return PossibleWarmStart(stored, size=_size_to_confirm(stored, now), peaks=peaks)


def measured_peaks(stored: Recommendation) -> ExpectedPeaks | None:
    """The memory curve through the fits of a search; none where there are fewer than two, or memory did not rise.

    Updates of a single micro-batch hold no gradients while it runs and lie on another curve, so they are left out.
    """
    proven = _fit(stored)
    probes = [probe for probe in stored.evidence.probes if not probe.runs_plan or probe == proven]
    fits = [probe for probe in probes if probe.outcome is Outcome.FIT and probe.accumulates and probe.used_bytes]
    used = {fit.micro_batch_size: fit.used_bytes or 0 for fit in fits}
    sizes = sorted(used)
    curve = list(zip(sizes, accumulate((used[size] for size in sizes), max), strict=True))
    if len(last_affine_piece(curve)) < 2:  # noqa: PLR2004 - a line needs two points
        return None
    points = [ExpectedPeak(micro_batch_size=size, used_bytes=peak) for size, peak in curve]
    resident = [fit.resident_bytes for fit in fits if fit.resident_bytes is not None]
    return ExpectedPeaks(
        points=tuple(points), resident_bytes=min(resident, default=None), versions=dict(stored.versions)
    )


def confirmed_proof(start: PossibleWarmStart, probes: Sequence[ProbeResult], now: TuningConditions) -> Proof | None:
    """The proof that rests on the stored proof; none when the new probes do not confirm the stored proof.

    The first probe that was not lost decides.
    """
    first = next((probe for probe in probes if probe.outcome is not Outcome.LOST), None)
    then = _fit(start.stored)
    if start.size is None or first is None or then is None or first.micro_batch_size != start.size:
        return None
    tolerance = PARAMETERS.same_peak_tolerance
    if first.outcome is not Outcome.FIT or first.brackets or _has_more_room(first, start.stored, tolerance):
        return None
    if (excess := _excess_of_next_size(start, first, then)) is not None:
        if excess.now <= 0.0 < excess.then:  # the confirmed size takes slightly less now
            return None
        if now.device.traits.counts_host_memory and excess.now > tolerance:
            tolerance = PARAMETERS.same_cpu_peak_tolerance
    pairs = ((first.used_bytes, then.used_bytes), (first.held_bytes, then.held_bytes))  # in tensors, on the device
    is_same = all(one and other and abs(one - other) <= tolerance * other for one, other in pairs)
    return _proof(start.stored, then, first, now) if is_same else None


# --- is the request the same? ---


def _unproven(stored: Recommendation) -> list[FieldProblem]:
    if stored.evidence.proof.stopped_by == "warm-start" and stored.evidence.warm_start is not None:
        proven = stored.evidence.warm_start.recommendation_id
        message = f"rests on {proven}, which has the full proof: warm-start from that recommendation"
        return [FieldProblem("evidence.proof", message)]
    limit = _limit(stored)
    if limit is None:
        return []
    recomputed = fingerprint(stored.request, stored.device, limit, stored.environment, stored.versions, _ranks(stored))
    if recomputed == stored.fingerprint:
        return []
    message = (
        f"does not match the contents ({recomputed}): the file was changed by hand, or written by another "
        "release; tune without it"
    )
    return [FieldProblem("fingerprint", message, stored.fingerprint)]


# --- can one probe confirm the stored recommendation? ---


def _size_to_confirm(stored: Recommendation, now: TuningConditions) -> int | None:
    """The stored size, if a fit there is likely and would complete the tuning."""
    proof, then = stored.evidence.proof, _fit(stored)
    if then is None or now.objective.times_plans or not _can_be_confirmed(stored, now):
        return None
    limit = _limit(stored) or 0
    fits_in = now.memory_limit_bytes >= limit or (then.held_bytes or 0) <= now.probe_limit_bytes
    largest = max(probe.micro_batch_size for probe in _searched(stored) if probe.outcome is Outcome.FIT)
    return proof.fits if fits_in and largest <= proof.fits else None  # a larger fit contradicts the proof


def _can_be_confirmed(stored: Recommendation, now: TuningConditions) -> bool:
    proof, space = stored.evidence.proof, now.space
    if proof.fits not in space:
        return False
    index = space.index(proof.fits)
    if proof.stopped_by == "bound":
        return index == space.count
    if index == space.count or space.size(index + 1) != proof.next_size or _failure(stored) is None:
        return False
    if proof.stopped_by == "invalid-size":  # a kernel's own limit: another version may have lifted it
        return fingerprinted_versions(stored.versions) == fingerprinted_versions(now.versions)
    return now.memory_limit_bytes <= (_limit(stored) or 0)


def _has_more_room(now: ProbeResult, stored: Recommendation, tolerance: float) -> bool:
    """Return whether more memory is available now than when the next size failed, beside other processes on a card."""
    failure = _failure(stored)
    if failure is None or failure.limit_bytes is None or now.limit_bytes is None:
        return False
    return failure.outcome is Outcome.OOM and now.limit_bytes > failure.limit_bytes * (1 + tolerance)


class _Excess(NamedTuple):
    """The share of its limit by which the next size exceeds it, by the memory curve through a fit; below 0 it fits."""

    then: float
    now: float


def _excess_of_next_size(start: PossibleWarmStart, first: ProbeResult, then: ProbeResult) -> _Excess | None:
    """The excess of the next size by the stored fit and by the new one; none without a curve or a next size."""
    proof, limit = start.stored.evidence.proof, first.limit_bytes
    if start.peaks is None or proof.next_size is None or limit is None:
        return None
    rise = start.peaks.used_bytes(proof.next_size) - start.peaks.used_bytes(proof.fits)
    return _Excess(*(((fit.used_bytes or 0) + rise) / (fit.limit_bytes or limit) - 1.0 for fit in (then, first)))


def _searched(stored: Recommendation) -> list[ProbeResult]:
    return [probe for probe in stored.evidence.probes if probe.shows_size]


def _fit(stored: Recommendation) -> ProbeResult | None:
    """The fit that the recommendation rests on: the last of several, and of the size alone if there is one."""
    probes = [probe for probe in _searched(stored) if probe.micro_batch_size == stored.evidence.proof.fits]
    fits = [probe for probe in probes if probe.outcome is Outcome.FIT]
    alone = [fit for fit in fits if not fit.runs_plan]
    return next(reversed(alone or fits), None)


def _failure(stored: Recommendation) -> ProbeResult | None:
    """The probe that stopped the search; none where a bound did."""
    size = stored.evidence.proof.next_size
    failed = (probe for probe in _searched(stored) if probe.micro_batch_size == size and probe.outcome in _FAILED)
    return next(failed, None)


def _ranks(stored: Recommendation) -> int:
    """The ranks that ran in its probes; 0 where one stood for all."""
    return max((len(probe.ranks) for probe in stored.evidence.probes), default=0)


def _limit(stored: Recommendation) -> int | None:
    return stored.headroom.limit_bytes if stored.headroom is not None else None


# --- the proof ---


def _proof(stored: Recommendation, then: ProbeResult, first: ProbeResult, now: TuningConditions) -> Proof:
    before, today = then.used_bytes or 1, first.used_bytes or 0
    proof, failure = stored.evidence.proof, _failure(stored)
    event = "was not a valid size" if failure and failure.outcome is Outcome.INVALID_SIZE else "ran out of memory"
    message = f" ({failure.message})" if failure and failure.message else ""
    statement = (
        f"{proof.fits} fits: run now, it took {format_bytes(today)}; {format_bytes(before)} when {stored.id} "
        f"was found ({today / before - 1:+.2%}). The next size, {proof.next_size}, was not run again: it "
        f"{event} then{message}, under {_conditions(stored, now)}."
    )
    return Proof(fits=proof.fits, stopped_by="warm-start", next_size=proof.next_size, statement=statement)


def _conditions(stored: Recommendation, now: TuningConditions) -> str:
    """Describe the differing conditions."""
    before, today = stored.versions, now.versions
    differing = [name for name in sorted({*before, *today}) if before.get(name) != today.get(name)]
    parts = [f"{name} {before.get(name, 'none')} (now {today.get(name, 'none')})" for name in differing]
    commits = [commit_of(request.spec) for request in (stored.request, now.request)]
    parts += [f"commit {commits[0]} (now {commits[1]})"] if commits[0] != commits[1] else []
    versions = ", ".join(parts) or "the same versions"
    limit = _limit(stored)
    if limit is None or limit == now.memory_limit_bytes:
        return f"{versions} and the same limit"
    return f"{versions} and a limit of {format_bytes(limit)} (now {format_bytes(now.memory_limit_bytes)})"
