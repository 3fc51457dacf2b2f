"""Random choices that depend on a key alone, and do not change the process's own generators."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_from_key(*key: object) -> None:
    """Seed python, numpy and torch (on the CPU) by ``key``, in a block of ``preserved_random_state``.

    CUDA's generators, which ``torch.manual_seed`` would seed as well, are not changed.
    """
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, dtype=np.uint32))  # noqa: NPY002 - user code may use the old interface
    torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))


def generator_from_key(*key: object) -> torch.Generator:
    """A torch generator seeded by ``key``."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
