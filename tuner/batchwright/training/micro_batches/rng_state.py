"""The random number generators that user code may use: Python's, numpy's and torch's."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MERSENNE_TWISTER_BYTES = 625 * 4
"""Bytes at the ``state_address`` of numpy's generator: a key of 624 words and a position, of four bytes each."""


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's generator of a device: that of the CPU for all but GPUs."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call] # makes the generators
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _state_of_gpu(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@dataclass(frozen=True)
class RandomState:
    """The state of every generator at one moment."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | dict[str, Any]
    """As numpy returns it: a mapping where ``numpy.random.set_bit_generator`` has put another generator in place."""
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Read the current state; ``cuda`` is the state of ``device``, if that is a GPU."""
        return cls(
            random.getstate(),
            _numpy_state(),
            torch.get_rng_state(),
            _state_of_gpu(device),
        )

    def restore(self, device: torch.device) -> None:
        """Set every generator to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - see _numpy_state
        torch.set_rng_state(self.cpu)
        if device.type == "cuda" and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def equals(self, other: RandomState) -> bool:
        """Return whether every generator has the state that it has in ``other``."""
        return (
            self.python == other.python
            and equal_states(self.numpy, other.numpy)
            and torch.equal(self.cpu, other.cpu)
            and (self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda))
        )

    def state_dict(self) -> dict[str, Any]:
        """Convert to plain values and tensors, which a checkpoint may contain."""
        kind, keys, *rest = self.numpy
        numpy = (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest)
        return {"python": self.python, "numpy": numpy, "cpu": self.cpu, "cuda": self.cuda}

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> RandomState:
        """Convert from the values that ``state_dict`` returned."""
        kind, keys, *rest = state_dict["numpy"]
        numpy = (kind, keys.numpy().astype(np.uint32), *rest)
        return cls(state_dict["python"], numpy, state_dict["cpu"], state_dict["cuda"])


class RandomReader:
    """Read the state of every generator repeatedly, in ten microseconds if numpy's state has not changed.

    Python's state is read by its public function, which takes 5 to 8 microseconds. Numpy's function takes 26, and few
    losses use numpy, so the bytes of numpy's state are compared first, and an equal state is not read again.

    Args:
        device: a GPU's generator is read too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy = _numpy_state()
        self._fingerprint: tuple[int, bytes] | None = None
        """Identity and bytes of the generator that had this state; None if a change could be missed."""

    def capture(self) -> RandomState:
        """Read the current state."""
        numpy = self._current_numpy_state()
        return RandomState(random.getstate(), numpy, torch.get_rng_state(), _state_of_gpu(self._device))

    def _current_numpy_state(self) -> Any:  # noqa: ANN401 - as numpy types it
        """Read numpy's state, unless its bytes are known and are those of the last call.

        The bytes do not contain a cached normal number: ``numpy.random.set_state`` with another cached number and the
        same key and position is not detected.
        """
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # documented, but not in numpy's stubs
        fingerprint = None
        if _KNOWN_LAYOUT and type(generator) is np.random.MT19937:
            fingerprint = (id(generator), _numpy_bytes(generator))
        if fingerprint is None or fingerprint != self._fingerprint:
            self._numpy = _numpy_state()
            # with a normal number cached (the fourth value), the next call returns it without changing the bytes
            self._fingerprint = fingerprint if fingerprint is not None and self._numpy[3] == 0 else None
        return self._numpy


def _numpy_state() -> Any:  # noqa: ANN401 - as numpy types it
    """The state behind ``numpy.random``: a tuple for a Mersenne twister, a mapping for another generator."""
    twister = type(np.random.get_bit_generator()) is np.random.MT19937  # type: ignore[attr-defined] # as above
    return np.random.get_state(legacy=twister)  # type: ignore[call-overload] # noqa: NPY002 - user code may use the old interface


def equal_states(one: Any, other: Any) -> bool:  # noqa: ANN401 - a state of any generator, or a part of one
    """Return whether two states of generators are equal: mappings and tuples of numbers, arrays and tensors."""
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(equal_states(one[key], other[key]) for key in one)
        )
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(equal_states, one, other))
    return bool(np.array_equal(one, other))


def generator_state(generator: object) -> Any:  # noqa: ANN401 - as each library types it
    """The state of a generator of torch, Python or numpy, which are not the global ones; None for another object."""
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else None


def set_generator_state(generator: Any, state: Any) -> None:  # noqa: ANN401 - as above
    """Set a generator to a state of ``generator_state``."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _numpy_bytes(generator: np.random.MT19937) -> bytes:
    """The key and the position, read at the address that numpy documents, under the generator's lock."""
    with generator.lock:
        return ctypes.string_at(generator.ctypes.state_address, _MERSENNE_TWISTER_BYTES)


def _has_known_layout(bytes_of: Callable[[np.random.MT19937], bytes] = _numpy_bytes) -> bool:
    """Return whether the bytes of a numpy generator are the key and the position of its public state.

    Numpy documents the address of the state, not its layout. The two are compared before the first draw, after one
    draw, and with a new key.
    """
    generator = np.random.MT19937(0)
    for words in (0, 1, _WORDS_OF_KEY):
        generator.random_raw(words)
        state: Any = generator.state["state"]
        if bytes_of(generator) != np.append(state["key"].astype(np.uint32), np.uint32(state["pos"])).tobytes():
            return False
    return True


_WORDS_OF_KEY = 624
_KNOWN_LAYOUT = _has_known_layout()


@contextmanager
def preserved_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore every generator at the end of a block; of GPUs, only that of ``device``."""
    device = device or torch.device("cpu")
    state = RandomState.capture(device)
    try:
        yield
    finally:
        state.restore(device)


def seed_everything(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - see RandomState.capture
    torch.manual_seed(seed)
