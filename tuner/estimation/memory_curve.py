"""Find the micro-batch sizes whose updates fit in an allocator. Pure, no torch.

The smallest capacity with which an update of one size succeeds is found by replays (``minimum_capacity``). Replays are
too slow to try every size. So the powers of two (and the bound) are replayed first, and linear interpolation between
two of them gives a candidate. The memory of tensors is linear or convex in the size (the maximum of affine functions;
quadratic if a loss compares all samples), so the interpolation is exact or too high. Fragmentation adds steps of some
percent, so the candidate is replayed too, and smaller sizes until one fits.

A result is therefore a size whose replay fitted, and results are monotone in the limit: the candidate rises with the
limit, and a size that fits under a limit fits under larger ones. Sizes above the candidate are not tried. GPUs with the
same kernels share their replays.
"""

from __future__ import annotations

from typing import Protocol

from tuner.estimation.allocator.config import AllocatorSettings
from tuner.estimation.allocator.replay import ReplayResult, breakdown, minimum_capacity, replay
from tuner.estimation.trace import Category, Trace

LARGEST_SIZE = 2**22
"""Larger sizes are not examined: no effective batch is larger."""
_SIGNIFICANT_BITS = 7
"""Sizes are rounded down to this many bits: to even sizes from 128, to multiples of four from 256, and so on."""


class TracedWorkload(Protocol):
    """One workload's traces with the kernels of one profile."""

    @property
    def parameters(self) -> int:
        """Number of parameters."""

    @property
    def exact_sizes(self) -> bool:
        """True if the trace at each size equals a trace taken at that size, as far as was checked."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Operations that could not be traced, and their effect on the estimate."""

    def trace_at(self, micro_batch_size: int, *, accumulates: bool) -> Trace:
        """Return the trace at a size; fast, since only the sizes of the blocks change."""


class MemoryCurve:
    """The memory that one workload's updates need, by micro-batch size.

    Args:
        traced: the traced workload.
        settings: the settings of the allocator.
        accumulates: whether updates have several micro-batches.
    """

    def __init__(self, traced: TracedWorkload, settings: AllocatorSettings, *, accumulates: bool) -> None:
        self._traced = traced
        self._settings = settings
        self._accumulates = accumulates
        self._capacities: dict[int, int] = {}
        self._replays: dict[int, ReplayResult] = {}
        self._held: dict[int, dict[Category, int]] = {}
        self._convolutions: dict[int, int] = {}

    def replayed(self, size: int) -> ReplayResult:
        """Return a replay without a limit."""
        if size not in self._replays:
            trace = self._trace_at(size)
            self._replays[size] = replay(trace.events, trace.sizes, self._settings)
        return self._replays[size]

    def capacity(self, size: int) -> int:
        """Return the smallest capacity found for a size, in bytes."""
        if size not in self._capacities:
            trace = self._trace_at(size)
            self._capacities[size] = minimum_capacity(trace.events, trace.sizes, self._settings)
        return self._capacities[size]

    def held_at_peak(self, size: int) -> dict[Category, int]:
        """Return the bytes of each category at the peak of ``replayed``; they sum to that peak."""
        if size not in self._held:
            self._held[size] = breakdown(self._trace_at(size), self.replayed(size).peak_position, self._settings)
        return self._held[size]

    def largest_convolution_bytes(self, size: int) -> int:
        """Return the bytes of the tensors of the largest convolution; 0 without convolutions."""
        if size not in self._convolutions:
            self._convolutions[size] = self._trace_at(size).largest_convolution_bytes
        return self._convolutions[size]

    def fits(self, size: int, limit_bytes: int) -> bool:
        """Return whether a size fits in the limit; one replay suffices if it fits without freeing the cache."""
        if size not in self._capacities:
            unlimited = self.replayed(size)
            if unlimited.fits and unlimited.peak_reserved_bytes <= limit_bytes:
                return True
        return self.capacity(size) <= limit_bytes

    def thrashes(self, size: int, limit_bytes: int) -> bool:
        """Return whether a size fits in the limit only because the allocator frees its cache in every update."""
        if not self.fits(size, limit_bytes) or self.replayed(size).peak_reserved_bytes <= limit_bytes:
            return False
        trace = self._trace_at(size)
        began = trace.position("measured-update")
        before, both = (
            replay(events, trace.sizes, self._settings, limit_bytes).retries
            for events in (trace.events[:began], trace.events)
        )
        return both > before

    def largest(self, limit_bytes: int, bound: int = LARGEST_SIZE) -> int:
        """Return the largest size up to ``bound`` that was found to fit; 0 if none was."""
        size = self.candidate(limit_bytes, bound)
        size = size if size == bound else _round_down(size)
        while size and not self.fits(size, limit_bytes):
            size = _round_down(size - 1)
        return size

    def candidate(self, limit_bytes: int, bound: int = LARGEST_SIZE) -> int:
        """Interpolate the size that reaches the limit, at most ``bound``; 0 if one sample does not fit."""
        if not bound or self.capacity(1) > limit_bytes:
            return 0
        size, above = 1, min(2, bound)
        while size < bound and self.capacity(above) <= limit_bytes:
            size, above = above, min(2 * above, bound)
        if size == bound:
            return bound
        lower, upper = self.capacity(size), self.capacity(above)
        return size + (limit_bytes - lower) * (above - size) // (upper - lower)

    def _trace_at(self, size: int) -> Trace:
        return self._traced.trace_at(size, accumulates=self._accumulates)


def _round_down(size: int) -> int:
    """Round a size down to its leading ``_SIGNIFICANT_BITS`` bits."""
    dropped_bits = max(0, size.bit_length() - _SIGNIFICANT_BITS)
    return size >> dropped_bits << dropped_bits
