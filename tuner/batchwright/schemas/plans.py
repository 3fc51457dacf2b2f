"""Plans of an update: micro-batches per rank that sum to the effective batch. Pure data, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import ValidationInfo, field_validator
from typing_extensions import override

from batchwright.schemas.base import Document, PositiveInt
from batchwright.units import counted


class PlanSummary(Document):
    """A plan of an update, without the list of its micro-batches."""

    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update (of the rank with the most)."""
    micro_batch_size: PositiveInt
    """The plan's largest micro-batch: the others may be smaller, so that they sum to the effective batch."""
    world_size: PositiveInt
    """Data-parallel ranks."""
    effective_batch_size: PositiveInt
    """Samples per update over all ranks that the plan gives."""
    requested_effective_batch_size: PositiveInt
    """Samples per update over all ranks that were requested."""
    exact: bool
    """True if the plan gives exactly the requested effective batch."""

    @field_validator("exact")
    @classmethod
    def _is_whether_both_batches_are_equal(cls, exact: bool, info: ValidationInfo) -> bool:  # noqa: FBT001 - of pydantic
        given, requested = (info.data.get(name) for name in ("effective_batch_size", "requested_effective_batch_size"))
        if None not in {given, requested} and exact != (given == requested):
            raise ValueError(
                f"must be {given == requested}: the plan gives {given} samples, and {requested} were requested"
            )
        return exact

    def summary(self) -> PlanSummary:
        """Return these figures alone."""
        return PlanSummary(**{name: getattr(self, name) for name in PlanSummary.model_fields})


class Plan(PlanSummary):
    """A plan of an update with all its micro-batches: what to train with."""

    micro_batch_sizes: tuple[tuple[PositiveInt, ...], ...]
    """Sizes of the micro-batches of each rank, in order. They sum to the effective batch."""

    @field_validator("micro_batch_sizes")
    @classmethod
    def _are_those_of_the_figures(
        cls, sizes: tuple[tuple[PositiveInt, ...], ...], info: ValidationInfo
    ) -> tuple[tuple[PositiveInt, ...], ...]:
        if not sizes or not all(sizes):
            raise ValueError("must have a micro-batch for each rank")
        found = {
            "world_size": len(sizes),
            "gradient_accumulation_steps": max(map(len, sizes)),
            "micro_batch_size": max(map(max, sizes)),
            "effective_batch_size": sum(map(sum, sizes)),
        }
        for name, value in found.items():
            if info.data.get(name, value) != value:
                raise ValueError(f"must agree with {name}, which is {info.data[name]}: these sizes make it {value}")
        return sizes

    @property
    @override
    def headline(self) -> str:
        """The sizes and their sum, such as ``34 + 33 + 33 = 100 samples per update``."""
        shapes = Counter(self.micro_batch_sizes)
        words = {sizes: format_sizes(sizes) if sizes[1:] else f"1 x {sizes[0]}" for sizes in shapes}
        ranks = " and ".join(
            words[sizes] if self.world_size == 1 else f"{counted(of_shape, 'rank')} x ({words[sizes]})"
            for sizes, of_shape in shapes.items()
        )
        return f"{ranks} = {counted(self.effective_batch_size, 'sample')} per update"


class ReachableBatch(Document):
    """An effective batch that a uniform plan reaches exactly."""

    effective_batch_size: PositiveInt
    """Samples per update."""
    micro_batch_size: PositiveInt
    """Samples of every micro-batch."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update."""


class UniformPlan(PlanSummary):
    """A plan that repeats one micro-batch size, as most frameworks do. It cannot reach every effective batch."""

    change: str
    """Difference from the balanced plan, in a sentence."""
    nearest: tuple[ReachableBatch, ...] = ()
    """Nearby effective batches with larger micro-batches, when those of this plan are small or miss the target."""


def format_sizes(sizes: Sequence[int]) -> str:
    """Format sizes as ``34 + 33 + 33``, or as ``6 x 34 + 2 x 33`` when there are many."""
    if len(sizes) <= 4:  # noqa: PLR2004 - short enough to write out
        return " + ".join(str(size) for size in sizes)
    return " + ".join(f"{count} x {size}" for size, count in Counter(sizes).items())
