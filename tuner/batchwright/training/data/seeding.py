"""The order of samples, and random choices that depend on a key alone and leave the process's own generators alone."""

import hashlib
import random
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


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


@lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, length: int) -> Tensor:
    """The order of an epoch's samples, int64 ``(length,)``: a permutation that depends only on the arguments."""
    return torch.randperm(length, generator=generator_from_key(seed, epoch))


def longest_first(indices: tuple[int, ...], lengths: Tensor | None) -> tuple[int, ...]:
    """Sort samples by length, so that a micro-batch of neighbours is padded little. Equal ones stay in order.

    The longest ones come first: an allocator that has their memory has room for the others. Without ``lengths``, int64
    ``(samples,)``, the samples stay in order.
    """
    if lengths is None or len(indices) <= 1:
        return indices
    chosen = torch.tensor(indices)
    return tuple(chosen[lengths[chosen].argsort(descending=True, stable=True)].tolist())
