"""What the probes show of plans: their memory, their time, and the list of alternatives. Pure, no torch.

A plan depends on its largest micro-batch only through the number of accumulation steps, ``ceil(share / size)``. The
time of an update is taken to be affine in the number of its micro-batches (each has a constant cost, all samples
together another, the optimizer's step a third), between the sizes that were measured.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from batchwright.planning.accumulation import divisors_up_to, plan_size, sizes_for_steps, steps_of
from batchwright.planning.parameters import PARAMETERS
from batchwright.schemas.recommendation import Alternative
from batchwright.schemas.results import Outcome, ProbeResult

_Point = tuple[float, float]


@dataclass(frozen=True)
class PlanCandidates:
    """The plans of a rank's share, and what is known of them.

    Attributes:
        share: samples of a rank in an update.
        largest: the largest size that fits.
        probes: every probe so far.
        repeats: whether plans repeat one size, which divides the share.
        granularity: only multiples of it count where plans repeat one size.
    """

    share: int
    largest: int
    probes: Sequence[ProbeResult]
    repeats: bool = False
    granularity: int = 1


def possible_sizes(plans: PlanCandidates) -> list[int]:
    """Candidate plan sizes not ruled out by a probe; where plans repeat a size, only divisors of the rank's share.

    A program that repeats a size takes that size, so that none has failed and all are multiples of the granularity.

    A whole share may fit where smaller micro-batches, of which there are several in an update, do not.
    """
    stopped = [probe for probe in plans.probes if probe.outcome in {Outcome.OOM, Outcome.INVALID_SIZE}]
    searched = [probe.micro_batch_size for probe in stopped if probe.accumulates and probe.shows_size]
    failed = {probe.micro_batch_size for probe in stopped if probe.runs_plan}
    if plans.repeats:
        failed |= {probe.micro_batch_size for probe in plans.probes if probe.outcome is Outcome.ERROR}
        sizes = divisors_up_to(plans.share, plans.largest, plans.granularity)
    else:
        sizes = sizes_for_steps(plans.share, plans.largest)
    bound = min(searched, default=plans.share)
    return [size for size in sizes if (size == plans.largest or size < bound) and size not in failed]


# --- the alternatives ---


def alternatives(plans: PlanCandidates, chosen_size: int) -> tuple[Alternative, ...]:
    """Plans that fit, from the fewest steps upward, with their memory and time where the probes show them.

    The plan of ``chosen_size`` is among them.
    """
    share, probes = plans.share, plans.probes
    chosen = plan_size(share, steps_of(share, chosen_size))
    fits = _fits(probe for probe in probes if not probe.brackets)
    timed = [size for size, probe in fits.items() if probe.measures_time]
    listed = {*possible_sizes(plans)[-PARAMETERS.listed_plans :], *timed, chosen}
    seconds, memory = _expected_seconds(share, probes), _expected_bytes(share, probes)
    return tuple(
        _measured(share, fits[size], chosen=size == chosen)
        if size in fits
        else Alternative(
            gradient_accumulation_steps=steps_of(share, size),
            micro_batch_size=size,
            chosen=size == chosen,
            source="modelled",
            peak_bytes=memory(size),
            samples_per_second=_rate(share, seconds(size)),
        )
        for size in sorted(listed, reverse=True)
    )


def _measured(share: int, probe: ProbeResult, *, chosen: bool) -> Alternative:
    timing = probe.timing
    return Alternative(
        gradient_accumulation_steps=steps_of(share, probe.micro_batch_size),
        micro_batch_size=probe.micro_batch_size,
        chosen=chosen,
        source="measured",
        peak_bytes=probe.held_bytes,
        samples_per_second=_rate(share, update_seconds(share, probe) if timing else None),
        timed_updates=timing.updates if timing else 0,
        noise=timing.noise if timing else 0.0,
        thrashing=bool(probe.allocator_retries),
    )


def _rate(share: int, seconds: float | None) -> float | None:
    return share / seconds if seconds else None


# --- time and memory ---


def update_seconds(share: int, probe: ProbeResult) -> float:
    """The seconds of an update of ``share`` samples in the micro-batches of a probe; infinity where not timed."""
    return probe.timing.seconds_for(_micro_batches(share, probe)) if probe.timing else math.inf


def _fits(probes: Iterable[ProbeResult]) -> dict[int, ProbeResult]:
    """The fit of each size: the one that was timed, if any, else the last, which is that of a plan if there is one."""
    fits = [probe for probe in probes if probe.outcome is Outcome.FIT]
    return {probe.micro_batch_size: probe for probe in sorted(fits, key=lambda probe: probe.measures_time)}


def rate_of(share: int, probe: ProbeResult) -> float | None:
    """The samples per second of updates of ``share`` samples in the micro-batches of a probe; none where not timed.

    A probe that ran a single micro-batch shows the time of no other update than its own.
    """
    timing = probe.timing
    if timing is None or (timing.micro_batch_seconds is None and probe.micro_batch_size != share):
        return None
    return _rate(share, update_seconds(share, probe))


def expected_rate(share: int, size: int, probes: Sequence[ProbeResult]) -> float | None:
    """Interpolate the samples per second of a plan from timed probes; none outside the measured range.

    Args:
        share: samples of a rank in an update of the plan, which may be another number than in the probes.
        size: the plan's largest micro-batch.
        probes: every probe.
    """
    usable = [probe for probe in probes if rate_of(share, probe) is not None]
    return _rate(share, _expected_seconds(share, usable)(size))


def expected_bytes(share: int, size: int, probes: Sequence[ProbeResult]) -> int | None:
    """Interpolate the peak of a plan as ``Alternative.peak_bytes``; none where the probes do not show it."""
    return _expected_bytes(share, probes)(size)


def _expected_seconds(share: int, probes: Sequence[ProbeResult]) -> Callable[[int], float | None]:
    """Interpolate the seconds of an update of ``share`` samples, as a function of the plan's largest micro-batch."""
    points = _seconds_by_micro_batches(share, probes)

    def expected(size: int) -> float | None:
        steps = steps_of(share, size)
        return _interpolate(points, steps) if points and points[0][0] <= steps <= points[-1][0] else None

    return expected


