"""The objective `largest`: the largest micro-batch that fits. Pure, no torch."""

from collections.abc import Sequence

from typing_extensions import override

from batchwright.planning.objectives.objective import ObjectiveStrategy
from batchwright.schemas.recommendation import Alternative, Proof


class LargestMicroBatch(ObjectiveStrategy):
    """Search every size, and plan with the largest that fits."""

    title = "plan around the largest micro-batch that fits"
    is_of_plans = False

    @override
    def sizes(self, share: int, bound: int, granularity: int) -> None:
        return None

    @override
    def describe_choice(
        self, share: int, size: int, proof: Proof, listed: Sequence[Alternative], *, of_a_grid: bool = False
    ) -> str:
        if proof.stopped_by == "bound":
            return f"{size} fits; larger micro-batches were not tried."
        if not proof.shows_larger_fail:
            return f"{size} is the largest micro-batch that is known to fit."
        return f"{size} is the largest micro-batch that fits{' among the sizes searched' if of_a_grid else ''}."
