"""Traces of allocations: the contract between tracing and replaying. Pure data, no torch.

A trace is a list of blocks, and the order in which they are allocated and freed. Two traces of one workload at
different micro-batch sizes usually differ only in the sizes of the blocks; ``SizedTrace`` is then the trace at every
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from pydantic import Field

from batchwright.errors import EstimateError
from batchwright.estimation.row_sums import partial_sums_bytes
from batchwright.estimation.size_growth import Growth, GrowthOfRowSums, Polynomial, SumOfGrowths, growth_from_points
from batchwright.schemas.base import Document, NonNegativeInt, PositiveInt

COMPILED_NOTE = (
    "torch.compile is not traced: the interval spans 0.8 to 1.14 of the memory without it; the command's "
    "`--engine virtual` compiles the model"
)


class Category(StrEnum):
    """The contents of a block."""

    PARAMETERS = "parameters"
    """Parameters and buffers."""
    GRADIENTS = "gradients"
    """Gradients, and accumulated sums of gradients."""
    OPTIMIZER_STATE = "optimizer_state"
    """The optimizer's state, and moving averages of the weights."""
    ACTIVATIONS = "activations"
    """Tensors that a forward pass keeps for the backward pass, and the batch itself."""
    TEMPORARIES = "temporaries"
    """All other tensors, alive only within one pass or step."""
    WORKSPACE = "workspace"
    """Memory that kernels and libraries allocate for themselves."""


class Bound(Document):
    """The bytes of a block with an upper bound, such as a sum for each row of an embedding that occurs in a batch."""

    unbounded_bytes: NonNegativeInt
    """Bytes without the bound."""
    max_bytes: NonNegativeInt
    """The bound, which does not depend on the micro-batch size."""
    beside_bytes: NonNegativeInt = 0
    """Bytes of the block that the bound does not limit, beside those that it does."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return min(self.unbounded_bytes, self.max_bytes) + self.beside_bytes


class RowSums(Document):
    """The partial sums of a sum over dimensions, as many as the card's threads make (``partial_sums_bytes``)."""

    rows: NonNegativeInt
    """The elements of each sum."""
    columns: NonNegativeInt
    """The sums."""
    width: NonNegativeInt
    """The sums of neighbours."""
    element_bytes: PositiveInt
    """Bytes of an element."""
    threads: NonNegativeInt
    """Threads that the card runs at once."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return partial_sums_bytes(self.rows, self.columns, self.width, self.element_bytes, self.threads)


BlockBytes: TypeAlias = int | Bound | RowSums
"""The bytes of a block, or what they depend on where it does not grow as tensors do."""


class Mark(Document):
    """The beginning of a section of a trace."""

    name: Literal["build", "first-update", "measured-update", "end"]
    """The section that begins."""
    position: NonNegativeInt
    """Index into ``events`` of the section's first event."""


