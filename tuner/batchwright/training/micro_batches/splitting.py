"""Micro-batches that can be divided into smaller parts when their samples do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

from batchwright.errors import WorkloadError
from batchwright.planning.accumulation import balanced_split
from batchwright.training.micro_batches.argument_checks import require_batches, require_count
from batchwright.training.micro_batches.sample_growth import grown_layout
from batchwright.training.micro_batches.sample_layout import (
    REMEDY,
    SampleLayout,
    UnknownSamplesError,
    first_dimension,
    layout_of,
    readings_of,
    shared_layouts,
)
from batchwright.workloads.base import Batch, Sample

ItemT = TypeVar("ItemT")
CountSamples = Callable[[Batch], int]
"""Counts the samples of a batch, and of any part of one."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples that run through the model together.

    Attributes:
        batch: input of the loss, on the CPU or already on the device.
        size: number of samples.
        divide: returns the samples in parts of the given sizes, which sum to ``size``.
        is_padding: true for a padding micro-batch, whose loss is ignored: it runs only because the model's collectives
            need every rank.
        indivisible: reason why the samples cannot be divided; None if they can.
        is_counted: false if ``size`` is a guess.
        guess: what about the division is a guess; None if the batch shows it.
        layout: where the samples are in the batch, if the division follows from that.
        readings: the same batch by each plausible layout, the likeliest first, if there are several, or if the only one
            is a guess that the loss has to confirm.
    """

    batch: Batch
    size: int
    divide: Callable[[Sequence[int]], list[MicroBatch]]
    is_padding: bool = False
    indivisible: str | None = None
    is_counted: bool = True
    guess: str | None = None
    layout: SampleLayout | None = None
    readings: tuple[MicroBatch, ...] = ()

    @classmethod
    def collated(cls, samples: Sequence[Sample], collate: Callable[[list[Sample]], Batch]) -> MicroBatch:
        """Collate samples into a micro-batch whose parts are collated again.

        For batches whose parts cannot be cut out, such as ``MicroBatch.collated(graphs, Batch.from_data_list)``.
        """

        def divide(sizes: Sequence[int]) -> list[MicroBatch]:
            rest = iter(samples)
            return [cls.collated(list(islice(rest, size)), collate) for size in sizes]

        return cls(collate(list(samples)), len(samples), divide)

    def at_most(self, largest: int) -> list[MicroBatch]:
        """Divide into the fewest parts of at most ``largest`` samples, as even as possible."""
        if self.size <= largest or self.indivisible is not None:
            return [self]
        return self.divide(balanced_split(self.size, -(-self.size // largest)))


def sliced(batch: Batch, size: int | None = None) -> MicroBatch:
    """Make a micro-batch that is divided by slicing every tensor along its first dimension.

    Args:
        batch: tensors, or mappings, lists, tuples and dataclasses of tensors, whose types the parts keep. Arrays and
            lists of ``size`` other values (names, ids) are sliced too; tensors without dimensions are kept.
        size: number of samples; by default the first dimension of the first tensor.

    Raises:
        WorkloadError: when no tensor has the size; on division, when a tensor does not have ``size`` as its first
            dimension.
    """
    count = first_dimension(batch) if size is None else size
    if count is None:
        raise WorkloadError(f"no tensor with samples along its first dimension in this batch ({type(batch).__name__})")

    def divide(sizes: Sequence[int]) -> list[MicroBatch]:
        parts = layout_of(batch, count).divide(batch, sizes)
        return [sliced(part, part_size) for part, part_size in zip(parts, sizes, strict=True)]

    return MicroBatch(batch, count, divide)


def laid_out(batch: Batch, size: int, layout: SampleLayout, guess: str | None = None) -> MicroBatch:
    """Make a micro-batch that is divided as ``layout`` says."""

    def divide(sizes: Sequence[int]) -> list[MicroBatch]:
        parts = zip(layout.divide(batch, sizes), sizes, strict=True)
        return [laid_out(part, part_size, layout, guess) for part, part_size in parts]

    return MicroBatch(batch, size, divide, guess=guess, layout=layout)


def as_micro_batch(batch: Batch, size: int | None = None, samples: CountSamples | None = None) -> MicroBatch:
    """Make a micro-batch of ``batch``, divided in the likeliest of the ways that its structure allows.

    A batch that may be a list of samples or samples along a dimension of its tensors is not divided: its ``readings``
    are, once one of them is chosen. A batch whose samples are not known is accepted too, but cannot be divided.
    ``size`` is ignored if nothing in the batch has as many samples; counting ``samples`` decides between several
    readings.
    """
    if samples is not None:
        size = samples(batch)
    layouts = readings_of(batch, size)
    is_known = size is not None and bool(layouts)
    if size is not None and not layouts:
        layouts = shared_layouts(batch, size)
    if samples is not None and size is not None:
        layouts = [layout for layout in layouts if _agrees(layout, batch, size, samples)][:1]
    elif not layouts and size is not None:
        layouts = readings_of(batch, None)
    readings = tuple(laid_out(batch, layout.count(batch), layout) for layout in layouts)
    if not readings:
        return unknown_micro_batch(batch, size, is_counted=samples is not None)
    if len(readings) == 1:
        return readings[0] if is_known or layouts[0].is_conventional else replace(readings[0], readings=readings)
    if len({layout.has_items for layout in layouts}) == 1:  # the first dimension is the convention
        return replace(readings[0], readings=readings)
    kinds = (next(one for one in readings if one.layout and one.layout.has_items is kind) for kind in (True, False))
    described = " or ".join(one.layout.describe(one.size) for one in kinds if one.layout)
    reason = f"the batch may be {described}: pass `samples=`, a function that returns the number of samples of a batch"
    return replace(_indivisible(batch, readings[0].size, reason), readings=readings)


def _agrees(layout: SampleLayout, batch: Batch, size: int, samples: CountSamples) -> bool:
    """Return whether the parts of a batch by a layout have as many samples as they should, by the user's count."""
    if size == 1:
        return True
    with suppress(Exception):  # the function may need what a wrong part lacks
        return [samples(part) for part in layout.divide(batch, (size - 1, 1))] == [size - 1, 1]
    return False


