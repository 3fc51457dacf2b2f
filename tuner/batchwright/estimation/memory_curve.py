"""Find the micro-batch sizes whose updates fit in an allocator. Pure, no torch.

The smallest capacity with which an update of one size succeeds is found by replays (``CapacitySearch``). Replays are
too slow to try every size. So the powers of two (and the bound) are replayed first, and linear interpolation between
two of them gives a candidate. The memory of tensors is linear or convex in the size (the maximum of affine functions;
quadratic if a loss compares all samples), so the interpolation is exact or too high. Fragmentation adds steps of some
percent, so the candidate is replayed too, and smaller sizes until one fits.

A result is therefore a size whose replay fitted, and results are monotone in the limit: the candidate rises with the
limit, and a size that fits under a limit fits under larger ones. Sizes above the candidate are not tried. GPUs with the
same kernels share their replays.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from batchwright.estimation.allocator.config import AllocatorSettings
from batchwright.estimation.allocator.replay import CapacitySearch, ReplayResult, breakdown, replay, requested_at_peak
from batchwright.estimation.trace import Category, Trace

_FIRST_STEP_BITS = 5
"""The first step of ``largest_fitting`` is the size shifted by as many bits: 3 %, as fragmentation takes."""
Replayable: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]"
"""The input of a replay: the events of a trace, the bytes of its blocks, and the blocks in parts."""
LARGEST_SIZE = 2**22
"""Larger sizes are not examined: no effective batch is larger."""
_SIGNIFICANT_BITS = 7
"""Sizes are rounded down to this many bits: to even sizes from 128, to multiples of four from 256, and so on."""


class TracedWorkload(Protocol):
    """One workload's traces with the kernels of one profile."""

    @property
    def parameters(self) -> int:
        """Number of parameters; 0 before the first trace."""

    @property
    def exact_sizes(self) -> bool:
        """True if the trace at each size equals a trace taken at that size, as far as was checked."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Operations that could not be traced so far, and their effect on the estimate."""

    def trace_at(self, micro_batch_size: int, *, accumulates: bool) -> Trace:
        """Return the trace at a size; fast, since only the sizes of the blocks change."""


class MemoryCurve:
    """The memory that one workload's updates need, by micro-batch size.

    Args:
        traced: the traced workload.
        settings: the settings of the allocator.
        accumulates: whether updates have several micro-batches.
        searches: the searches of this estimate by trace, of which several profiles may have equal ones.
    """

    def __init__(
        self,
        traced: TracedWorkload,
        settings: AllocatorSettings,
        *,
        accumulates: bool,
        searches: dict[Replayable, CapacitySearch] | None = None,
    ) -> None:
        self._traced = traced
        self._settings = settings
        self._accumulates = accumulates
        self._by_trace = {} if searches is None else searches
        self._searches: dict[int, CapacitySearch] = {}
        self._held: dict[int, dict[Category, int]] = {}
        self._errors: dict[int, tuple[int, int]] = {}

    def replayed(self, size: int) -> ReplayResult:
        """Return a replay without a limit."""
        return self._search(size).unlimited

    def capacity(self, size: int) -> int:
        """Return the smallest capacity found for a size, in bytes."""
        return self._search(size).result()

    def held_at_peak(self, size: int) -> dict[Category, int]:
        """Return the bytes of each category at the peak of ``replayed``; they sum to that peak."""
        if size not in self._held:
            self._held[size] = breakdown(self._trace_at(size), self.replayed(size).peak_position, self._settings)
        return self._held[size]

    def requested_at_peak(self, size: int) -> dict[Category, int]:
        """Return the requested bytes of each category where they are the most, without a replay."""
        return requested_at_peak(self._trace_at(size), self._settings)

    def workspace_error(self, size: int) -> tuple[int, int]:
        """Return by how many bytes workspaces may be smaller, and larger, than in the trace."""
        if size not in self._errors:
            self._errors[size] = self._trace_at(size).workspace_error
        return self._errors[size]

    def fits(self, size: int, limit_bytes: int) -> bool:
        """Return whether a size fits in the limit; as many replays are made as that takes."""
        return self._search(size).is_at_most(limit_bytes)

    def thrashes(self, size: int, limit_bytes: int) -> bool:
        """Return whether a size fits in the limit only because the allocator frees its cache in every update."""
        if not self.fits(size, limit_bytes) or self.replayed(size).peak_reserved_bytes <= limit_bytes:
            return False
        trace = self._trace_at(size)
        began = trace.position("measured-update")
        found = replay(trace.events, trace.sizes, self._settings, limit_bytes, parts=trace.parts, since=began)
        return found.retries > found.retries_before

    def largest(self, limit_bytes: int, bound: int = LARGEST_SIZE) -> int:
        """Return the largest size up to ``bound`` that was found to fit; 0 if none was."""
        size = self.candidate(limit_bytes, bound)
        size = size if size == bound else _round_down(size)
        while size and not self.fits(size, limit_bytes):
            size = _round_down(size - 1)
        return size

    def candidate(self, limit_bytes: int, bound: int = LARGEST_SIZE) -> int:
        """Interpolate the size that reaches the limit, at most ``bound``; 0 if one sample does not fit."""
        size = self._power_near(limit_bytes, bound)
        while size and not self.fits(size, limit_bytes):
            size //= 2
        if not size:
            return 0
        above = min(2 * size, bound)
        while size < bound and self.fits(above, limit_bytes):
            size, above = above, min(2 * above, bound)
        if size == bound:
            return bound
        lower, upper = self.capacity(size), self.capacity(above)
        return size + (limit_bytes - lower) * (above - size) // (upper - lower)

    def _power_near(self, limit_bytes: int, bound: int) -> int:
        """Return the largest power of two up to ``bound`` whose requests are within the limit; 1 if none is."""
        size = 1
        while 2 * size <= bound and self._search(2 * size).least_bytes <= limit_bytes:
            size *= 2
        return min(size, bound)

    def _search(self, size: int) -> CapacitySearch:
        if size not in self._searches:
            trace = self._trace_at(size)
            key = trace.events, trace.sizes, tuple(trace.parts.items())
            if key not in self._by_trace:
                self._by_trace[key] = CapacitySearch(trace.events, trace.sizes, self._settings, parts=trace.parts)
            self._searches[size] = self._by_trace[key]
        return self._searches[size]

    def _trace_at(self, size: int) -> Trace:
        return self._traced.trace_at(size, accumulates=self._accumulates)


def largest_fitting(fits: Callable[[int], bool], bound: int, first: int) -> int:
    """Find the largest size up to ``bound`` that fits; 0 if none does.

    Args:
        fits: returns whether a size fits. Where it is not monotone, the result fits and the next size does not.
        bound: the largest size of interest.
        first: the size to try first; the search is fastest if the result is near.
    """
    low, high = 0, bound + 1
    size, step = min(max(first, 1), bound), max(1, first >> _FIRST_STEP_BITS)
    while high - low > 1:
        low, high = (size, high) if fits(size) else (low, size)
        size = size + step if low == size else size - step
        step *= 2
        if not low < size < high:
            size = (low + high) // 2
    return low


def _round_down(size: int) -> int:
    """Round a size down to its leading ``_SIGNIFICANT_BITS`` bits."""
    dropped_bits = max(0, size.bit_length() - _SIGNIFICANT_BITS)
    return size >> dropped_bits << dropped_bits
