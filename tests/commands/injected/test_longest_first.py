"""Tests of the longest items in the batches of a probe: real data loaders, whose indices are replaced."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from batchwright.commands.injected.longest_first import LongestFirst

COUNT = 100


class Texts(Dataset[Any]):
    """Items of which each has a length of its own; number 37 is the longest."""

    def __init__(self, *, count: int = COUNT, of_one_length: bool = False) -> None:
        self.count = count
        self.of_one_length = of_one_length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        random.random(), torch.rand(1), np.random.rand()  # noqa: NPY002 - as an augmentation does
        length = 10 if self.of_one_length else 10 + (index - 38) % self.count
        kinds = [torch.zeros(length), {"input_ids": [1] * length, "label": 1}, ("x" * length, 3), np.zeros((1, length))]
        return kinds[index % 4]


def chosen(loader: DataLoader[Any], index: list[int], finder: LongestFirst | None = None) -> Any:
    """The indices that replace those of a batch."""
    return (finder or LongestFirst(torch)).choose(iter(loader), index)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": DistributedSampler(Texts(), 2, 1)}, {}])
def test_a_batch_has_the_longest_items(options: dict[str, Any]) -> None:
    """As many as were drawn, by the samplers of torch. Each rank has the longest."""
    finder = LongestFirst(torch)
    loader = DataLoader(Texts(), 3, **options)
    assert [chosen(loader, [1, 2, 3], finder), chosen(loader, [7], finder)] == [[37, 36, 35], [37]]
    assert finder.drawn == [(COUNT, COUNT, 10, 109)]


def test_a_batch_of_more_items_than_were_looked_at_keeps_its_own() -> None:
    """A few items of a large data set are read, spread evenly."""
    finder = LongestFirst(torch)
    found = chosen(DataLoader(Texts(count=12_800), 200), [*range(1, 201)], finder)
    assert (len(found), len(set(found)), found[128]) == (200, 200, 1)
    assert finder.drawn == [(128, 12_800, 72, 12_772)]


@pytest.mark.parametrize("of_one_length", [True, False])
def test_a_batch_with_repeated_items_keeps_its_size(*, of_one_length: bool) -> None:
    """As a sampler with replacement draws it: one item, a few, or more than the data set has."""
    data = Texts(count=8, of_one_length=of_one_length)
    loader = DataLoader(data, 10, sampler=RandomSampler(data, replacement=True, num_samples=40))
    for index in ([3] * 4, [6, 6, 1], [1, 2, 1, 2, 5] * 2):
        assert len(chosen(loader, index)) == len(index)
    assert chosen(loader, [6, 6, 1]) == ([6, 6, 1] if of_one_length else [5, 4, 3])


class Stream(IterableDataset[int]):
    """Items without indices."""

    def __iter__(self) -> Iterator[int]:
        yield from range(4)


class Broken(Texts):
    """Items that cannot be read."""

    def __getitem__(self, _index: int) -> Any:
        raise OSError("no such file")


class OwnSampler(RandomSampler):
    """A sampler of the program, which may group items for a reason."""


@pytest.mark.parametrize(
    ("loader", "index"),
    [
        (DataLoader(Texts(of_one_length=True), 3), [1, 2, 3]),
        (DataLoader(Texts(), 3, num_workers=1), [1, 2, 3]),
        (DataLoader(Texts(), 3, sampler=OwnSampler(Texts())), [1, 2, 3]),
        (DataLoader(Texts(), batch_sampler=BatchSampler(OwnSampler(Texts()), 3, drop_last=False)), [1, 2, 3]),
        (DataLoader(Texts(), batch_size=None), 1),
        (DataLoader(Stream(), 3), [None, None]),
        (DataLoader(Broken(), 3), [1, 2, 3]),
    ],
    ids=["one length", "workers", "own sampler", "own batches", "no batches", "stream", "broken"],
)
def test_other_batches_keep_their_indices(loader: DataLoader[Any], index: Any) -> None:
    """The program's own are drawn where nothing is gained, or they may have a reason."""
    finder = LongestFirst(torch)
    assert chosen(loader, index, finder) == index
    assert finder.drawn == []


def test_columns_of_lists_are_read_without_items() -> None:
    """Of a data set of the package `datasets`, whose rows were selected and shuffled."""
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1] * (10 + n % 50) for n in range(1000)], "label": list(range(1000))}
    shuffled = datasets.Dataset.from_dict(rows).select(range(5, 900)).shuffle(seed=0)
    finder = LongestFirst(torch)
    found = chosen(DataLoader(shuffled, 4, shuffle=True), [0, 1, 2, 3], finder)
    assert [len(shuffled[number]["input_ids"]) for number in found] == [59] * 4
    assert finder.drawn == [(895, 895, 10, 59)]


def test_the_random_numbers_of_the_program_are_its_own() -> None:
    """Items that are read here draw some, which the program then draws again."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the state that programs share
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    loader = iter(DataLoader(Texts(), 3, generator=torch.Generator()))
    assert LongestFirst(torch).choose(loader, [1]) == [37]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert repr(np.random.get_state()) == before[2]  # noqa: NPY002
