"""The random number generators that user code may use: Python's, numpy's and torch's."""

from __future__ import annotations

import _random
import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_MERSENNE_TWISTER_BYTES = 625 * 4
"""A key of 624 words and a position: the state that Python's and numpy's generators share."""


@dataclass(frozen=True)
class RandomState:
    """The state of every generator at one moment."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The state now; ``cuda`` is that of ``device``, where it is a card."""
        return cls(
            random.getstate(),
            np.random.get_state(legacy=True),  # type: ignore[arg-type] # noqa: NPY002 - user code may use the old interface
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore(self, device: torch.device) -> None:
        """Put every generator back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - see now
        torch.set_rng_state(self.cpu)
        if device.type == "cuda" and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)

    def equals(self, other: RandomState) -> bool:
        """Whether every generator is where it is in ``other``."""
        (kind, keys, *rest), (other_kind, other_keys, *other_rest) = self.numpy, other.numpy
        return (
            self.python == other.python
            and (kind, rest) == (other_kind, other_rest)
            and np.array_equal(keys, other_keys)
            and torch.equal(self.cpu, other.cpu)
            and (self.cuda is None or other.cuda is None or torch.equal(self.cuda, other.cuda))
        )

    def plain(self) -> dict[str, Any]:
        """As plain values and tensors, which a checkpoint may hold."""
        kind, keys, *rest = self.numpy
        numpy = (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest)
        return {"python": self.python, "numpy": numpy, "cpu": self.cpu, "cuda": self.cuda}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> RandomState:
        """What ``plain`` gave."""
        kind, keys, *rest = plain["numpy"]
        numpy = (kind, keys.numpy().astype(np.uint32), *rest)
        return cls(plain["python"], numpy, plain["cpu"], plain["cuda"])


class RandomReader:
    """Reads the state of every generator again and again, for a few microseconds while Python's and numpy's rest.

    Their states take 100 microseconds to read, more than a small model's forward pass, and few losses use them. So the
    bytes of a state are compared first, and an equal one is not read again.

    Args:
        device: whose generator is read besides those of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = _ReadOnChange(random.getstate, _python_mark, lambda _: True)
        self._numpy = _ReadOnChange(_numpy_state, _numpy_mark, _keeps_no_normal_number)

    def now(self) -> RandomState:
        """The state now."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return RandomState(self._python.now(), self._numpy.now(), torch.get_rng_state(), cuda)


class _ReadOnChange(Generic[T]):
    """A value that is read again only when its mark has changed.

    Args:
        read: gives the value.
        mark: gives something that differs whenever the value does; none where it cannot tell.
        is_told_by_mark: whether the mark tells all changes of a value that was just read.
    """

    def __init__(
        self, read: Callable[[], T], mark: Callable[[], object | None], is_told_by_mark: Callable[[T], bool]
    ) -> None:
        self._read = read
        self._mark = mark
        self._is_told_by_mark = is_told_by_mark
        self._last_mark: object | None = None
        self._value = read()

    def now(self) -> T:
        """The value now."""
        mark = self._mark()
        if mark is None or mark != self._last_mark:
            self._value = self._read()
            self._last_mark = mark if self._is_told_by_mark(self._value) else None
        return self._value


def _numpy_state() -> Any:  # noqa: ANN401 - as numpy types it
    return np.random.get_state(legacy=True)  # noqa: NPY002 - see RandomState.now


def _numpy_mark() -> object | None:
    """The identity and the bytes of the generator behind ``numpy.random``, by the address that numpy documents."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # documented, but not in numpy's stubs
    if not isinstance(generator, np.random.MT19937):
        return None
    return id(generator), ctypes.string_at(generator.ctypes.state_address, _MERSENNE_TWISTER_BYTES)


def _keeps_no_normal_number(state: Any) -> bool:  # noqa: ANN401 - as numpy types it
    """Whether no second normal number waits for the next call, which would take it without a change of the bytes."""
    return bool(state[3] == 0)


def _python_mark() -> object | None:
    """The bytes of the generator behind ``random`` and its normal number; none where its layout is another."""
    if not _KNOWN_LAYOUT:
        return None
    generator = random.getstate.__self__  # type: ignore[attr-defined] # the generator behind the module's functions
    return generator.gauss_next, _python_bytes(generator)


def _python_bytes(generator: random.Random) -> bytes:
    """What CPython's ``RandomObject`` holds after the head that all objects have: a position and a key."""
    return ctypes.string_at(id(generator) + object.__basicsize__, _MERSENNE_TWISTER_BYTES)


def _has_known_layout() -> bool:
    """Whether the bytes of a generator tell every draw of its first two keys, and come back with its state."""
    if _random.Random.__basicsize__ - object.__basicsize__ < _MERSENNE_TWISTER_BYTES:
        return False
    generator = random.Random(0)
    state, before = generator.getstate(), _python_bytes(generator)
    seen = {before}
    for _ in range(_DRAWS):
        generator.random()
        seen.add(_python_bytes(generator))
    generator.setstate(state)
    return len(seen) == _DRAWS + 1 and _python_bytes(generator) == before


_DRAWS = 650
"""Each takes two of a key's 624 words."""
_KNOWN_LAYOUT = _has_known_layout()


def seed_everything(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - see RandomState.now
    torch.manual_seed(seed)
