"""Where the samples of a batch are: along a dimension of its tensors, or as the items of its lists.

The evidence is the number of samples, or a batch of another size (``sample_growth``). A layout divides all batches of
one structure.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from batchwright.errors import WorkloadError
from batchwright.training.micro_batches.nested_batches import (
    entries_of,
    is_container,
    item_count,
    items_of,
    named_tensors,
    rebuilt,
    tensors_of,
    with_items,
)
from batchwright.workloads.base import Batch

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
REMEDY = "pass a `batchwright.MicroBatch` with its own `divide`"


class UnknownSamplesError(WorkloadError):
    """The samples of a batch cannot be told apart."""


@dataclass(frozen=True)
class Rows:
    """Samples along dimensions of a tensor or an array: pairs of a dimension and its rows for each sample."""

    dimensions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Items:
    """Samples as the items of a list, a tuple, a nested tensor, a packed sequence or a graph batch."""

    each: int = 1
    """Items for each sample."""


Layout: TypeAlias = "Rows | Items | dict[str, Layout] | None"
"""Where the samples of a value are: by entry for a container; None if all samples share the value."""


@dataclass(frozen=True)
class SampleLayout:
    """Where the samples of the batches of one structure are."""

    root: Layout
    shares_tensors: bool = False
    """True if a tensor of the batch has no dimension with the samples, so that they may share it."""

    @property
    def leaves(self) -> Iterator[tuple[str, Rows | Items]]:
        """The tensors and lists that hold samples, with the expressions that reach them."""
        return _leaves("batch", self.root)

    @property
    def has_items(self) -> bool:
        """Return whether the items of a list, or of another sequence, are samples."""
        return any(isinstance(leaf, Items) for _, leaf in self.leaves)

    @property
    def is_conventional(self) -> bool:
        """Return whether no tensor is shared, and the first has samples along its first dimension or as items."""
        _, leaf = next(self.leaves)
        return not self.shares_tensors and (isinstance(leaf, Items) or leaf.dimensions[0][0] == 0)

    @cached_property
    def _is_of_first_dimensions(self) -> bool:
        return all(leaf == Rows(((0, 1),)) for _, leaf in self.leaves)

    def rates(self) -> dict[str, int]:
        """Rows or items for each sample, of the tensors and lists that have several for each."""
        rates = {
            name: leaf.each if isinstance(leaf, Items) else max(rows for _, rows in leaf.dimensions)
            for name, leaf in self.leaves
        }
        return {name: rate for name, rate in rates.items() if rate > 1}

    def count(self, batch: Batch) -> int:
        """The number of samples in a batch of this structure.

        Raises:
            UnknownSamplesError: when the batch has another structure.
        """
        if self._is_of_first_dimensions and (count := first_dimension(batch)) is not None:
            return count
        try:
            return next(_counts(batch, self.root))
        except (KeyError, IndexError, AttributeError, TypeError, StopIteration):
            raise UnknownSamplesError(
                f"a batch of type {type(batch).__name__} has another structure than the first batch"
            ) from None

    def divide(self, batch: Batch, sizes: Sequence[int]) -> list[Batch]:
        """Parts of a batch of this structure, in the batch's own type, of these numbers of samples."""
        parts, start = [], 0
        for size in sizes:
            parts.append(_part(batch, self.root, start, start + size, sum(sizes)))
            start += size
        return parts

    def describe(self, samples: int) -> str:
        """Describe the reading of a batch, such as ``8 samples as the items of `batch```."""
        name, leaf = next(self.leaves)
        if isinstance(leaf, Items):
            return f"{samples} samples as the items of `{name}`"
        return f"{samples} samples along dimension {leaf.dimensions[0][0]} of `{name}`"


def _leaves(name: str, layout: Layout) -> Iterator[tuple[str, Rows | Items]]:
    if isinstance(layout, dict):
        for suffix, inner in layout.items():
            yield from _leaves(f"{name}{suffix}", inner)
    elif layout is not None:
        yield name, layout


