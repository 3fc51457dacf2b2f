"""Plans of an update: micro-batches per rank that sum to the effective batch. Pure data, no torch."""

from __future__ import annotations

from tuner.schemas.base import Document, PositiveInt


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
    """Whether the plan gives exactly what was requested."""

    def summary(self) -> PlanSummary:
        """Return these figures alone."""
        return PlanSummary(**{name: getattr(self, name) for name in PlanSummary.model_fields})


class Plan(PlanSummary):
    """A plan of an update with every micro-batch of it: what to train with."""

    micro_batch_sizes: tuple[tuple[PositiveInt, ...], ...]
    """For each rank, the sizes of its micro-batches in order; together they are the effective batch."""


class UniformPlan(PlanSummary):
    """One micro-batch size, repeated: for frameworks that know no other way. It cannot reach every effective batch."""

    change: str
    """What this plan changes against the balanced one, in a sentence."""
    nearest: tuple[ReachableBatch, ...] = ()
    """Effective batches close by that larger micro-batches reach, when this plan's are poor or miss the target."""


class ReachableBatch(Document):
    """An effective batch that a uniform plan reaches exactly."""

    effective_batch_size: PositiveInt
    """Samples per update."""
    micro_batch_size: PositiveInt
    """Samples of every micro-batch."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update."""


UniformPlan.model_rebuild()
