"""What a tuning looks for: the interface of the objectives. Pure, no torch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from batchwright.planning.accumulation import sizes_for_steps
from batchwright.planning.plan_figures import PlanCandidates
from batchwright.schemas.recommendation import Alternative, Proof


class ObjectiveStrategy(ABC):
    """What a tuning looks for. Stateless.

    Attributes:
        title: heading of a recommendation.
        is_of_plans: whether only plans are compared, and not the sizes that fit.
        times_plans: whether plans are timed after the search, and the choice rests on their times.
    """

    title: ClassVar[str]
    is_of_plans: ClassVar[bool] = True
    times_plans: ClassVar[bool] = False

    def sizes(self, share: int, bound: int, granularity: int) -> tuple[int, ...] | None:
        """The sizes worth probing, rising; None for every multiple of ``granularity``.

        Plans depend on the number of accumulation steps alone, so the default is the sizes at which that changes.

        Args:
            share: samples of a rank in an update.
            bound: the largest size, at most ``share``.
            granularity: only multiples of it count.
        """
        return sizes_for_steps(share, bound, granularity)

    def next_to_time(self, plans: PlanCandidates) -> int | None:
        """The largest micro-batch of the plan to time next; None when another timing would not change the choice."""
        del plans
        return None

    def recommended_size(self, plans: PlanCandidates) -> int:
        """The micro-batch size to plan with: by default the largest that fits."""
        return plans.largest

    @abstractmethod
    def describe_choice(
        self, share: int, size: int, proof: Proof, listed: Sequence[Alternative], *, of_a_grid: bool = False
    ) -> str:
        """Explain why the plan of ``size`` was chosen and no other.

        Args:
            share: samples of a rank in an update.
            size: the recommended micro-batch size.
            proof: the largest size that was proven to fit, and what stopped the search there.
            listed: the alternatives.
            of_a_grid: whether the request excluded sizes between those searched, or above them.
        """