def _counts(value: Any, layout: Layout) -> Iterator[int]:  # noqa: ANN401 - of any type
    """Yield the number of samples as each tensor or list has it."""
    if isinstance(layout, Rows):
        dimension, rows = layout.dimensions[0]
        yield value.shape[dimension] // rows
    elif isinstance(layout, Items):
        yield (item_count(value) or 0) // layout.each
    elif layout is not None:
        values = dict(entries_of(value))
        for suffix, inner in layout.items():
            yield from _counts(values[suffix], inner)


def _part(value: Any, layout: Layout, start: int, stop: int, samples: int) -> Any:  # noqa: ANN401 - of any type
    if isinstance(layout, Rows):
        for dimension, rows in layout.dimensions:
            value = _narrow(value, dimension, start * rows, stop * rows)
        return value
    if isinstance(layout, Items):
        return with_items(value, items_of(value)[start * layout.each : stop * layout.each])
    if layout is None:
        return value
    part = rebuilt(
        value, [_part(inner, layout.get(suffix), start, stop, samples) for suffix, inner in entries_of(value)]
    )
    attributes = getattr(part, "__dict__", {}) if isinstance(value, Mapping) else {}
    for name, attribute in attributes.items():  # such as the encodings of a ``BatchEncoding``
        if item_count(attribute) == samples and not has_tensors(attribute):
            attributes[name] = attribute[start:stop]
    return part


def _narrow(value: Any, dimension: int, start: int, stop: int) -> Any:  # noqa: ANN401 - a tensor or an array
    if isinstance(value, np.ndarray):
        return value[(slice(None),) * dimension + (slice(start, stop),)]
    if value.layout is torch.sparse_coo:
        return value.narrow_copy(dimension, start, stop - start)
    return value.narrow(dimension, start, stop - start)


