"""The objective `fastest`: the plan with the most samples per second, measured. Pure, no torch.

After the search the plans with few steps are timed. As far as the time of an update is affine in the number of its
micro-batches, the fewest steps are the fastest. Other effects are outside of this model: a thrashing allocator,
caches, kernels that are faster at some sizes. Hence the plan with the fewest steps and its neighbour are timed, then
every plan that may be faster by more than the noise according to the measurements, four at most.
"""

import math
from collections.abc import Iterable, Sequence

from typing_extensions import override

from batchwright.planning.accumulation import steps_of
from batchwright.planning.objectives.objective import ObjectiveStrategy
from batchwright.planning.parameters import PARAMETERS
from batchwright.planning.plan_figures import (
    PlanCandidates,
    format_rate,
    optimistic_seconds,
    possible_sizes,
    update_seconds,
)
from batchwright.schemas.recommendation import Alternative, Proof
from batchwright.schemas.results import Outcome, ProbeResult
from batchwright.units import counted


class Fastest(ObjectiveStrategy):
    """Time the plans that could win, and choose the one with the most samples per second."""

    title = "fastest plan that fits"
    times_plans = True

    @override
    def next_to_time(self, plans: PlanCandidates) -> int | None:
        share, probes = plans.share, plans.probes
        timed = {probe.micro_batch_size for probe in probes if probe.measures_time}
        best = _best(share, probes)
        is_steady = best is not None and not best.allocator_retries
        possible = possible_sizes(plans)[-PARAMETERS.considered_plans :]
        thrashing = {probe.micro_batch_size for probe in probes if probe.allocator_retries}
        kept = (size for size in reversed(possible) if not is_steady or size not in thrashing)
        considered = sorted(kept, key=thrashing.__contains__)
        untimed = [size for size in considered if size not in timed]
        if len(timed) >= PARAMETERS.most_timed_plans or not untimed:
            return None
        if best is None or not is_steady or len(timed) < PARAMETERS.least_timed_plans:
            return untimed[0]
        optimistic = optimistic_seconds(share, probes)
        promising = min(untimed, key=optimistic)
        threshold = update_seconds(share, best) * (1.0 - _difference(best, best))
        return promising if optimistic(promising) < threshold else None

    @override
    def recommended_size(self, plans: PlanCandidates) -> int:
        """The largest micro-batch of the fastest plan; the largest that fits when no plan could be timed.

        Of equally fast plans the one with the least memory is chosen.
        """
        best = _best(plans.share, plans.probes)
        if best is None:
            return plans.largest
        shortest = update_seconds(plans.share, best)
        tied = [
            probe
            for probe in _timed_plans(plans.probes)
            if update_seconds(plans.share, probe) <= shortest * (1 + _difference(probe, best))
        ]
        return min(tied, key=lambda probe: (probe.held_bytes or 0, probe.micro_batch_size)).micro_batch_size

    @override
    def describe_choice(
        self, share: int, size: int, proof: Proof, listed: Sequence[Alternative], *, of_a_grid: bool = False
    ) -> str:
        timed = [plan for plan in listed if plan.timed_updates > 1]
        steady = [plan for plan in timed if not plan.thrashing] or timed
        rates = {plan.micro_batch_size: plan.samples_per_second or 0.0 for plan in steady}
        rate = rates.get(size)
        if rate is None:
            largest = (
                f"{proof.fits} is the largest micro-batch that fits, among the sizes that change the number of steps"
            )
            return f"No plan could be timed: {largest}."
        start = f"{counted(steps_of(share, size), 'accumulation step')}: {format_rate(rate)} samples per second"
        if rate >= max(rates.values()):
            return f"{start}, the fastest of {counted(len(rates), 'timed plan')}."
        return f"{start}, with less memory. None of the {counted(len(rates), 'timed plan')} is faster beyond the noise."


def _best(share: int, probes: Iterable[ProbeResult]) -> ProbeResult | None:
    return min(_timed_plans(probes), key=lambda probe: update_seconds(share, probe), default=None)


def _timed_plans(probes: Iterable[ProbeResult]) -> list[ProbeResult]:
    """The timed plans without those that thrash, unless all of them do."""
    fits = [probe for probe in probes if probe.measures_time and probe.outcome is Outcome.FIT]
    timed = [probe for probe in fits if probe.timing is not None]
    return [probe for probe in timed if not probe.allocator_retries] or timed


def _difference(one: ProbeResult, other: ProbeResult) -> float:
    """The smallest relative difference in time that distinguishes two timed plans."""
    noise = [probe.timing.noise if probe.timing else 0.0 for probe in (one, other)]
    return max(PARAMETERS.least_time_difference, PARAMETERS.significant_errors * math.hypot(*noise))