class Trace(Document):
    """The blocks of device memory that building a workload and running its updates allocate, in order."""

    micro_batch_size: PositiveInt
    """Samples per forward and backward pass."""
    accumulates: bool
    """True if an update has two micro-batches of this size, False if it has one."""
    sizes: tuple[NonNegativeInt, ...]
    """Bytes requested, by block; blocks are numbered in the order of their allocation."""
    categories: tuple[Category, ...]
    """The contents of each block."""
    events: tuple[int, ...]
    """``i`` where block ``i`` is allocated, ``~i`` (that is ``-i - 1``) where it is freed."""
    marks: tuple[Mark, ...]
    """The beginning of each section."""
    decisions: Literal["cuda", "cpu"]
    """The device whose kernels, autocast rules and attention were traced."""
    notes: tuple[str, ...] = ()
    """Operations that could not be traced, and their effect on the trace."""
    bounds: dict[int, Bound | RowSums] = Field(default_factory=dict)
    """Blocks that do not grow as tensors do, by block."""
    parts: dict[int, PositiveInt] = Field(default_factory=dict)
    """For blocks that are in truth several equal ones, allocated one after the other, and freed so: their number, by
    block. The parts of a block have its bytes between them."""
    workspace_error: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)
    """By how many bytes the workspace of a call may be smaller, and larger, than it is in the trace: the most of all
    calls. What cuDNN chooses grows with its tensors."""

    def position(self, name: str) -> int:
        """Return the index into ``events`` of the first event of a section."""
        return next(mark.position for mark in self.marks if mark.name == name)

    def on_card(self, threads: int) -> Trace:
        """Return this trace with the partial sums of a card that runs as many threads at once."""
        return self.changed(
            {
                block: sums.model_copy(update={"threads": threads})
                for block, sums in self.bounds.items()
                if isinstance(sums, RowSums)
            }
        )

    def changed(self, blocks: Mapping[int, BlockBytes]) -> Trace:
        """Return this trace with other bytes of some blocks."""
        if not blocks:
            return self
        sizes, bounds = list(self.sizes), dict(self.bounds)
        for block, nbytes in blocks.items():
            bounds.pop(block, None)
            if not isinstance(nbytes, int):
                bounds[block] = nbytes
            sizes[block] = nbytes if isinstance(nbytes, int) else nbytes.nbytes
        return self.model_copy(update={"sizes": tuple(sizes), "bounds": bounds})

    def with_warm_up_update(self) -> Trace:
        """Return this trace with a copy of the measured update before it, as ``first-update``.

        Blocks that the update allocates and keeps (workspaces of libraries) are allocated by the first update only.
        Blocks from before the update that it frees are freed by the first update only. All other events are repeated.
        """
        began, ended = self.position("measured-update"), self.position("end")
        update = self.events[began:ended]
        freed = {~event for event in update if event < 0}
        reallocated = [event for event in update if event >= 0 and event in freed]
        copy_of = {block: len(self.sizes) + number for number, block in enumerate(reallocated)}
        repeated = [
            copy_of[event] if event >= 0 else ~copy_of[~event]
            for event in update
            if (event if event >= 0 else ~event) in copy_of
        ]
        return self.model_copy(
            update={
                "sizes": (*self.sizes, *(self.sizes[block] for block in reallocated)),
                "categories": (*self.categories, *(self.categories[block] for block in reallocated)),
                "bounds": self.bounds
                | {copy_of[block]: bound for block, bound in self.bounds.items() if block in copy_of},
                "parts": self.parts
                | {copy_of[block]: count for block, count in self.parts.items() if block in copy_of},
                "events": (*self.events[:ended], *repeated, *self.events[ended:]),
                "marks": (
                    *(mark for mark in self.marks if mark.position < began or mark.name == "build"),
                    Mark(name="first-update", position=began),
                    Mark(name="measured-update", position=ended),
                    Mark(name="end", position=ended + len(repeated)),
                ),
            }
        )


_DEVIATION_RATIO = 200
"""A trace counts as exact if the deviations sum to at most one part in this many of the bytes of all blocks."""


_NO_ERROR = (Polynomial((Fraction(0),)), Polynomial((Fraction(0),)))


