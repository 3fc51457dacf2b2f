"""How much memory the allocator needs, by micro-batch size. Pure, no torch.

The least capacity with which an update gets through is found by replays at canonical sizes only (1, 2, 3, 4, 6, 8, 12,
16, ...); between them it is taken to be linear. What tensors take is linear in the size or bends upwards (the larger of
several affine pieces; quadratic where a loss compares all samples), so that a straight line between two sizes is exact
or too high: by 4 % at most, where all memory is quadratic. What fragmentation adds comes and goes by steps, which the
uncertainty of an estimate covers.

That makes an answer monotone whatever the allocator does (replays are not: with more memory blocks may come to lie
worse), and cards with the same kernels share their replays.
"""

from __future__ import annotations

from typing import Protocol

from tuner.estimation.replay import minimum_capacity
from tuner.estimation.settings import AllocatorSettings
from tuner.estimation.trace import Trace

LARGEST_SIZE = 2**22
"""Sizes above are not looked at: no effective batch is larger."""


class TracedWorkload(Protocol):
    """One workload's traces with the kernels of one profile."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""

    @property
    def exact_sizes(self) -> bool:
        """Whether the trace of each size is what tracing at that size would give, as far as was checked."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be followed, and what that does to the estimate."""

    def trace_at(self, micro_batch_size: int, *, accumulates: bool) -> Trace:
        """The trace at a size; quick, since only the blocks' sizes change."""


def _canonical_sizes() -> tuple[int, ...]:
    sizes = [1]
    for power in range(1, LARGEST_SIZE.bit_length()):
        sizes.append(1 << power)
        if power + 1 < LARGEST_SIZE.bit_length():
            sizes.append(3 << (power - 1))
    return tuple(sizes)


CANONICAL_SIZES = _canonical_sizes()
"""Two per octave."""


class MemoryCurve:
    """The capacities that one workload's updates need.

    Args:
        traced: where traces come from.
        accumulates: whether updates have several micro-batches.
        settings: the allocator's.
    """

    def __init__(self, traced: TracedWorkload, settings: AllocatorSettings, *, accumulates: bool) -> None:
        self._traced = traced
        self._settings = settings
        self._accumulates = accumulates
        self._capacities: dict[int, int] = {}

    def replayed_capacity(self, size: int) -> int:
        """The least capacity found by replays at just this size, in bytes."""
        if size not in self._capacities:
            trace = self._traced.trace_at(size, accumulates=self._accumulates)
            self._capacities[size] = minimum_capacity(trace.events, trace.sizes, self._settings)
        return self._capacities[size]

    def capacity(self, size: int) -> int:
        """The capacity needed at any size, in bytes: on the line between the canonical sizes around it."""
        high = next(it for it in CANONICAL_SIZES if it >= size)
        if high == size:
            return self.replayed_capacity(size)
        low = CANONICAL_SIZES[CANONICAL_SIZES.index(high) - 1]
        least, most = self.replayed_capacity(low), self.replayed_capacity(high)
        return least - (least - most) * (size - low) // (high - low)

    def largest(self, limit_bytes: int) -> int:
        """The largest size whose capacity is within the limit; 0 when none is.

        Always the same halving of the canonical sizes, so that a larger limit never has a smaller answer.
        """
        low, high = -1, len(CANONICAL_SIZES)
        while high - low > 1:
            middle = (low + high) // 2
            if self.replayed_capacity(CANONICAL_SIZES[middle]) <= limit_bytes:
                low = middle
            else:
                high = middle
        if low < 0:
            return 0
        return CANONICAL_SIZES[low] if high == len(CANONICAL_SIZES) else self._between(low, limit_bytes)

    def _between(self, index: int, limit_bytes: int) -> int:
        """The largest size from a canonical one that fits up to the next, which does not."""
        low, high = CANONICAL_SIZES[index], CANONICAL_SIZES[index + 1]
        if high == low + 1:
            return low
        least, most = self.replayed_capacity(low), self.replayed_capacity(high)
        return low + (limit_bytes - least) * (high - low) // (most - least)
