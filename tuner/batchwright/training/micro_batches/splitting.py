"""Micro-batches that can be divided into smaller parts when their samples do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from torch.nn.utils.rnn import PackedSequence

from batchwright.errors import WorkloadError
from batchwright.planning.accumulation import balanced_split
from batchwright.training.micro_batches.nested_batches import named_tensors, sliced_samples, tensors_of, to_device
from batchwright.workloads.base import Batch

__all__ = [
    "MicroBatch",
    "as_micro_batch",
    "sample_count",
    "sliced",
    "split_batch",
    "tensors_of",
    "to_device",
    "windows",
]

ItemT = TypeVar("ItemT")


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
        is_counted: false if ``size`` is a guess, as the batch is of an unknown type without a length.
    """

    batch: Batch
    size: int
    divide: Callable[[Sequence[int]], list[MicroBatch]]
    is_padding: bool = False
    indivisible: str | None = None
    is_counted: bool = True

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
            dimension (packed sequences, for example).
    """
    count = sample_count(batch) if size is None else size

    def divide(sizes: Sequence[int]) -> list[MicroBatch]:
        _require_samples_first(batch, count)
        parts, start = [], 0
        for part in sizes:
            parts.append(sliced(sliced_samples(batch, start, start + part, count), part))
            start += part
        return parts

    return MicroBatch(batch, count, divide)


def as_micro_batch(batch: Batch) -> MicroBatch:
    """Make a micro-batch of ``batch``. A batch of an unknown type is accepted, but cannot be divided."""
    count = _samples(batch)
    if count is not None:
        return sliced(batch, count)
    reason = (
        f"a batch of type {type(batch).__name__} cannot be divided, as its samples are not known: pass a "
        "`MicroBatch` with its own `divide`"
    )

    def refuse(_: Sequence[int]) -> list[MicroBatch]:
        raise WorkloadError(reason)

    length: int | None = None
    if isinstance(batch, PackedSequence):
        length = int(batch.batch_sizes[0])
    elif isinstance(batch, Sized) and not isinstance(batch, (str, Mapping)):
        length = len(batch)
    return MicroBatch(batch, length or 1, refuse, indivisible=reason, is_counted=length is not None)


def split_batch(batch: Batch, micro_batch_size: int) -> list[MicroBatch]:
    """Divide ``batch`` into the fewest micro-batches of at most ``micro_batch_size`` samples: 10 by 4 gives 4, 3, 3.

    Raises:
        WorkloadError: as ``sliced``.
    """
    return sliced(batch).at_most(micro_batch_size)


def windows(micro_batches: Iterable[ItemT], steps: int) -> Iterator[list[ItemT]]:
    """Group ``micro_batches`` into accumulation windows of ``steps``, one per update; the last has the remainder.

    The iterable may be a generator, without a length.
    """
    iterator = iter(micro_batches)
    while window := list(islice(iterator, steps)):
        yield window


def sample_count(batch: Batch) -> int:
    """The first dimension of the first tensor of ``batch``.

    Raises:
        WorkloadError: when there is no tensor with a dimension.
    """
    count = _samples(batch)
    if count is None:
        raise WorkloadError(f"no tensor with samples along its first dimension in this batch ({type(batch).__name__})")
    return count


def _samples(batch: Batch) -> int | None:
    for tensor in tensors_of(batch):
        if tensor.dim():
            return len(tensor)
    return None


def _require_samples_first(batch: Batch, size: int) -> None:
    known = {id(tensor) for tensor in tensors_of(batch)}
    hidden = [name for name, tensor in named_tensors(batch) if id(tensor) not in known and tensor.dim()]
    if hidden:
        raise WorkloadError(
            f"a micro-batch of {size} samples cannot be divided: {hidden[0]} is inside an object whose samples are not "
            "known; pass a `MicroBatch` with its own `divide`"
        )
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch) if tensor.dim()]
    if any(shape[0] != size for shape in shapes):
        raise WorkloadError(
            f"a micro-batch of {size} samples cannot be divided: its tensors have the shapes {shapes}, and each needs "
            f"the {size} samples along its first dimension"
        )
