"""The moving averages of the weights in the place of the weights, while they are evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.training.accumulation.gradient_sums import own_parts


@contextmanager
def averages_as_weights(
    parameters: Sequence[nn.Parameter], averages: Sequence[Tensor], memory: MemoryDevice
) -> Iterator[None]:
    """Give the parameters the values of the averages during the block. Both are equal to the bit afterwards.

    Parameters in fp32 change places with their averages, which takes no memory. Others, into which an average is
    rounded, are kept in the host's memory meanwhile, outside the limit, as for a checkpoint.

    Args:
        parameters: the trainable parameters, which may be shards.
        averages: the average of each in fp32, of the same shape and shards.
        memory: the device that they are on.
    """
    own = (own_parts([tensor.detach() for tensor in tensors]) for tensors in (parameters, averages))
    pairs = list(zip(*own, strict=True))
    exchanged = [pair for pair in pairs if pair[0].dtype is torch.float32]
    rounded = [pair for pair in pairs if pair[0].dtype is not torch.float32]
    with memory.without_limit():
        kept = [parameter.to("cpu", copy=True) for parameter, _ in rounded]
    for pair in exchanged:
        _exchange(*pair)
    for parameter, average in rounded:
        parameter.copy_(average)
    try:
        yield
    finally:
        for pair in exchanged:
            _exchange(*pair)
        for (parameter, _), value in zip(rounded, kept, strict=True):
            parameter.copy_(value)


def _exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the values of two tensors in fp32, bit by bit, without a third one."""
    bits, others = one.view(torch.int32), other.view(torch.int32)
    bits.bitwise_xor_(others)
    others.bitwise_xor_(bits)
    bits.bitwise_xor_(others)
