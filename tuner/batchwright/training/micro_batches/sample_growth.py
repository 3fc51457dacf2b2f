"""Where the samples of a batch are, as its growth to a batch of another size shows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from batchwright.training.micro_batches.nested_batches import entries_of, is_container, item_count, named_tensors
from batchwright.training.micro_batches.sample_layout import (
    REMEDY,
    Items,
    Layout,
    Rows,
    SampleLayout,
    UnknownSamplesError,
    require_visible,
)
from batchwright.workloads.base import Batch


def grown_layout(batch: Batch, samples: int, other: Batch, other_samples: int) -> SampleLayout:
    """The layout that the growth from a batch to another of the same structure shows.

    Every dimension that grows as the number of samples does holds them; what does not grow is shared.

    Raises:
        UnknownSamplesError: naming what changes in another way, or the indices of rows of the whole batch.
    """
    growth = _Growth(samples, other_samples)
    layout = SampleLayout(growth.read("batch", batch, other))
    if next(layout.leaves, None) is None:
        raise UnknownSamplesError(
            f"make_batch({samples}) and make_batch({other_samples}) return batches of the same shapes: make a batch of "
            "as many samples as the argument says"
        )
    if rates := layout.rates():
        growth.require_no_indices(batch, other, {1, *rates.values()})
    return layout


@dataclass(frozen=True)
class _Growth:
    """Compares values of two batches of different numbers of samples."""

    samples: int
    others: int

    def read(self, name: str, value: Any, other: Any) -> Layout:  # noqa: ANN401 - of any type
        count, other_count = item_count(value), item_count(other)
        if count is not None and other_count is not None and count != other_count:
            if not self._is_proportional(count, other_count):
                raise self._unknown(name, f"{count} items", f"{other_count} items")
            return Items(count // self.samples)
        if isinstance(value, (Tensor, np.ndarray)) and count is None:
            return self._read_rows(name, tuple(value.shape), tuple(getattr(other, "shape", ())))
        if is_container(value):
            others = dict(entries_of(other))
            entries = [(suffix, inner) for suffix, inner in entries_of(value) if suffix in others]
            return {suffix: self.read(f"{name}{suffix}", inner, others[suffix]) for suffix, inner in entries} or None
        hidden = [[tuple(held.shape) for _, held in named_tensors(one)] for one in (value, other)]
        if count is None and hidden[0] != hidden[1]:
            require_visible(name, value, self.samples)
        return None

    def _read_rows(self, name: str, shape: tuple[int, ...], other: tuple[int, ...]) -> Layout:
        pairs = list(zip(shape, other, strict=False))
        growing = tuple(
            (number, one // self.samples)
            for number, (one, two) in enumerate(pairs)
            if one != two and self._is_proportional(one, two)
        )
        if not growing and shape != other:
            raise self._unknown(name, f"the shape {shape}", f"{other}")
        return Rows(growing) if growing else None

    def _is_proportional(self, one: int, two: int) -> bool:
        return one % self.samples == 0 and one * self.others == two * self.samples

    def _unknown(self, name: str, one: str, two: str) -> UnknownSamplesError:
        return UnknownSamplesError(
            f"`{name}` has {one} for {self.samples} samples and {two} for {self.others}, which does not show where "
            f"each sample is: {REMEDY}"
        )

    def require_no_indices(self, batch: Batch, other: Batch, rates: set[int]) -> None:
        """Refuse integers that grow as the rows do: positions in the whole batch, which no part has.

        Raises:
            UnknownSamplesError: naming the tensor, such as the edges of a graph.
        """
        for (name, tensor), (_, larger) in zip(named_tensors(batch), named_tensors(other), strict=False):
            if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel() or not larger.numel():
                continue
            for rate in rates:
                if all(
                    rate * (count - 1) <= int(one.max()) <= rate * count
                    for one, count in ((tensor, self.samples), (larger, self.others))
                ):
                    raise UnknownSamplesError(
                        f"`{name}` seems to hold positions in the whole batch, so a part of it would point outside of "
                        f"the part's rows: {REMEDY}"
                    )
