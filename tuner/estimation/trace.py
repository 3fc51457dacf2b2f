"""What a traced update took and gave back: the contract between tracing and replaying. Pure data, no torch.

A trace is a list of blocks and the order in which they come and go. Two traces of one workload at different micro-batch
sizes usually differ in nothing but the blocks' sizes; ``SizedTrace`` is then the trace of every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Literal

from tuner.documents import Document, NonNegativeInt, PositiveInt
from tuner.errors import EstimateError


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
                "events": (*self.events[:ended], *repeated, *self.events[ended:]),
                "marks": (
                    *(mark for mark in self.marks if mark.position < began or mark.name == "build"),
                    Mark(name="first-update", position=began),
                    Mark(name="measured-update", position=ended),
                    Mark(name="end", position=ended + len(repeated)),
                ),
            }
        )


@dataclass(frozen=True)
class SizedTrace:
    """One workload's trace at every micro-batch size, from traces at a few.

    Attributes:
        trace: the trace at the first size; its events are those of every size.
        polynomials: bytes in powers of the size, ``c0 + c1*b + c2*b**2``: those that occur.
        kinds: for each block the index of its polynomial.
    """

    trace: Trace
    polynomials: tuple[tuple[Fraction, ...], ...]
    kinds: tuple[int, ...]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> SizedTrace:
        """The trace through ``traces`` of different sizes: three tell a quadratic (a loss over pairs of samples).

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
        places = [Fraction(it.micro_batch_size) for it in traces]
        values = list(zip(*(it.sizes for it in traces), strict=True))
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        polynomials = tuple(_interpolated(places, value) for value in numbers)
        return cls(first, polynomials, tuple(numbers[value] for value in values))

    def at(self, micro_batch_size: int) -> Trace:
        """The trace at ``micro_batch_size``."""
        return self.trace.model_copy(
            update={"micro_batch_size": micro_batch_size, "sizes": tuple(self.sizes_at(micro_batch_size))}
        )

    def sizes_at(self, micro_batch_size: int) -> list[int]:
        """Bytes of every block at ``micro_batch_size``."""
        values = [_value(it, micro_batch_size) for it in self.polynomials]
        return [values[kind] for kind in self.kinds]


def _interpolated(places: list[Fraction], values: tuple[int, ...]) -> tuple[Fraction, ...]:
    """Coefficients of the polynomial of the lowest degree through the points, by Newton's divided differences."""
    if len(set(values)) == 1:
        return (Fraction(values[0]),)
    differences = [Fraction(value) for value in values]
    count = len(places)
    for order in range(1, count):
        for index in range(count - 1, order - 1, -1):
            step = places[index] - places[index - order]
            differences[index] = (differences[index] - differences[index - 1]) / step
    coefficients = [Fraction(0)] * count
    for order in range(count - 1, -1, -1):  # Horner, in (b - place)
        shifted = [Fraction(0), *coefficients[:-1]]
        coefficients = [high - places[order] * low for high, low in zip(shifted, coefficients, strict=True)]
        coefficients[0] += differences[order]
    while len(coefficients) > 1 and coefficients[-1] == 0:
        coefficients.pop()
    return tuple(coefficients)


def _value(coefficients: tuple[Fraction, ...], size: int) -> int:
    total = Fraction(0)
    for coefficient in reversed(coefficients):
        total = total * size + coefficient
    return max(0, round(total))
