"""What a traced update took and gave back: the contract between tracing and replaying. Pure data, no torch.

A trace is a list of blocks and the order in which they come and go. Two traces of one workload at different micro-batch
sizes usually differ in nothing but the blocks' sizes; ``SizedTrace`` is then the trace of every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field

from tuner.errors import EstimateError
from tuner.estimation.size_growth import Growth, growth_through
from tuner.schemas.base import Document, NonNegativeInt, PositiveInt


class Category(StrEnum):
    """What a block holds."""

    PARAMETERS = "parameters"
    """Parameters and buffers."""
    GRADIENTS = "gradients"
    """Gradients, and the sums that accumulation keeps of them."""
    OPTIMIZER_STATE = "optimizer_state"
    """The optimizer's state and moving averages of the weights."""
    ACTIVATIONS = "activations"
    """What a forward pass leaves for the backward pass, and the batch itself."""
    TEMPORARIES = "temporaries"
    """Everything else: alive within one pass or step only."""
    WORKSPACE = "workspace"
    """What kernels and libraries take by themselves from the allocator."""


class Bound(Document):
    """The bytes of a block that stops growing, such as a sum for each row of an embedding that occurs in a batch."""

    growing: NonNegativeInt
    """Bytes that it would have if it did not stop."""
    most: NonNegativeInt
    """Bytes that it has at most, whatever the micro-batch."""

    @property
    def nbytes(self) -> int:
        """Bytes that it has."""
        return min(self.growing, self.most)


class Mark(Document):
    """The beginning of a stretch of a trace."""

    name: Literal["build", "first-update", "measured-update", "end"]
    """Which stretch begins."""
    position: NonNegativeInt
    """Index into ``events`` of its first event."""


class Trace(Document):
    """The blocks of device memory that building a workload and two of its updates take, in order."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    accumulates: bool
    """Whether an update has two micro-batches of this size, or one."""
    sizes: tuple[NonNegativeInt, ...]
    """Bytes asked for, by block; blocks are numbered in the order in which they are first taken."""
    categories: tuple[Category, ...]
    """What each block holds."""
    events: tuple[int, ...]
    """``i`` where block ``i`` is taken, ``~i`` (that is ``-i - 1``) where it is given back."""
    marks: tuple[Mark, ...]
    """Where each stretch begins."""
    decisions: Literal["cuda", "cpu"]
    """Whose decisions (kernels, autocast, attention) the traced operations took."""
    notes: tuple[str, ...] = ()
    """What the trace could not follow, and what that does to it."""
    bounds: dict[int, Bound] = Field(default_factory=dict)
    """By block, what bounds its size; of most blocks nothing is known."""

    def position(self, name: str) -> int:
        """Index into ``events`` of the first event of a stretch."""
        return next(mark.position for mark in self.marks if mark.name == name)

    def warmed_up(self) -> Trace:
        """The same with the measured update made once before it, as ``first-update``.

        What the update takes and keeps (workspaces of libraries) is taken by the first alone, and what it gives back of
        what was there before is given back by the first alone; all the rest comes and goes again.
        """
        began, ended = self.position("measured-update"), self.position("end")
        update = self.events[began:ended]
        given_back = {~event for event in update if event < 0}
        renewed = [event for event in update if event >= 0 and event in given_back]
        again = {block: len(self.sizes) + number for number, block in enumerate(renewed)}
        repeated = [
            again[event] if event >= 0 else ~again[~event]
            for event in update
            if (event if event >= 0 else ~event) in again
        ]
        return self.model_copy(
            update={
                "sizes": (*self.sizes, *(self.sizes[block] for block in renewed)),
                "categories": (*self.categories, *(self.categories[block] for block in renewed)),
                "bounds": self.bounds | {again[it]: bound for it, bound in self.bounds.items() if it in again},
                "events": (*self.events[:ended], *repeated, *self.events[ended:]),
                "marks": (
                    *(mark for mark in self.marks if mark.position < began or mark.name == "build"),
                    Mark(name="first-update", position=began),
                    Mark(name="measured-update", position=ended),
                    Mark(name="end", position=ended + len(repeated)),
                ),
            }
        )


_MATTERS = 200
"""Bends that are one in so many bytes of all blocks, or less, make no trace inexact."""


@dataclass(frozen=True)
class SizedTrace:
    """One workload's trace at every micro-batch size, from traces at a few.

    Attributes:
        trace: the trace at the first size; its events are those of every size.
        growths: how bytes grow with the size: those that occur.
        kinds: for each block the index of its growth.
        exact: whether all that matters grows as tensors do. What does not (rounded up or down, bounded, made in steps)
            is told by lines between the traces, and the outer ones go on.
    """

    trace: Trace
    growths: tuple[Growth, ...]
    kinds: tuple[int, ...]
    exact: bool = True

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> SizedTrace:
        """The trace through ``traces`` of rising sizes: three tell a quadratic (a loss over pairs of samples).

        Raises:
            EstimateError: when they differ in more than sizes: the workload does different things at these sizes.
        """
        first, *others = traces
        for other in others:
            if other.events != first.events or other.categories != first.categories:
                raise EstimateError(
                    f"the updates at micro-batch {first.micro_batch_size} and {other.micro_batch_size} differ in more "
                    f"than the sizes of their tensors ({len(first.events)} and {len(other.events)} events)"
                )
        places = tuple(it.micro_batch_size for it in traces)
        values = [_points(traces, block) for block in range(len(first.sizes))]
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        growths = tuple(growth_through(places, *value) for value in numbers)
        kinds = tuple(numbers[value] for value in values)
        bends = sum(growths[kind].bend for kind in kinds)
        return cls(first, growths, kinds, exact=bends * _MATTERS <= sum(traces[-1].sizes))

    def at(self, micro_batch_size: int) -> Trace:
        """The trace at ``micro_batch_size``; bounds are part of its sizes."""
        return self.trace.model_copy(
            update={"micro_batch_size": micro_batch_size, "sizes": tuple(self.sizes_at(micro_batch_size)), "bounds": {}}
        )

    def sizes_at(self, micro_batch_size: int) -> list[int]:
        """Bytes of every block at ``micro_batch_size``."""
        values = [it.at(micro_batch_size) for it in self.growths]
        return [values[kind] for kind in self.kinds]


def _points(traces: Sequence[Trace], block: int) -> tuple[tuple[int, ...], int | None]:
    """A block's bytes in each trace, as if nothing bounded them, and the bound."""
    bounds = [it.bounds[block] for it in traces if block in it.bounds]
    if not bounds:
        return tuple(it.sizes[block] for it in traces), None
    return tuple(it.growing for it in bounds), bounds[0].most
