"""A plan in a loop of one's own: the samples and the micro-batch sizes of one rank in each update."""

from collections.abc import Sequence
from dataclasses import replace

from batchwright.errors import WorkloadError
from batchwright.planning.accumulation import balanced_split
from batchwright.schemas.plans import Plan, UniformPlan
from batchwright.schemas.recommendation import Recommendation
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.micro_batches.splitting import MicroBatch


def plan_of(plan: Plan | UniformPlan | Recommendation) -> Plan:
    """The plan of a recommendation; a uniform plan with the list of its micro-batches; another plan as given.

    Raises:
        WorkloadError: when nothing fits.
    """
    if isinstance(plan, Recommendation):
        if plan.plan is None:
            raise WorkloadError(f"the recommendation has no plan: {plan.infeasible_reason or 'no micro-batch fits'}")
        return plan.plan
    if isinstance(plan, Plan):
        return plan
    sizes = (plan.micro_batch_size,) * plan.gradient_accumulation_steps
    return Plan(**plan.summary().model_dump(), micro_batch_sizes=(sizes,) * plan.world_size)


class PlannedWindow:
    """The share of one rank in each update of a plan.

    Args:
        plan: plan of the effective batch over all ranks.
        ranks: the ranks of the loop, and which of them this process is.
        lock_step: whether all ranks must run the same number of micro-batches (FSDP).

    Attributes:
        sizes: sizes of this rank's micro-batches, in order.

    Raises:
        WorkloadError: when the plan is for another number of ranks.
    """

    def __init__(self, plan: Plan, ranks: Ranks, *, lock_step: bool = False) -> None:
        if plan.world_size != ranks.size:
            raise WorkloadError(
                f"the plan is for {plan.world_size} ranks, and this loop has {ranks.size}: pass "
                "`ranks=ProcessGroup()` after `init_process_group`, or plan for the number of processes that train"
            )
        self.sizes = plan.micro_batch_sizes[ranks.rank]
        self._steps = plan.gradient_accumulation_steps
        self._largest = plan.micro_batch_size
        self._lock_step = lock_step

    @property
    def bound(self) -> int | None:
        """Samples above which a micro-batch is divided; none in lock step, where ranks would divide differently."""
        return None if self._lock_step else self._largest

    def divide(self, window: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Divide one batch of this rank's whole share into the plan's micro-batches, and leave other windows as is.

        In lock step one batch of fewer samples is divided into as many micro-batches too, with padding micro-batches
        where there are fewer samples than that.

        Raises:
            WorkloadError: when the window has more samples than the plan gives to this rank, or a batch that would have
                to be divided and cannot. The last window of an epoch may have fewer samples.
        """
        sizes = [micro_batch.size for micro_batch in window if micro_batch.is_counted and not micro_batch.is_padding]
        samples, share = sum(sizes), sum(self.sizes)
        if samples > share:
            raise WorkloadError(
                f"the window has {' + '.join(map(str, sizes))} = {samples} samples, but the plan has {share} "
                f"in micro-batches of at most {self._largest}: give `update` a list with one batch of {share} "
                "samples, which it divides"
            )
        for micro_batch in window:
            fits = micro_batch.size <= self._largest and micro_batch.is_counted
            if micro_batch.indivisible is not None and not fits and not micro_batch.is_padding:
                raise WorkloadError(f"the plan cannot be followed: {micro_batch.indivisible}")
        if len(window) != 1 or window[0].indivisible is not None:
            return list(window)
        batch = window[0]
        if not self._lock_step:
            return batch.divide(self.sizes) if batch.size == sum(self.sizes) else list(window)
        parts = [] if batch.is_padding else batch.divide(balanced_split(batch.size, self._steps))
        padding = replace(parts[-1] if parts else batch, is_padding=True)
        return [*parts, *[padding] * (self._steps - len(parts))]