def unknown_micro_batch(batch: Batch, size: int | None = None, *, is_counted: bool = False) -> MicroBatch:
    """A micro-batch of an unknown type, or whose tensors have no size in common."""
    reason = f"a batch of type {type(batch).__name__} cannot be divided, as its samples are not known: {REMEDY}"
    length = first_dimension(batch)
    if length is not None:
        try:
            layout_of(batch, length if size is None else size, range(8))
        except UnknownSamplesError as error:
            reason = str(error)
    elif isinstance(batch, Sized) and not isinstance(batch, (str, Mapping)):
        length = len(batch)
    count = size if is_counted else length
    return _indivisible(batch, count or 1, reason, is_counted=is_counted)


def _indivisible(batch: Batch, size: int, reason: str, *, is_counted: bool = False) -> MicroBatch:
    def refuse(_: Sequence[int]) -> list[MicroBatch]:
        raise WorkloadError(reason)

    return MicroBatch(batch, size, refuse, indivisible=reason, is_counted=is_counted)


@runtime_checkable
class MakesMicroBatches(Protocol):
    """Optional part of a workload: it says how its batches are divided."""

    def make_micro_batch(self, size: int) -> MicroBatch:
        """Make a batch as ``make_batch`` does, with its division."""


def made_micro_batch(make_batch: Callable[[int], Batch], size: int, samples: CountSamples | None = None) -> MicroBatch:
    """Make a batch of ``size`` samples, divided as the growth to a batch of one more sample shows.

    ``make_batch``, which may return a ``MicroBatch``, is called twice at most; once if ``samples`` are counted.

    Raises:
        WorkloadError: when the batch has another number of samples.
    """
    batch = make_batch(size)
    counted = batch.size if isinstance(batch, MicroBatch) else size if samples is None else samples(batch)
    if counted != size:
        raise WorkloadError(f"make_batch({size}) returned a batch of {counted} samples")
    if isinstance(batch, MicroBatch):
        return batch
    if samples is not None:
        return as_micro_batch(batch, samples=samples)
    try:
        other = make_batch(size + 1)
    except Exception as error:  # noqa: BLE001 - a user's function may refuse a size
        found = as_micro_batch(batch, size)
        return replace(found, guess=f"make_batch({size + 1}) raised {type(error).__name__}")
    try:
        layout = grown_layout(batch, size, other, size + 1)
    except UnknownSamplesError as error:
        return _indivisible(batch, size, str(error), is_counted=True)
    rates = "; ".join(f"`{name}` has {rate} rows or items for each sample" for name, rate in layout.rates().items())
    return laid_out(batch, size, layout, rates or None)


def split_batch(batch: Batch, micro_batch_size: int) -> list[MicroBatch]:
    """Divide ``batch`` into the fewest micro-batches of at most ``micro_batch_size`` samples: 10 by 4 gives 4, 3, 3.

    Raises:
        SpecError: when ``micro_batch_size`` is no integer of at least 1.
        WorkloadError: as ``sliced``.
    """
    return sliced(batch).at_most(require_count("micro_batch_size", micro_batch_size))


class Window(list[ItemT]):
    """Micro-batches of one update, with the batch size of the loader that they come from, if it has one."""

    batch_size: int | None = None


def windows(micro_batches: Iterable[ItemT], steps: int) -> Iterator[list[ItemT]]:
    """Group ``micro_batches`` into accumulation windows of ``steps``, one per update; the last has the remainder.

    The iterable may be a generator, without a length. The batch size of a ``DataLoader`` tells ``update`` where the
    samples of its batches are.

    Raises:
        SpecError: when ``steps`` is no integer of at least 1, or ``micro_batches`` is one batch.
    """
    require_batches(micro_batches)
    steps, iterator = require_count("steps", steps), iter(micro_batches)
    sampler = getattr(micro_batches, "batch_sampler", None)
    batch_size = getattr(micro_batches, "batch_size", None) or getattr(sampler, "batch_size", None)

    def grouped() -> Iterator[list[ItemT]]:
        while window := Window(islice(iterator, steps)):
            window.batch_size = batch_size if isinstance(batch_size, int) else None
            yield window

    return grouped()
