"""The order of samples, equal on every host: of an epoch by (seed, epoch) alone, and within an update by length."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from batchwright.training.data.seeding import generator_from_key


@lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, length: int) -> Tensor:
    """The order of an epoch's samples, int64 ``(length,)``: a permutation that depends only on the arguments."""
    return torch.randperm(length, generator=generator_from_key(seed, epoch))


def longest_first(indices: tuple[int, ...], lengths: Tensor | None) -> tuple[int, ...]:
    """Sort samples by length, so that a micro-batch of neighbours is padded little. Equal ones stay in order.

    The longest ones come first: an allocator that has their memory has room for the others.

    Args:
        indices: numbers of samples.
        lengths: length of each sample of the data, int64 ``(samples,)``; None if the samples are to stay in order.
    """
    if lengths is None or len(indices) <= 1:
        return indices
    chosen = torch.tensor(indices)
    return tuple(chosen[lengths[chosen].argsort(descending=True, stable=True)].tolist())