def optimistic_seconds(share: int, probes: Sequence[ProbeResult]) -> Callable[[int], float]:
    """Optimistic seconds per update; infinity outside the measured range.

    Where small micro-batches were faster than large ones, the gain of sizes in between is interpolated by order of
    magnitude, because the size at which the gain begins is not known.
    """
    expected = _expected_seconds(share, probes)
    points = [(math.log(count), seconds) for count, seconds in _seconds_by_micro_batches(share, probes)]

    def optimistic(size: int) -> float:
        seconds = expected(size)
        return math.inf if seconds is None else min(seconds, _interpolate(points, math.log(steps_of(share, size))))

    return optimistic


def _seconds_by_micro_batches(share: int, probes: Sequence[ProbeResult]) -> list[_Point]:
    """The measured seconds of an update of ``share`` samples, by number of micro-batches."""
    timed = [probe for probe in _fits(probes).values() if probe.timing is not None]
    return _unique_points((_micro_batches(share, probe), update_seconds(share, probe)) for probe in timed)


def _micro_batches(share: int, probe: ProbeResult) -> float:
    """The number of micro-batches of the probe's size in an update of ``share`` samples."""
    if probe.runs_plan or not probe.accumulates:
        return steps_of(share, probe.micro_batch_size)
    return share / probe.micro_batch_size


def _expected_bytes(share: int, probes: Sequence[ProbeResult]) -> Callable[[int], int | None]:
    """Interpolate the peak of a plan as a function of its largest micro-batch, from fits of the same kind of update.

    Below the smallest fit, the bytes between updates stand for a micro-batch of no sample: two neighbouring sizes, as
    a warm start probes, differ by noise.
    """
    fits = _fits(probes).values()

    def expected(size: int) -> int | None:
        same = [probe for probe in fits if probe.held_bytes and probe.accumulates == (size < share)]
        points = _unique_points((probe.micro_batch_size, probe.held_bytes or 0) for probe in same)
        if len(points) < 2:  # noqa: PLR2004 - two points make a line
            return None
        resident = min((probe.resident_bytes for probe in same if probe.resident_bytes), default=None)
        below = [(0, resident)] if resident is not None and size < points[0][0] else []
        return max(0, round(_interpolate([*below, *points], size)))

    return expected


def _unique_points(points: Iterable[_Point]) -> list[_Point]:
    """The points by rising abscissa, the last one of each."""
    unique: Mapping[float, float] = dict(points)
    return sorted(unique.items())


def _interpolate(points: Sequence[_Point], x: float) -> float:
    """Interpolate linearly between the neighbours of ``x``, or extrapolate from the nearest two points."""
    if len(points) == 1:
        return points[0][1]
    above = next((index for index, (at, _) in enumerate(points) if at >= x and index), len(points) - 1)
    (low, low_value), (high, high_value) = points[above - 1], points[above]
    return low_value + (high_value - low_value) * (x - low) / (high - low)


def format_rate(rate: float) -> str:
    """Format a rate with its significant digits."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"  # noqa: PLR2004 - four figures or more
