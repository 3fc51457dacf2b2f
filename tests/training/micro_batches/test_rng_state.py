"""States of random generators read by the fast reader are equal to those read in full."""

import ctypes
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from batchwright.training.micro_batches import rng_state
from batchwright.training.micro_batches.rng_state import RandomReader, RandomState, seed_everything

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
    before = RandomState.capture(CPU)
    yield
    before.restore(CPU)


def _same(one: RandomState, other: RandomState) -> bool:
    numpy = str(one.numpy) == str(other.numpy) and np.array_equal(_key(one), _key(other))
    return one.python == other.python and numpy and torch.equal(one.cpu, other.cpu)


def _key(state: RandomState) -> Any:
    return state.numpy["state"]["state"] if isinstance(state.numpy, dict) else state.numpy[1]


@pytest.fixture
def _permuted_congruential() -> Iterator[None]:
    """Another generator than numpy's own behind ``numpy.random``."""
    before = np.random.get_bit_generator()  # type: ignore[attr-defined] # documented, but not in numpy's stubs
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined] # as above
    yield
    np.random.set_bit_generator(before)  # type: ignore[attr-defined] # as above


@pytest.mark.parametrize("layout", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("use", USES)
def test_a_state_read_again_is_the_whole_state(use: str, layout: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 - a parameter of the test
    """States are equal after each of several uses, also with a cached normal number."""
    monkeypatch.setattr(rng_state, "_KNOWN_LAYOUT", layout)
    seed_everything(1)
    reader = RandomReader(CPU)
    for _ in range(4):
        assert _same(reader.capture(), RandomState.capture(CPU))
        USES[use]()
    assert _same(reader.capture(), RandomState.capture(CPU))


def test_a_state_is_what_it_was_and_can_be_restored() -> None:
    """Later draws do not change a state that was read before."""
    seed_everything(1)
    reader = RandomReader(CPU)
    np.random.normal()  # noqa: NPY002 - the old interface is what is read
    state = reader.capture()
    drawn = random.random(), np.random.normal(), np.random.normal(), torch.rand(1).item()  # noqa: NPY002 - as above
    reader.capture()
    state.restore(CPU)
    again = random.random(), np.random.normal(), np.random.normal(), torch.rand(1).item()  # noqa: NPY002 - as above
    assert drawn == again


def test_the_state_of_a_resting_numpy_generator_is_not_read_again() -> None:
    """Numpy's state is the same object as before, while torch's and Python's are read each time."""
    seed_everything(1)
    reader = RandomReader(CPU)
    first, _ = reader.capture(), (torch.rand(1), random.random())
    second = reader.capture()
    assert second.numpy is first.numpy
    assert second.python != first.python
    assert not torch.equal(second.cpu, first.cpu)
    assert rng_state._KNOWN_LAYOUT


def test_no_memory_of_python_objects_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that is read is always the one that numpy documents for its generator's state."""
    read: list[int] = []
    string_at = ctypes.string_at

    def recorded(address: int, size: int) -> bytes:
        read.append(address)
        return string_at(address, size)

    monkeypatch.setattr(ctypes, "string_at", recorded)
    reader = RandomReader(CPU)
    for _ in range(3):
        reader.capture()
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # documented, but not in numpy's stubs
    assert set(read) == {generator.ctypes.state_address}


@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda generator: generator.state["state"]["key"].tobytes(),
        lambda generator: (string := rng_state._numpy_bytes(generator))[-4:] + string[:-4],
        lambda _: bytes(2500),
    ],
    ids=["no position", "position first", "zeros"],
)
def test_another_layout_of_numpy_generators_is_found_out(bytes_of: Callable[[np.random.MT19937], bytes]) -> None:
    """With another layout of the bytes, draws would be missed or reported wrongly."""
    assert not rng_state._has_known_layout(bytes_of)


@pytest.mark.usefixtures("_permuted_congruential")
def test_another_generator_behind_numpy_is_read_in_full_and_restored() -> None:
    """The layout of another generator is not known, and its state is a mapping."""
    reader = RandomReader(CPU)
    states = [reader.capture()]
    drawn = np.random.normal()  # noqa: NPY002 - the old interface is what is read
    states.append(reader.capture())
    assert not states[0].equals(states[1])
    states[0].restore(CPU)
    assert reader.capture().equals(states[0])
    assert np.random.normal() == drawn  # noqa: NPY002 - as above
