"""The objective `fewest_steps`: the fewest accumulation steps, in fewer probes. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from batchwright.planning.accumulation import steps_of
from batchwright.planning.objectives.objective import ObjectiveStrategy
from batchwright.schemas.recommendation import Alternative, Proof


class FewestSteps(ObjectiveStrategy):
    """Search only the sizes at which the number of accumulation steps changes."""

    title = "fewest accumulation steps that fit"

    @override
    def describe_choice(
        self, share: int, size: int, proof: Proof, listed: Sequence[Alternative], *, of_a_grid: bool = False
    ) -> str:
        steps = steps_of(share, size)
        if not proof.is_conclusive:
            return f"{steps} accumulation steps with micro-batches of {size} fit; whether fewer do is not known."
        return f"{steps} accumulation steps are the fewest that fit, and micro-batches of {size} are enough for them."
