"""A plan in a loop of one's own: the samples and the micro-batch sizes of one rank in each update."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.errors import WorkloadError
from tuner.schemas.plans import Plan
from tuner.training.accumulation.collectives import Ranks
from tuner.training.micro_batches.splitting import MicroBatch


class PlannedWindow:
    """The share of one rank in each update of a plan.

    Args:
        plan: plan of the effective batch over all ranks.
        ranks: the ranks of the loop, and which of them this process is.

    Attributes:
        sizes: sizes of this rank's micro-batches, in order.

    Raises:
        WorkloadError: when the plan is for another number of ranks.
    """

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        if plan.world_size != ranks.size:
            raise WorkloadError(
                f"the plan is for {plan.world_size} ranks, and this loop has {ranks.size}: pass "
                "`ranks=ProcessGroup()` after `init_process_group`, or plan for the number of processes that train"
            )
        self.sizes = plan.micro_batch_sizes[ranks.rank]

    def divide(self, window: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Divide one batch of this rank's whole share into the plan's micro-batches, and leave other windows as is.

        Raises:
            WorkloadError: when the window has more samples than the plan gives to this rank, or batches whose samples
                cannot be counted. The last window of an epoch may have fewer.
        """
        for micro_batch in window:
            if not micro_batch.is_counted:
                raise WorkloadError(f"the plan cannot be followed: {micro_batch.indivisible}")
        samples = sum(micro_batch.size for micro_batch in window if not micro_batch.is_padding)
        share = sum(self.sizes)
        if samples > share:
            sizes = " + ".join(str(micro_batch.size) for micro_batch in window)
            raise WorkloadError(
                f"a window of {sizes} = {samples} samples, where the plan has {share} in micro-batches of at most "
                f"{max(self.sizes)}: give `update` a list with one batch of {share} samples, which it divides"
            )
        if len(window) == 1 and samples == share and window[0].indivisible is None:
            return window[0].divide(self.sizes)
        return list(window)
