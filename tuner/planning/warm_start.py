"""What an earlier answer to the same question can do for a tuning. Pure, no torch.

The same was asked under other versions or another limit. Where nothing speaks against it, one probe of the earlier size
confirms the answer: it fits and takes what it took, within 1 %, so the next size, which failed under a limit that was
not lower, is held to fail again. In any other case the tuning searches as ever, led by the memory curve that was
measured then.

A larger limit may fit more, so it is always searched, unless the answer was the bound: a fit there proves itself. An
answer that was itself only confirmed confirms no other: what counts is the one with the full proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tuner.errors import FieldProblem, SpecError
from tuner.planning.fingerprint import asked, counted, fingerprint
from tuner.planning.posterior import rising
from tuner.planning.search import SearchSpace
from tuner.schemas.recommendation import Proof, Recommendation, WarmStart
from tuner.schemas.requests import TuningRequest
from tuner.schemas.results import DeviceInfo, ExpectedPeak, ExpectedPeaks, Outcome, ProbeResult
from tuner.units import format_bytes

_TOLERANCE = 0.01
"""By how much the peak of one size may differ and still be the same: probes of one size on the CPU differ by 0.9 %."""
_FAILED = (Outcome.OOM, Outcome.INVALID_SIZE)


@dataclass(frozen=True)
class Question:
    """A tuning, as far as an earlier answer is judged by it.

    Attributes:
        request: what is asked.
        device: the device it will run on.
        environment: what its probes run with.
        versions: the relevant ones.
        memory_limit_bytes: the memory a run may take.
        probe_limit_bytes: the same, without the margin.
        space: the sizes that are searched.
    """

    request: TuningRequest
    device: DeviceInfo
    environment: dict[str, str]
    versions: dict[str, str]
    memory_limit_bytes: int
    probe_limit_bytes: int
    space: SearchSpace


@dataclass(frozen=True)
class Lead:
    """How an earlier answer leads a tuning.

    Attributes:
        earlier: the answer.
        size: what to probe first, since that alone may confirm the answer; none when all is searched.
        peaks: the memory curve that was measured; none where fewer than two fits tell it.
    """

    earlier: Recommendation
    size: int | None
    peaks: ExpectedPeaks | None

    @property
    def is_of_use(self) -> bool:
        """Whether the tuning differs at all from one without it."""
        return self.size is not None or self.peaks is not None

    @property
    def warm_start(self) -> WarmStart:
        """The earlier recommendation, for the evidence."""
        return WarmStart(
            recommendation_id=self.earlier.id,
            created_at=self.earlier.created_at,
            fingerprint=self.earlier.fingerprint,
            versions=self.earlier.versions,
            memory_limit_bytes=_limit(self.earlier),
            proof=self.earlier.evidence.proof,
        )


def lead(earlier: Recommendation, now: Question) -> Lead:
    """How ``earlier`` leads a tuning that asks ``now``.

    Raises:
        SpecError: when it is of another request, or has no full proof of its own; every difference is named.
    """
    problems = [*_differences(earlier, now), *_unproven(earlier)]
    if problems:
        raise SpecError(problems, f"warm start from {earlier.id}")
    return Lead(earlier, size=_size_to_confirm(earlier, now), peaks=measured_peaks(earlier))


def measured_peaks(earlier: Recommendation) -> ExpectedPeaks | None:
    """The memory curve through the fits of its search; none where there are fewer than two, or memory did not rise.

    Updates of a single micro-batch hold no gradients while it runs and lie on another curve, so they are left out.
    """
    fits = [it for it in _searched(earlier) if it.outcome is Outcome.FIT and it.accumulates and it.used_bytes]
    used = {it.micro_batch_size: it.used_bytes or 0 for it in fits}
    sizes = sorted(used)
    curve = list(zip(sizes, accumulate((used[size] for size in sizes), max), strict=True))
    if len(rising(curve)) < 2:  # noqa: PLR2004 - a line needs two points
        return None
    points = [ExpectedPeak(micro_batch_size=size, used_bytes=peak) for size, peak in curve]
    resident = [it.resident_bytes for it in fits if it.resident_bytes is not None]
    return ExpectedPeaks(points=tuple(points), resident_bytes=min(resident, default=None))


def confirmed(led: Lead, probes: Sequence[ProbeResult], now: Question) -> Proof | None:
    """The proof that rests on the earlier one; none when what was probed since does not confirm it.

    The first probe decides, those aside that were lost to something outside.
    """
    first = next((it for it in probes if it.outcome is not Outcome.LOST), None)
    then = _fit(led.earlier)
    if led.size is None or first is None or then is None or first.micro_batch_size != led.size:
        return None
    if first.outcome is not Outcome.FIT or not _is_same(first, then):
        return None
    if _has_more_room(first, led.earlier) or _lets_next_in(led, first, then):
        return None
    return _proof(led.earlier, then, first, now)


# --- whether it is an answer to the same question ---


def _differences(earlier: Recommendation, now: Question) -> list[FieldProblem]:
    before = _leaves(asked(earlier.request, earlier.device, earlier.environment))
    today = _leaves(asked(now.request, now.device, now.environment))
    missing = "not set"
    return [
        FieldProblem(name, f"is {before.get(name, missing)} there, another request", str(today.get(name, missing)))
        for name in sorted({*before, *today})
        if before.get(name) != today.get(name)
    ]


def _leaves(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value in a tree of mappings, by its dotted path."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _leaves(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item}
    return found


def _unproven(earlier: Recommendation) -> list[FieldProblem]:
    if earlier.evidence.proof.stopped_by == "warm-start" and earlier.evidence.warm_start is not None:
        message = (
            f"rests on {earlier.evidence.warm_start.recommendation_id}, and has no full proof: give that one instead"
        )
        return [FieldProblem("evidence.proof", message)]
    limit = _limit(earlier)
    if limit is None:
        return []
    again = fingerprint(earlier.request, earlier.device, limit, earlier.environment, earlier.versions)
    if again == earlier.fingerprint:
        return []
    message = f"is not that of what it holds ({again}): it was changed by hand, or made by another release; tune afresh"
    return [FieldProblem("fingerprint", message, earlier.fingerprint)]


# --- whether one probe may confirm it ---


def _size_to_confirm(earlier: Recommendation, now: Question) -> int | None:
    """The earlier size, if a fit there would settle the tuning, and is likely."""
    proof, then = earlier.evidence.proof, _fit(earlier)
    if then is None or earlier.request.objective == "fastest" or not _may_settle(earlier, now):
        return None
    limit = _limit(earlier) or 0
    fits_in = now.memory_limit_bytes >= limit or (then.held_bytes or 0) <= now.probe_limit_bytes
    return proof.fits if fits_in and _is_monotone(earlier) else None


def _may_settle(earlier: Recommendation, now: Question) -> bool:
    proof, space = earlier.evidence.proof, now.space
    place = space.at_most(proof.fits)
    if space.size(place) != proof.fits:
        return False
    if proof.stopped_by == "bound":
        return place == space.count
    if place == space.count or space.size(place + 1) != proof.next_size or _failure(earlier) is None:
        return False
    if proof.stopped_by == "invalid-size":  # a kernel's own limit: another version may have lifted it
        return counted(earlier.versions) == counted(now.versions)
    return now.memory_limit_bytes <= (_limit(earlier) or 0)


def _is_monotone(earlier: Recommendation) -> bool:
    """Whether nothing that it ran contradicts that every size below a fit fits."""
    fits = [it.micro_batch_size for it in _searched(earlier) if it.outcome is Outcome.FIT]
    return max(fits) <= earlier.evidence.proof.fits


def _is_same(now: ProbeResult, then: ProbeResult) -> bool:
    """Whether two fits of one size took the same memory: in tensors, and held of the device."""
    pairs = ((now.used_bytes, then.used_bytes), (now.held_bytes, then.held_bytes))
    return all(one and other and abs(one - other) <= _TOLERANCE * other for one, other in pairs)


def _has_more_room(now: ProbeResult, earlier: Recommendation) -> bool:
    """Whether the next size failed in less memory than there is now, as where other processes held some of a card."""
    failure = _failure(earlier)
    if failure is None or failure.limit_bytes is None or now.limit_bytes is None:
        return False
    return failure.outcome is Outcome.OOM and now.limit_bytes > failure.limit_bytes * (1 + _TOLERANCE)


def _lets_next_in(led: Lead, first: ProbeResult, then: ProbeResult) -> bool:
    """Whether the little that is taken less than then is enough for the next size, by the measured curve."""
    next_size = led.earlier.evidence.proof.next_size
    if led.peaks is None or next_size is None or first.limit_bytes is None:
        return False
    before = led.peaks.used_bytes(next_size)
    today = before + (first.used_bytes or 0) - (then.used_bytes or 0)
    return today <= first.limit_bytes < before


def _searched(earlier: Recommendation) -> list[ProbeResult]:
    return [it for it in earlier.evidence.probes if not it.measures_time]


def _fit(earlier: Recommendation) -> ProbeResult | None:
    """The fit that the earlier answer rests on; the last of several."""
    size = earlier.evidence.proof.fits
    fits = [it for it in _searched(earlier) if it.outcome is Outcome.FIT and it.micro_batch_size == size]
    return fits[-1] if fits else None


def _failure(earlier: Recommendation) -> ProbeResult | None:
    """The probe that stopped the earlier search; none where a bound did."""
    size = earlier.evidence.proof.next_size
    failed = (it for it in _searched(earlier) if it.micro_batch_size == size and it.outcome in _FAILED)
    return next(failed, None)


def _limit(earlier: Recommendation) -> int | None:
    return earlier.headroom.limit_bytes if earlier.headroom is not None else None


# --- the proof in words ---


def _proof(earlier: Recommendation, then: ProbeResult, first: ProbeResult, now: Question) -> Proof:
    before, today = then.used_bytes or 1, first.used_bytes or 0
    proof, failure = earlier.evidence.proof, _failure(earlier)
    event = "was not a valid size" if failure and failure.outcome is Outcome.INVALID_SIZE else "ran out of memory"
    said = f" ({failure.message})" if failure and failure.message else ""
    statement = (
        f"{proof.fits} fits: it was run now and took {format_bytes(today)}, against {format_bytes(before)} "
        f"({today / before - 1:+.2%}) when {earlier.id} was found. The next size, {proof.next_size}, was not run "
        f"again: it {event} then{said}, under {_conditions(earlier, now)}."
    )
    return Proof(fits=proof.fits, stopped_by="warm-start", next_size=proof.next_size, statement=statement)


def _conditions(earlier: Recommendation, now: Question) -> str:
    """What was different then, in words."""
    before, today = earlier.versions, now.versions
    differing = [name for name in sorted({*before, *today}) if before.get(name) != today.get(name)]
    parts = [f"{name} {before.get(name, 'none')} (now {today.get(name, 'none')})" for name in differing]
    versions = ", ".join(parts) or "the same versions"
    limit = _limit(earlier)
    if limit is None or limit == now.memory_limit_bytes:
        return f"{versions} and the same limit"
    return f"{versions} and a limit of {format_bytes(limit)} (now {format_bytes(now.memory_limit_bytes)})"
