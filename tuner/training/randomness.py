"""The random number generators that user code may use: Python's, numpy's and torch's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


def seed_everything(seed: int) -> None:
    """Seed every generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - see RandomState.now
    torch.manual_seed(seed)
