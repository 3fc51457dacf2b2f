"""Have the data loaders of a probe draw the longest items of their data sets, whose batches take the most memory.

Only indices of a batch are replaced, by as many others, and only where nothing but the samplers of torch and of
training frameworks has drawn them: another sampler may group items for a reason. The lengths are those of the columns
of lists of a data set of the package `datasets`, or else of a few items that are read here. Where workers load the data
none is read, because a data set may hold memory from its first item on, which the program has in the workers alone.
"""

from __future__ import annotations

import math
import random
import sys
import time
from contextlib import contextmanager
from typing import Any, Iterator, Mapping

from .torch_internals import indices_drawn_by

_MOST_ROWS = 100_000
"""Rows of columns whose lengths are read, which takes less than a second."""
_MOST_ITEMS, _ALIKE_ITEMS = 128, 16
"""Items that are read, and as many of one size after which all are taken to be of that size."""
_MOST_SECONDS = 1.0
_MOST_PARTS = 64
"""Parts of an item whose sizes are added."""
_SAMPLERS = ("torch", "accelerate", "transformers", "trl", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose samplers draw any items in any order."""


class LongestFirst:
    """Replaces the indices that data loaders draw.

    Attributes:
        drawn: for each data set with items of several sizes, the items that were looked at, all items, and the smallest
            and largest size.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._longest: dict[int, tuple[Any, list[int]]] = {}
        """The indices by falling length, and the data set, by its identity; none where all are of one size."""
        self.drawn: list[tuple[int, int, int, int]] = []

    def choose(self, iterator: Any, index: Any) -> Any:
        """The indices of a batch of the longest items; those of the sampler where nothing is replaced."""
        if not isinstance(index, list) or not all(type(each) is int for each in index):
            return index
        dataset, sampler = indices_drawn_by(iterator)
        if dataset is None or not _is_known(sampler):
            return index
        if id(dataset) not in self._longest:
            has_workers = bool(iterator._num_workers)  # noqa: SLF001 - see torch_internals
            self._longest[id(dataset)] = (dataset, self._by_length(dataset, reads_items=not has_workers))
        longest = self._longest[id(dataset)][1][: len(index)]
        # Others first. A sampler with replacement draws items again, and the batch has all that it draws.
        return [*longest, *sorted(index, key=set(longest).__contains__)][: len(index)]

    def _by_length(self, dataset: Any, *, reads_items: bool) -> list[int]:
        """The indices of a data set by falling length; empty where it has one length, or cannot be read."""
        try:
            with self._unchanged_random_numbers():
                lengths = _lengths_of_rows(dataset)
                lengths = lengths or (self._lengths_of_items(dataset) if reads_items else {})
        except Exception:  # noqa: BLE001 - code of the program, which may raise anything
            return []
        low, high = min(lengths.values(), default=0), max(lengths.values(), default=0)
        if low == high:
            return []
        self.drawn.append((len(lengths), len(dataset), low, high))
        return sorted(lengths, key=lengths.__getitem__, reverse=True)

    def _lengths_of_items(self, dataset: Any) -> dict[int, int]:
        """The sizes of a few items, spread evenly."""
        count = len(dataset)
        began, found = time.monotonic(), {}
        for number in range(min(count, _MOST_ITEMS)):
            index = number * count // min(count, _MOST_ITEMS)
            found[index] = self._size(dataset[index])
            is_alike = len(found) >= _ALIKE_ITEMS and len(set(found.values())) == 1
            if is_alike or time.monotonic() - began > _MOST_SECONDS:
                break
        return found

    def _size(self, item: Any) -> int:
        """The values of all tensors, arrays, images, texts and lists of an item."""
        left, size = [item], 0
        for _ in range(_MOST_PARTS):
            if not left:
                break
            part = left.pop()
            shape = getattr(part, "shape", None) or getattr(part, "size", None)
            if isinstance(part, (str, bytes)) or _is_list_of_numbers(part):
                size += len(part)
            elif isinstance(part, Mapping):
                left.extend(part.values())
            elif isinstance(part, (list, tuple)):
                left.extend(part)
            elif isinstance(shape, tuple):
                size += math.prod(map(int, shape))
        return size

    @contextmanager
    def _unchanged_random_numbers(self) -> Iterator[None]:
        """Give the random numbers of an item that is read here to the program again."""
        numpy = sys.modules.get("numpy")
        states = random.getstate(), self._torch.get_rng_state(), numpy and numpy.random.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            self._torch.set_rng_state(states[1])
            if numpy:
                numpy.random.set_state(states[2])


def _is_known(sampler: Any) -> bool:
    """Return whether a sampler of batches, and all that it draws from, draw any items in any order."""
    while sampler is not None:
        if type(sampler).__module__.partition(".")[0] not in _SAMPLERS:
            return False
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return True


def _lengths_of_rows(dataset: Any) -> dict[int, int]:
    """The lengths of the lists in the rows of a data set of the package `datasets`; empty for others."""
    kind = type(dataset)
    if (kind.__module__, kind.__name__) != ("datasets.arrow_dataset", "Dataset") or dataset.format["type"] == "custom":
        return {}
    types, compute = sys.modules["pyarrow"].types, sys.modules["pyarrow.compute"]
    table = dataset.with_format("arrow")[: min(len(dataset), _MOST_ROWS)]
    lists = [column for column in table.columns if types.is_list(column.type) or types.is_large_list(column.type)]
    columns = [compute.list_value_length(column).to_pylist() for column in lists]
    return {index: sum(length or 0 for length in row) for index, row in enumerate(zip(*columns))}  # noqa: B905 - of 3.9


def _is_list_of_numbers(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and bool(part) and isinstance(part[0], (int, float))
