"""Which micro-batch sizes an allocator has room for. Pure, no torch.

The least capacity with which an update of one size gets through is found by replays (``minimum_capacity``). They cost
too much to try every size, so the powers of two (and the bound) are replayed first, and a line between two of them says
where a limit is met. What tensors take is linear in the size or bends upwards (the larger of several affine pieces;
quadratic where a loss compares all samples), so there the line is exact or too high. What fragmentation adds comes and
goes by steps of some percent: the size found is therefore replayed too, and smaller ones until one fits.

An answer is then a size that was seen to fit, and a larger limit never has a smaller one: the candidate rises with the
limit, and what fits below a candidate and a limit fits below larger ones. Whether a size above fits after all is not
asked. Cards with the same kernels share their replays.
"""

from __future__ import annotations

from typing import Protocol

from tuner.estimation.allocator.config import AllocatorSettings
from tuner.estimation.allocator.replay import Replayed, breakdown, minimum_capacity, replay
from tuner.estimation.trace import Category, Trace

LARGEST_SIZE = 2**22
"""Sizes above are not looked at: no effective batch is larger."""
_TOLD_BITS = 7
"""Sizes are told to this many bits: each up to 128, above every second, from 256 on every fourth, and so on."""


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
        self._replays: dict[int, Replayed] = {}
        self._held: dict[int, dict[Category, int]] = {}

    def replayed(self, size: int) -> Replayed:
        """A replay without any limit."""
        if size not in self._replays:
            trace = self._trace(size)
            self._replays[size] = replay(trace.events, trace.sizes, self._settings)
        return self._replays[size]

    def capacity(self, size: int) -> int:
        """The least capacity found for a size, in bytes."""
        if size not in self._capacities:
            trace = self._trace(size)
            self._capacities[size] = minimum_capacity(trace.events, trace.sizes, self._settings)
        return self._capacities[size]

    def held_at_peak(self, size: int) -> dict[Category, int]:
        """What holds the memory when most is allocated; sums to the peak of ``replayed``."""
        if size not in self._held:
            self._held[size] = breakdown(self._trace(size), self.replayed(size).peak_position, self._settings)
        return self._held[size]

    def fits(self, size: int, limit_bytes: int) -> bool:
        """Whether the allocator gets through with this much; one replay tells it where nothing has to be given back."""
        if size not in self._capacities:
            free = self.replayed(size)
            if free.fits and free.peak_reserved_bytes <= limit_bytes:
                return True
        return self.capacity(size) <= limit_bytes

    def thrashes(self, size: int, limit_bytes: int) -> bool:
        """Whether the allocator gets through with this much only by giving back its cache in every update."""
        if not self.fits(size, limit_bytes) or self.replayed(size).peak_reserved_bytes <= limit_bytes:
            return False
        trace = self._trace(size)
        began = trace.position("measured-update")
        before, both = (
            replay(events, trace.sizes, self._settings, limit_bytes).retries
            for events in (trace.events[:began], trace.events)
        )
        return both > before

    def largest(self, limit_bytes: int, bound: int = LARGEST_SIZE) -> int:
        """The largest size up to ``bound`` that was found to fit; 0 when none was."""
        size = self.candidate(limit_bytes, bound)
        size = size if size == bound else _told(size)
        while size and not self.fits(size, limit_bytes):
            size = _told(size - 1)
        return size

    def candidate(self, limit_bytes: int, bound: int = LARGEST_SIZE) -> int:
        """Where the line between powers of two meets the limit, at most ``bound``; 0 when one sample does not fit."""
        if not bound or self.capacity(1) > limit_bytes:
            return 0
        size, above = 1, min(2, bound)
        while size < bound and self.capacity(above) <= limit_bytes:
            size, above = above, min(2 * above, bound)
        if size == bound:
            return bound
        least, most = self.capacity(size), self.capacity(above)
        return size + (limit_bytes - least) * (above - size) // (most - least)

    def _trace(self, size: int) -> Trace:
        return self._traced.trace_at(size, accumulates=self._accumulates)


def _told(size: int) -> int:
    """The next size that is told, not above this one."""
    unknown = max(0, size.bit_length() - _TOLD_BITS)
    return size >> unknown << unknown
