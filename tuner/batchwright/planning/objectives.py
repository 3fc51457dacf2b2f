"""The objectives of a tuning: the sizes each searches, and the plan it chooses. Pure, no torch.

A plan depends on its largest micro-batch only through the number of accumulation steps, ``ceil(share / size)``. So
``fewest_steps`` and ``fastest`` search the sizes at which that number changes, about ``2 * sqrt(share)`` of them.

``fastest`` then times the plans with few steps. The time of an update is taken to be affine in the number of its
micro-batches (each has a constant cost, all samples together another, the optimizer's step a third), between the sizes
that were measured: so it would always take the fewest steps, but for effects outside the model: a thrashing
allocator, caches, kernels that are faster at some sizes. Hence the plan with the fewest steps and its neighbour are
timed, then every plan that may be faster by more than the noise according to the measurements, four at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from batchwright.planning.accumulation import divisors_up_to, plan_size, steps_of
from batchwright.planning.parameters import DEFAULT_PARAMETERS, SearchParameters
from batchwright.schemas.recommendation import Alternative, Proof
from batchwright.schemas.requests import Objective
from batchwright.schemas.results import Outcome, ProbeResult

_Point = tuple[float, float]


def sizes_for_steps(share: int, bound: int, granularity: int = 1) -> tuple[int, ...]:
    """The sizes at which the number of accumulation steps changes: the smallest size for each number, rising.

    Args:
        share: samples of a rank in an update.
        bound: the largest size, at most ``share``.
        granularity: only multiples of it count (``bound`` itself where that is smaller).
    """
    granularity = min(granularity, bound)
    size = bound // granularity * granularity
    found: list[int] = []
    while size > 0:
        smallest = -(-plan_size(share, steps_of(share, size)) // granularity) * granularity
        found.append(smallest)
        size = smallest - granularity
    return tuple(reversed(found))


# --- the fastest plan ---


def next_to_time(
    share: int,
    largest: int,
    probes: Sequence[ProbeResult],
    parameters: SearchParameters = DEFAULT_PARAMETERS,
    *,
    repeats: bool = False,
) -> int | None:
    """The largest micro-batch of the plan to time next; none when another timing would not change the choice.

    Args:
        share: samples of a rank in an update.
        largest: the largest size that fits.
        probes: every probe so far.
        parameters: the tuned constants.
        repeats: whether plans repeat one size, which divides the share.
    """
    timed = {probe.micro_batch_size for probe in probes if probe.measures_time}
    best = _best(share, probes)
    is_steady = best is not None and not best.allocator_retries
    possible = _possible_sizes(share, largest, probes, repeats=repeats)[-parameters.considered_plans :]
    thrashing = {probe.micro_batch_size for probe in probes if probe.allocator_retries}
    kept = (size for size in reversed(possible) if not is_steady or size not in thrashing)
    considered = sorted(kept, key=thrashing.__contains__)
    untimed = [size for size in considered if size not in timed]
    if len(timed) >= parameters.most_timed_plans or not untimed:
        return None
    if best is None or not is_steady or len(timed) < parameters.least_timed_plans:
        return untimed[0]
    optimistic = _optimistic_seconds(share, probes)
    promising = min(untimed, key=optimistic)
    threshold = _seconds(share, best) * (1.0 - _difference(best, best, parameters))
    return promising if optimistic(promising) < threshold else None


def fastest(
    share: int, probes: Sequence[ProbeResult], parameters: SearchParameters = DEFAULT_PARAMETERS
) -> ProbeResult | None:
    """The timing probe of the plan with the most samples per second; none when no plan could be timed.

    Of equally fast plans the one with the least memory.
    """
    best = _best(share, probes)
    if best is None:
        return None
    shortest = _seconds(share, best)
    tied = [
        probe
        for probe in _timed_plans(probes)
        if _seconds(share, probe) <= shortest * (1 + _difference(probe, best, parameters))
    ]
    return min(tied, key=lambda probe: (probe.held_bytes or 0, probe.micro_batch_size))


def recommended_size(
    objective: Objective,
    share: int,
    largest: int,
    probes: Sequence[ProbeResult],
    parameters: SearchParameters = DEFAULT_PARAMETERS,
) -> int:
    """The micro-batch size to plan with: that of the fastest plan where that is the objective, else the largest fit."""
    quickest = fastest(share, probes, parameters) if objective == "fastest" else None
    return quickest.micro_batch_size if quickest else largest


def _possible_sizes(share: int, largest: int, probes: Iterable[ProbeResult], *, repeats: bool = False) -> list[int]:
    """The sizes of plans that no measurement contradicts, of those that divide the share where plans repeat one size.

    A whole share may fit where smaller micro-batches, of which there are several in an update, do not.
    """
    stopped = [probe for probe in probes if probe.outcome in {Outcome.OOM, Outcome.INVALID_SIZE}]
    searched = [probe.micro_batch_size for probe in stopped if probe.accumulates and not probe.runs_plan]
    plans = {probe.micro_batch_size for probe in stopped if probe.runs_plan and not probe.measures_time}
    of_plans = divisors_up_to(share, largest) if repeats else sizes_for_steps(share, largest)
    sizes = [size for size in of_plans if size == largest or size < min(searched, default=share)]
    return [size for size in sizes if size not in plans]


def _best(share: int, probes: Iterable[ProbeResult]) -> ProbeResult | None:
    return min(_timed_plans(probes), key=lambda probe: _seconds(share, probe), default=None)


def _timed_plans(probes: Iterable[ProbeResult]) -> list[ProbeResult]:
    """The timed plans without those that thrash, unless all of them do."""
    fits = [probe for probe in probes if probe.measures_time and probe.outcome is Outcome.FIT]
    timed = [probe for probe in fits if probe.timing is not None]
    return [probe for probe in timed if not probe.allocator_retries] or timed


def _difference(one: ProbeResult, other: ProbeResult, parameters: SearchParameters) -> float:
    """The smallest relative difference in time that distinguishes two timed plans."""
    noise = [probe.timing.noise if probe.timing else 0.0 for probe in (one, other)]
    return max(parameters.least_time_difference, parameters.significant_errors * math.hypot(*noise))


def _seconds(share: int, probe: ProbeResult) -> float:
    return probe.timing.seconds_for(_micro_batches(share, probe)) if probe.timing else math.inf


# --- the alternatives ---


def alternatives(  # noqa: PLR0913 - what the list depends on
    share: int,
    chosen_size: int,
    largest: int,
    probes: Sequence[ProbeResult],
    parameters: SearchParameters = DEFAULT_PARAMETERS,
    *,
    repeats: bool = False,
) -> tuple[Alternative, ...]:
    """Plans that fit, from the fewest steps upward, with their memory and time where the probes show them.

    Args:
        share: samples of a rank in an update.
        chosen_size: the recommended micro-batch size.
        largest: the largest size that fits.
        probes: every probe.
        parameters: the tuned constants.
        repeats: whether plans repeat one size, which divides the share.
    """
    chosen = plan_size(share, steps_of(share, chosen_size))
    fits = _fits(probes)
    timed = [size for size, probe in fits.items() if probe.measures_time]
    listed = {*_possible_sizes(share, largest, probes, repeats=repeats)[-parameters.listed_plans :], *timed, chosen}
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
        samples_per_second=_rate(share, _seconds(share, probe) if timing else None),
        timed_updates=timing.updates if timing else 0,
        noise=timing.noise if timing else 0.0,
        thrashing=bool(probe.allocator_retries),
    )


def _rate(share: int, seconds: float | None) -> float | None:
    return share / seconds if seconds else None


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
    return _rate(share, _seconds(share, probe))


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


def _optimistic_seconds(share: int, probes: Sequence[ProbeResult]) -> Callable[[int], float]:
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
    return _unique_points((_micro_batches(share, probe), _seconds(share, probe)) for probe in timed)


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


# --- the explanation ---


def describe_choice(  # noqa: PLR0913 - all inputs of a choice
    objective: Objective,
    share: int,
    size: int,
    proof: Proof,
    listed: Sequence[Alternative],
    *,
    of_a_grid: bool = False,
) -> str:
    """Explain why the plan of ``size`` was chosen and no other.

    Args:
        objective: the objective of the request.
        share: samples of a rank in an update.
        size: the recommended micro-batch size.
        proof: the largest size that was proven to fit, and what stopped the search there.
        listed: the alternatives.
        of_a_grid: whether the request excluded sizes between those searched, or above them.
    """
    steps = steps_of(share, size)
    if objective == "largest":
        return _describe_largest(size, proof, of_a_grid=of_a_grid)
    if objective == "fewest_steps":
        return f"{steps} accumulation steps are the fewest that fit, and micro-batches of {size} are enough for them."
    timed = [plan for plan in listed if plan.timed_updates > 1]
    steady = [plan for plan in timed if not plan.thrashing] or timed
    rates = {plan.micro_batch_size: plan.samples_per_second or 0.0 for plan in steady}
    rate = rates.get(size)
    if rate is None:
        largest = f"{proof.fits} is the largest micro-batch that fits of those that change the steps"
        return f"No plan could be timed: {largest}."
    start = f"{steps} accumulation steps make {format_rate(rate)} samples per second"
    if rate >= max(rates.values()):
        return f"{start}, the most of {len(rates)} plans that were timed."
    return f"{start}: within the noise as many as any of {len(rates)} plans that were timed, with less memory."


def _describe_largest(size: int, proof: Proof, *, of_a_grid: bool) -> str:
    if proof.stopped_by == "bound":
        return f"{size} fits; larger micro-batches were not tried."
    if not proof.shows_larger_fail:
        return f"{size} is the largest micro-batch that is known to fit."
    return f"{size} is the largest micro-batch that fits{' of those searched' if of_a_grid else ''}."


def format_rate(rate: float) -> str:
    """Format a rate with its significant digits."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.3g}"  # noqa: PLR2004 - four figures or more