@dataclass(frozen=True)
class SizedTrace:
    """One workload's trace at every micro-batch size, from traces at a few sizes.

    Attributes:
        trace: the trace at the first size; its events are those at every size.
        growths: the distinct functions from micro-batch size to bytes.
        growth_of_block: for each block the index of its growth.
        exact: whether nearly all bytes grow as those of tensors do. Other blocks (rounded, bounded, growing in steps)
            are interpolated linearly.
        error_growths: functions from micro-batch size to the two figures of ``workspace_error``.
    """

    trace: Trace
    growths: tuple[Growth, ...]
    growth_of_block: tuple[int, ...]
    exact: bool = True
    error_growths: tuple[Growth, Growth] = _NO_ERROR

    @property
    def proportional(self) -> bool:
        """Whether each block is constant or in proportion to the size, so that two sizes determine it."""
        return all(growth.is_proportional for growth in self.growths)

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> SizedTrace:
        """Interpolate ``traces`` of increasing sizes; a quadratic (a loss over pairs of samples) needs three.

        Raises:
            EstimateError: when the traces differ in more than sizes, because the workload depends on the size.
        """
        first, *others = traces
        for other in others:
            if (other.events, other.categories, other.parts) != (first.events, first.categories, first.parts):
                raise EstimateError(
                    f"the updates at micro-batch {first.micro_batch_size} and {other.micro_batch_size} differ in more "
                    f"than the sizes of their tensors ({len(first.events)} and {len(other.events)} events)"
                )
        traced_sizes = tuple(trace.micro_batch_size for trace in traces)
        rows = list(zip(*(trace.sizes for trace in traces), strict=True))
        unbounded = {row: _Points(row, None, ()) for row in set(rows)}
        bounded = {block for trace in traces for block in trace.bounds}
        values = [_points_of(traces, block) if block in bounded else unbounded[row] for block, row in enumerate(rows)]
        growth_indices = {value: number for number, value in enumerate(dict.fromkeys(values))}
        growths = tuple(points.growth(traced_sizes) for points in growth_indices)
        growth_of_block = tuple(growth_indices[value] for value in values)
        deviations = sum(growths[kind].deviation for kind in growth_of_block)
        return cls(
            first,
            growths,
            growth_of_block,
            exact=deviations * _DEVIATION_RATIO <= sum(traces[-1].sizes),
            error_growths=(
                growth_from_points(traced_sizes, tuple(trace.workspace_error[0] for trace in traces)),
                growth_from_points(traced_sizes, tuple(trace.workspace_error[1] for trace in traces)),
            ),
        )

    def at(self, micro_batch_size: int) -> Trace:
        """Return the trace at ``micro_batch_size``; its sizes include the bounds."""
        return self.trace.model_copy(
            update={
                "micro_batch_size": micro_batch_size,
                "sizes": tuple(self.sizes_at(micro_batch_size)),
                "bounds": {},
                "workspace_error": tuple(growth.at(micro_batch_size) for growth in self.error_growths),
            }
        )

    def sizes_at(self, micro_batch_size: int) -> list[int]:
        """Return the bytes of every block at ``micro_batch_size``."""
        values = [growth.at(micro_batch_size) for growth in self.growths]
        return [values[kind] for kind in self.growth_of_block]


class _Points(NamedTuple):
    """The bytes of a block in each trace, of which a bound limits those of ``unbounded``."""

    unbounded: tuple[int, ...]
    max_bytes: int | None
    beside: tuple[int, ...]

    def growth(self, sizes: tuple[int, ...]) -> Growth:
        """Return the function from micro-batch size to bytes."""
        bounded = growth_from_points(sizes, self.unbounded, self.max_bytes)
        return SumOfGrowths(bounded, growth_from_points(sizes, self.beside)) if self.beside else bounded


class _RowPoints(NamedTuple):
    """The shapes of a sum over dimensions in each trace, for a block of its partial sums."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    width: tuple[int, ...]
    element_bytes: int
    threads: int

    def growth(self, sizes: tuple[int, ...]) -> Growth:
        """Return the function from micro-batch size to bytes."""
        rows, columns, width = (growth_from_points(sizes, values) for values in (self.rows, self.columns, self.width))
        return GrowthOfRowSums(rows, columns, width, self.element_bytes, self.threads)


def _points_of(traces: Sequence[Trace], block: int) -> _Points | _RowPoints:
    """Return those of a block that does not grow as tensors do."""
    bounds = [trace.bounds[block] for trace in traces if block in trace.bounds]
    sums = [bound for bound in bounds if isinstance(bound, RowSums)]
    if sums:
        rows, columns, width = zip(*((each.rows, each.columns, each.width) for each in sums), strict=True)
        return _RowPoints(rows, columns, width, sums[0].element_bytes, sums[0].threads)
    limited = [bound for bound in bounds if isinstance(bound, Bound)]
    beside = tuple(bound.beside_bytes for bound in limited)
    return _Points(
        tuple(bound.unbounded_bytes for bound in limited), limited[0].max_bytes, beside if any(beside) else ()
    )
