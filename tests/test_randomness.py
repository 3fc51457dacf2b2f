"""States of random generators that are read cheaply are those that are read in full."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tuner.training import randomness
from tuner.training.randomness import RandomReader, RandomState, seed_everything

CPU = torch.device("cpu")
USES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "random": random.random,
    "gauss": lambda: random.gauss(0.0, 1.0),
    "shuffle": lambda: random.shuffle(list(range(700))),
    "seed": lambda: random.seed(3),
    "numpy": np.random.random,
    "numpy normal": np.random.normal,
    "numpy permutation": lambda: np.random.permutation(700),  # noqa: NPY002 - as above
    "numpy seed": lambda: np.random.seed(3),  # noqa: NPY002 - as above
    "torch": lambda: torch.rand(1),
}


@pytest.fixture(autouse=True)
def _generators_put_back() -> Iterator[None]:
    before = RandomState.now(CPU)
    yield
    before.restore(CPU)


def _same(one: RandomState, other: RandomState) -> bool:
    numpy = all(np.array_equal(a, b) for a, b in zip(one.numpy, other.numpy, strict=True))
    return one.python == other.python and numpy and torch.equal(one.cpu, other.cpu)


@pytest.mark.parametrize("layout", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("use", USES)
def test_a_state_read_again_is_the_whole_state(use: str, layout: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 - a parameter of the test
    """After each of several uses, a normal number that waits for the next call included."""
    monkeypatch.setattr(randomness, "_KNOWN_LAYOUT", layout)
    seed_everything(1)
    reader = RandomReader(CPU)
    for _ in range(4):
        assert _same(reader.now(), RandomState.now(CPU))
        USES[use]()
    assert _same(reader.now(), RandomState.now(CPU))


def test_a_state_is_what_it_was_and_can_be_restored() -> None:
    """A state that was read earlier is not touched by later draws."""
    seed_everything(1)
    reader = RandomReader(CPU)
    np.random.normal()  # noqa: NPY002 - the old interface is what is read
    state = reader.now()
    drawn = random.random(), np.random.normal(), np.random.normal(), torch.rand(1).item()  # noqa: NPY002 - as above
    reader.now()
    state.restore(CPU)
    again = random.random(), np.random.normal(), np.random.normal(), torch.rand(1).item()  # noqa: NPY002 - as above
    assert drawn == again


def test_the_states_of_resting_generators_are_not_read_again() -> None:
    """Python's is the very object of before, and numpy's too."""
    seed_everything(1)
    reader = RandomReader(CPU)
    first, _ = reader.now(), torch.rand(1)
    second = reader.now()
    assert second.python is first.python
    assert second.numpy is first.numpy
    assert not torch.equal(second.cpu, first.cpu)
    assert randomness._KNOWN_LAYOUT
