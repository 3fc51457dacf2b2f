"""Plans of an update: micro-batches per rank that sum to the effective batch. Pure data, no torch."""

from __future__ import annotations

from tuner.schemas.base import Document, NonNegativeInt, PositiveInt


class EffectiveBatchSize(Document):
    """The effective batch, asked and given."""

    requested: PositiveInt
    """Samples per update asked for."""
    achieved: NonNegativeInt
    """Samples per update the plan gives; 0 when no micro-batch fits."""
    exact: bool
    """Whether the two are the same."""


class UniformPlan(Document):
    """One micro-batch size, repeated: for frameworks that know no other way."""

    micro_batch_size: PositiveInt
    """Samples of every micro-batch."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update."""
    world_size: PositiveInt
    """Data-parallel ranks."""
    effective_batch_size: EffectiveBatchSize
    """Asked and given: a uniform plan cannot reach every number."""
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


class BalancedPlan(Document):
    """Micro-batch sizes that give exactly the effective batch, as even as whole samples allow."""

    effective_batch_size: PositiveInt
    """Samples per update over all ranks."""
    world_size: PositiveInt
    """Data-parallel ranks."""
    max_micro_batch_size: PositiveInt
    """The largest size allowed; no size of the plan is above it."""
    gradient_accumulation_steps: PositiveInt
    """Micro-batches per rank and update (of the rank with the most)."""
    micro_batch_sizes: tuple[tuple[PositiveInt, ...], ...]
    """For each rank, the sizes of its micro-batches in order."""


UniformPlan.model_rebuild()
