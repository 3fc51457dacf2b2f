"""Replay a trace in the simulated allocator, to find its peaks and the smallest sufficient capacity. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from batchwright.errors import EstimateError
from batchwright.estimation.allocator.config import DEFAULT_SETTINGS, ROUND_LARGE_BYTES, AllocatorSettings, rounded_up
from batchwright.estimation.allocator.simulator import CachingAllocator
from batchwright.estimation.trace import Category, Trace

NO_PARTS: Mapping[int, int] = MappingProxyType({})
"""Every block is one."""


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        peak_allocated_bytes: peak of the bytes of allocated blocks (`torch.cuda.max_memory_allocated`).
        peak_reserved_bytes: peak of the bytes of segments (`torch.cuda.max_memory_reserved`).
        fits: whether every request succeeded. If not, the replay and its peaks end at the first failed request.
        retries: how often the whole cache was freed (`num_alloc_retries`).
        peak_position: index of the event that first reached the peak allocated; -1 without events.
        retries_before: of the retries, those before the peaks were reset.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    fits: bool
    retries: int
    peak_position: int
    retries_before: int = 0


def replay(  # noqa: PLR0913 - the trace and the device
    events: Sequence[int],
    sizes: Sequence[int],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    capacity_bytes: int | None = None,
    *,
    parts: Mapping[int, int] = NO_PARTS,
    since: int = 0,
) -> ReplayResult:
    """Run ``events`` (see ``Trace``) with blocks of ``sizes`` bytes through an allocator.

    Args:
        events: ``i`` allocates block ``i``, ``~i`` frees it.
        sizes: bytes requested, by block.
        settings: the settings of the allocator.
        capacity_bytes: the memory of the device; None for no limit.
        parts: as in ``Trace``.
        since: peaks are reset before this event, as by `torch.cuda.reset_peak_memory_stats`. Retries are not.
    """
    return _replay(CachingAllocator(capacity_bytes, settings), events, sizes, parts, since)


class CapacitySearch:
    """The search for the smallest capacity, in steps of 2 MiB, with which every request succeeds.

    A replay yields more than its outcome. A successful replay that reserved at most ``r`` bytes also succeeds with a
    capacity of ``r``. A failed replay, in which every refused request needed at least ``m``, also fails with every
    capacity below ``m``.

    Success is not monotone in the capacity: with more memory the cache is freed at other times, and fragmentation may
    be worse. The bisection assumes that it is. So a smaller capacity than the result may succeed too, and a larger one
    may fail, but a replay with the result itself succeeded. No capacity below the peak of the rounded requests can.

    The bisection goes on only as far as a caller needs it: the result does not depend on what was asked before.

    Attributes:
        least_bytes: the peak of the rounded requests, which no capacity can be below.
    """

    def __init__(
        self,
        events: Sequence[int],
        sizes: Sequence[int],
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        parts: Mapping[int, int] = NO_PARTS,
    ) -> None:
        self._requests = (events, sizes, parts)
        self._settings = settings
        self.least_bytes, _ = _peak_of(events, _rounded(sizes, parts, settings))
        self._lower = rounded_up(self.least_bytes, ROUND_LARGE_BYTES)
        self._upper: int | None = None
        self._capacity = self._lower
        self._unlimited: ReplayResult | None = None

    @property
    def unlimited(self) -> ReplayResult:
        """The replay without a limit."""
        if self._unlimited is None:
            events, sizes, parts = self._requests
            self._unlimited = replay(events, sizes, self._settings, parts=parts)
        return self._unlimited

    def result(self) -> int:
        """Return the smallest capacity.

        Raises:
            EstimateError: when no capacity suffices.
        """
        while self._lower < self._most():
            self._halve()
        return self._most()

    def is_at_most(self, limit_bytes: int) -> bool:
        """Return whether the smallest capacity is within a limit.

        Raises:
            EstimateError: when no capacity suffices.
        """
        while self._lower <= limit_bytes < self._most():
            self._halve()
        return self._lower <= limit_bytes

    def _most(self) -> int:
        """Return the smallest capacity that is known to suffice."""
        if self._upper is None:
            if not self.unlimited.fits:
                raise EstimateError("an update needs more memory than can be addressed: lower the micro-batch size")
            self._upper = rounded_up(self.unlimited.peak_reserved_bytes, ROUND_LARGE_BYTES)
        return self._upper

    def _halve(self) -> None:
        """Replay with a capacity between the bounds, the lower one at first, and move one of them."""
        most = self._most()
        allocator = CachingAllocator(self._capacity, self._settings)
        replayed = _replay(allocator, *self._requests)
        if replayed.fits:
            self._upper = most = min(rounded_up(replayed.peak_reserved_bytes, ROUND_LARGE_BYTES), self._capacity)
        else:
            self._lower = min(rounded_up(allocator.least_refused_bytes, ROUND_LARGE_BYTES), most)
        self._capacity = self._lower + (most - self._lower) // 2 // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES


def breakdown(
    trace: Trace, position: int, settings: AllocatorSettings = DEFAULT_SETTINGS, capacity_bytes: int | None = None
) -> dict[Category, int]:
    """Return the allocated bytes of each category after event ``position``; every category is present.

    At a replay's ``peak_position`` the values sum to its peak allocated, given equal settings and capacity.
    """
    allocator = CachingAllocator(capacity_bytes, settings)
    events = trace.events[: position + 1]
    addresses: list[_Addresses] = [0] * len(trace.sizes)
    _run_events(allocator, events, trace.sizes, trace.parts, addresses)
    held = dict.fromkeys(Category, 0)
    for block in _live_blocks(events):
        found = addresses[block]
        for address in (found,) if isinstance(found, int) else found:
            held[trace.categories[block]] += allocator.block_bytes(address)
    return held


_Addresses: TypeAlias = "int | list[int]"
"""Address of a block, or addresses of one in parts."""


def _replay(
    allocator: CachingAllocator, events: Sequence[int], sizes: Sequence[int], parts: Mapping[int, int], since: int = 0
) -> ReplayResult:
    addresses: list[_Addresses] = [0] * len(sizes)
    peak, position, fits = _run_events(allocator, events[:since], sizes, parts, addresses)
    retries_before = allocator.retries
    if fits:
        allocator.reset_peaks()
        peak, position, fits = _run_events(allocator, events[since:], sizes, parts, addresses)
        position += since
    return ReplayResult(peak, allocator.peak_reserved_bytes, fits, allocator.retries, position, retries_before)


def _run_events(
    allocator: CachingAllocator,
    events: Iterable[int],
    sizes: Sequence[int],
    parts: Mapping[int, int],
    addresses: list[_Addresses],
) -> tuple[int, int, bool]:
    """Run events and store each block's address; return the peak allocated, the index of its event, and success."""
    malloc, free = allocator.malloc, allocator.free
    peak = allocator.allocated_bytes
    position = -1
    for index, event in enumerate(events):
        if event < 0:
            freed = addresses[~event]
            if isinstance(freed, int):
                free(freed)
            else:
                for address in freed:
                    free(address)
            continue
        count = parts.get(event, 1)
        made = malloc(sizes[event]) if count == 1 else allocator.malloc_run(sizes[event] // count, count)
        if made is not None:
            addresses[event] = made
        if allocator.allocated_bytes > peak:
            peak = allocator.allocated_bytes
            position = index
        if made is None:
            return peak, position, False
    return peak, position, True


def _live_blocks(events: Iterable[int]) -> set[int]:
    taken: set[int] = set()
    for event in events:
        if event < 0:
            taken.discard(~event)
        else:
            taken.add(event)
    return taken


def requested_at_peak(trace: Trace, settings: AllocatorSettings = DEFAULT_SETTINGS) -> dict[Category, int]:
    """Return the rounded requests of each category where all of them are the most: at most what a replay allocates.

    No allocator is simulated, which takes a tenth of the time of a replay.
    """
    rounded = _rounded(trace.sizes, trace.parts, settings)
    _, position = _peak_of(trace.events, rounded)
    found = dict.fromkeys(Category, 0)
    for block in _live_blocks(trace.events[: position + 1]):
        found[trace.categories[block]] += rounded[block]
    return found


def _peak_of(events: Iterable[int], rounded: Sequence[int]) -> tuple[int, int]:
    """Return the peak of the rounded requests, a lower bound of the capacity, and the index of its event."""
    held = most = 0
    position = -1
    for index, event in enumerate(events):
        held += -rounded[~event] if event < 0 else rounded[event]
        if held > most:
            most, position = held, index
    return most, position


def _rounded(sizes: Sequence[int], parts: Mapping[int, int], settings: AllocatorSettings) -> list[int]:
    """Return the rounded request of each block; for one in parts, the sum of theirs."""
    rounded_by_size = {size: settings.rounded(size) if size else 0 for size in set(sizes)}
    rounded = [rounded_by_size[size] for size in sizes]
    for block, count in parts.items():
        size = sizes[block] // count
        rounded[block] = settings.rounded(size) * count if size else 0
    return rounded
