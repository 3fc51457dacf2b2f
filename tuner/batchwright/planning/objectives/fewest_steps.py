"""The objective `fewest_steps`: the fewest accumulation steps, in fewer probes. Pure, no torch."""

from collections.abc import Sequence

from typing_extensions import override

from batchwright.planning.accumulation import steps_of
from batchwright.planning.objectives.objective import ObjectiveStrategy
from batchwright.schemas.recommendation import Alternative, Proof
from batchwright.units import counted


class FewestSteps(ObjectiveStrategy):
    """Search only the sizes at which the number of accumulation steps changes."""

    title = "fewest accumulation steps that fit"

    @override
    def describe_choice(
        self, share: int, size: int, proof: Proof, listed: Sequence[Alternative], *, of_a_grid: bool = False
    ) -> str:
        steps = steps_of(share, size)
        if not proof.is_conclusive:
            return (
                f"A plan with {counted(steps, 'accumulation step')} of at most {size} samples fits. It is not "
                "known whether fewer steps fit."
            )
        return f"{counted(steps, 'accumulation step')} of at most {size} samples: no plan with fewer steps fits."
