"""The order of samples, a function of (seed, epoch) alone and equal on every host."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, length: int) -> Tensor:
    """The order of an epoch's samples, int64 ``(length,)``: a permutation that depends only on the arguments."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(length, generator=generator)
