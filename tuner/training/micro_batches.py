"""Micro-batches that can be taken apart, so that samples that do not fit together go through in smaller parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from tuner.accumulation import balanced_split
from tuner.errors import WorkloadError
from tuner.workloads.base import Batch

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together.

    Attributes:
        batch: what the model gets, on the CPU or already on the device.
        size: number of samples in it.
        divide: the same samples in parts of the given sizes, which sum to ``size``.
        idle: whether it counts for nothing, and goes through only because the model's collectives need every rank.
    """

    batch: Batch
    size: int
    divide: Callable[[Sequence[int]], list[MicroBatch]]
    idle: bool = False

    def at_most(self, largest: int) -> list[MicroBatch]:
        """The same samples in the fewest parts of at most ``largest``, as even as can be."""
        if self.size <= largest:
            return [self]
        return self.divide(balanced_split(self.size, -(-self.size // largest)))


def sliced(batch: Batch, size: int | None = None) -> MicroBatch:
    """A micro-batch that is divided by slicing every tensor along its first dimension.

    Args:
        batch: tensors, or dicts, lists and tuples of tensors. Lists of ``size`` other values (names, ids) are sliced
            too; tensors without dimensions are kept.
        size: number of samples; the first dimension of the first tensor when left out.

    Raises:
        WorkloadError: when there is no tensor to tell the size; on division, when a tensor does not have ``size`` as
            its first dimension (packed sequences, say).
    """
    count = sample_count(batch) if size is None else size

    def divide(sizes: Sequence[int]) -> list[MicroBatch]:
        _require_samples_first(batch, count)
        parts, start = [], 0
        for part in sizes:
            parts.append(sliced(_slice(batch, start, start + part, count), part))
            start += part
        return parts

    return MicroBatch(batch, count, divide)


def split_batch(batch: Batch, micro_batch_size: int) -> list[MicroBatch]:
    """``batch`` in the fewest micro-batches of at most ``micro_batch_size`` samples: 10 in 4 is 4, 3, 3.

    Raises:
        WorkloadError: as ``sliced``.
    """
    return sliced(batch).at_most(micro_batch_size)


def windows(micro_batches: Iterable[ItemT], steps: int) -> Iterator[list[ItemT]]:
    """``micro_batches`` in windows of ``steps``, each for one update; the last one keeps what is left.

    Takes any iterable, one without a length too: nothing of an epoch leaks into the next.
    """
    iterator = iter(micro_batches)
    while window := list(islice(iterator, steps)):
        yield window


def sample_count(batch: Batch) -> int:
    """The first dimension of the first tensor of ``batch``.

    Raises:
        WorkloadError: when there is no tensor with a dimension.
    """
    for tensor in tensors_of(batch):
        if tensor.dim():
            return len(tensor)
    raise WorkloadError(f"no tensor with samples along its first dimension in this batch ({type(batch).__name__})")


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Every tensor in a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_of(value)


def to_device(batch: Batch, device: torch.device, floating: torch.dtype | None = None) -> Batch:
    """``batch`` with every tensor on ``device``; dicts, lists and tuples are walked, other values kept.

    Floating-point tensors take the type ``floating``, where one is given.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, floating if batch.is_floating_point() else None, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device, floating) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return _like(batch, [to_device(value, device, floating) for value in batch])
    return batch


def _require_samples_first(batch: Batch, size: int) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch) if tensor.dim()]
    if any(shape[0] != size for shape in shapes):
        raise WorkloadError(
            f"a micro-batch of {size} samples cannot be divided: its tensors have the shapes {shapes}, and each needs "
            f"the {size} samples along its first dimension"
        )


def _slice(batch: Batch, start: int, stop: int, size: int) -> Batch:
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {name: _slice(value, start, stop, size) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if len(batch) == size and not any(True for _ in tensors_of(batch)):
            return batch[start:stop]
        return _like(batch, [_slice(value, start, stop, size) for value in batch])
    return batch


def _like(sequence: list[Batch] | tuple[Batch, ...], values: list[Batch]) -> Batch:
    """``values`` as the same kind of list or tuple, named ones included."""
    make = getattr(sequence, "_make", type(sequence))
    return make(values)