def first_dimension(batch: Batch) -> int | None:
    """The first dimension of the first tensor of ``batch`` that has one."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return item_count(tensor) or len(tensor)
    return None


def has_tensors(value: object) -> bool:
    """Return whether a value holds a tensor that is visible in its containers."""
    return next(tensors_of(value), None) is not None


# --- evidence: the number of samples ----------------------------------------------------------------------------------


def layout_of(
    batch: Batch,
    samples: int,
    dimensions: Sequence[int] = (0,),
    *,
    prefers_items: bool = False,
    shares_tensors: bool = False,
) -> SampleLayout:
    """The layout of a batch of ``samples``.

    Tensors without dimensions are shared by all samples, and so are arrays, and lists without tensors (names, ids),
    that do not have ``samples`` values.

    Args:
        batch: the batch.
        samples: number of samples.
        dimensions: the dimensions of tensors to look at, in order of preference.
        prefers_items: whether the items of a list of ``samples`` alike items are samples, whatever their shapes.
        shares_tensors: whether tensors may be shared by all samples, if they have no rows for each (a mask by position,
            weights of classes).

    Raises:
        UnknownSamplesError: naming a tensor without ``samples`` along these dimensions, or inside an object of unknown
            type.
    """
    root = _ByCount(samples, dimensions, prefers_items, shares_tensors).read("batch", batch)
    if next(_leaves("batch", root), None) is None:
        raise UnknownSamplesError(
            f"no tensor or list of {samples} samples in this batch of type {type(batch).__name__}: {REMEDY}"
        )
    return SampleLayout(root, shares_tensors)


@dataclass(frozen=True)
class _ByCount:
    """Finds the dimension, or the list, of a known number of samples."""

    samples: int
    dimensions: Sequence[int]
    prefers_items: bool
    shares_tensors: bool

    def read(self, name: str, value: Any) -> Layout:  # noqa: ANN401 - of any type
        count = item_count(value)
        if count is not None and not isinstance(value, (list, tuple)) and count != self.samples:
            raise UnknownSamplesError(f"`{name}` has {count} samples, and the batch {self.samples}: {REMEDY}")
        if count == self.samples and self._is_of_samples(value):
            return Items()
        if isinstance(value, (Tensor, np.ndarray)):
            return self._read_rows(name, value)
        require_visible(name, value, self.samples)
        return {suffix: self.read(f"{name}{suffix}", inner) for suffix, inner in entries_of(value)} or None

    def _is_of_samples(self, value: Any) -> bool:  # noqa: ANN401 - of any type
        if not isinstance(value, (list, tuple)) or not has_tensors(value):
            return True
        return self.prefers_items and len({_kind(item) for item in value}) == 1

    def _read_rows(self, name: str, value: Any) -> Layout:  # noqa: ANN401 - a tensor or an array
        shape = tuple(value.shape)
        dimension = next((one for one in self.dimensions if one < len(shape) and shape[one] == self.samples), None)
        compressed = isinstance(value, Tensor) and value.layout in _COMPRESSED
        if dimension is not None and not compressed:
            return Rows(((dimension, 1),))
        is_shared = self.shares_tensors and not compressed and shape and shape[0] % self.samples != 0
        if not shape or isinstance(value, np.ndarray) or is_shared:
            return None
        reason = f"is in the layout {value.layout}" if compressed else f"has the shape {shape}"
        first = " along its first dimension" if tuple(self.dimensions) == (0,) else ""
        raise UnknownSamplesError(
            f"a micro-batch of {self.samples} samples cannot be divided: `{name}` {reason}, and needs the "
            f"{self.samples} samples{first}; {REMEDY}"
        )


def _kind(item: object) -> object:
    """What alike samples have in common: type, dimensions and element type of a tensor, keys of a mapping."""
    if isinstance(item, Tensor):
        return type(item), item.dim(), item.dtype
    if isinstance(item, Mapping):
        return (type(item), *sorted(map(str, item)))
    return (type(item), _kind(item[0])) if isinstance(item, (list, tuple)) and item else type(item)


def require_visible(name: str, value: object, samples: int) -> None:
    """Refuse an object of unknown type that holds tensors.

    Raises:
        UnknownSamplesError: naming its first tensor.
    """
    if not is_container(value) and (inner := next((one for one, held in named_tensors(value, name) if held.dim()), "")):
        raise UnknownSamplesError(
            f"a micro-batch of {samples} samples cannot be divided: {inner} is inside an object whose samples are not "
            f"known; {REMEDY}"
        )


def readings_of(batch: Batch, samples: int | None) -> list[SampleLayout]:
    """All plausible layouts of a batch, by preference: the first dimension of all tensors, items, other dimensions.

    Args:
        batch: the batch.
        samples: number of samples, if it is known; else every number that a tensor or a list of the batch suggests.
    """
    counts = _plausible_counts(batch) if samples is None else [samples]
    found = _layouts(batch, counts, (((0,), False), (range(8), True)))
    if any(layout.has_items for layout in found):  # other dimensions of the tensors in a list mean nothing then
        return found
    return found + [
        layout for layout in _layouts(batch, counts, ((range(8), False), ((1, 0), False))) if layout not in found
    ]


def shared_layouts(batch: Batch, samples: int) -> list[SampleLayout]:
    """The layout of a batch with tensors that its samples may share, if its first tensor has ``samples`` rows."""
    if samples > 1 and first_dimension(batch) == samples:
        with suppress(UnknownSamplesError):
            return [layout_of(batch, samples, shares_tensors=True)]
    return []


def _layouts(batch: Batch, counts: Sequence[int], modes: Sequence[tuple[Sequence[int], bool]]) -> list[SampleLayout]:
    found: list[SampleLayout] = []
    for count in counts:
        for dimensions, prefers_items in modes:
            with suppress(UnknownSamplesError):
                layout = layout_of(batch, count, dimensions, prefers_items=prefers_items)
                found += [] if layout in found else [layout]
    return found


def _plausible_counts(batch: Batch) -> list[int]:
    """Numbers of samples that a batch suggests: the first two dimensions of a tensor, the lengths of its lists."""
    first = next((tensor for tensor in tensors_of(batch) if not tensor.is_nested and tensor.dim()), None)
    rows = () if first is None else tuple(first.shape)
    lists = [count for value in (batch, *(one for _, one in entries_of(batch))) if (count := item_count(value))]
    return list(dict.fromkeys([*rows[:1], *lists, *rows[1:2]]))
