"""Random choices that depend on a key alone, and do not change the process's own generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the generators of python, numpy and torch (on the CPU) at the end of a block."""
    python, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy = np.random.get_state()  # noqa: NPY002 - user code may use the old interface
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - see above
        torch.default_generator.set_state(torch_state)


def seed_from_key(*key: object) -> None:
    """Seed python, numpy and torch (on the CPU) by ``key``, in a block of ``preserved_random_state``.

    CUDA's generators, which ``torch.manual_seed`` would seed as well, are not changed.
    """
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, dtype=np.uint32))  # noqa: NPY002 - see preserved_random_state
    torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))


def generator_from_key(*key: object) -> torch.Generator:
    """A torch generator seeded by ``key``."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
