"""Replay a trace in the simulated allocator, to find its peaks and the smallest sufficient capacity. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.errors import EstimateError
from tuner.estimation.allocator.config import DEFAULT_SETTINGS, ROUND_LARGE_BYTES, AllocatorSettings, rounded_up
from tuner.estimation.allocator.simulator import CachingAllocator
from tuner.estimation.trace import Category, Trace


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        peak_allocated_bytes: peak of the bytes of allocated blocks (`torch.cuda.max_memory_allocated`).
        peak_reserved_bytes: peak of the bytes of segments (`torch.cuda.max_memory_reserved`).
        fits: whether every request succeeded. If not, the replay and its peaks end at the first failed request.
        retries: how often the whole cache was freed (`num_alloc_retries`).
        peak_position: index of the event that first reached the peak allocated; -1 without events.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    fits: bool
    retries: int
    peak_position: int


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    capacity_bytes: int | None = None,
    *,
    since: int = 0,
) -> ReplayResult:
    """Run ``events`` (see ``Trace``) with blocks of ``sizes`` bytes through an allocator.

    Args:
        events: ``i`` allocates block ``i``, ``~i`` frees it.
        sizes: bytes requested, by block.
        settings: the settings of the allocator.
        capacity_bytes: the memory of the device; None for no limit.
        since: peaks are reset before this event, as by `torch.cuda.reset_peak_memory_stats`. Retries are not.
    """
    return _replay(CachingAllocator(capacity_bytes, settings), events, sizes, since)


def minimum_capacity(
    events: Sequence[int], sizes: Sequence[int], settings: AllocatorSettings = DEFAULT_SETTINGS
) -> int:
    """Find the smallest capacity, in steps of 2 MiB, with which every request succeeds.

    A replay yields more than its outcome. A successful replay that reserved at most ``r`` bytes also succeeds with a
    capacity of ``r``. A failed replay, in which every refused request needed at least ``m``, also fails with every
    capacity below ``m``.

    Success is not monotone in the capacity: with more memory the cache is freed at other times, and fragmentation may
    be worse. The bisection assumes that it is. So a smaller capacity than the result may succeed too, and a larger one
    may fail, but a replay with the result itself succeeded. No capacity below the peak of the rounded requests can.

    Raises:
        EstimateError: when no capacity suffices.
    """
    free = replay(events, sizes, settings)
    if not free.fits:
        raise EstimateError("an update needs more memory than can be addressed: lower the micro-batch size")
    lower = rounded_up(_peak_requested(events, sizes, settings), ROUND_LARGE_BYTES)
    most = rounded_up(free.peak_reserved_bytes, ROUND_LARGE_BYTES)
    capacity = lower
    while lower < most:
        allocator = CachingAllocator(capacity, settings)
        replayed = _replay(allocator, events, sizes)
        if replayed.fits:
            most = min(rounded_up(replayed.peak_reserved_bytes, ROUND_LARGE_BYTES), capacity)
        else:
            lower = min(rounded_up(allocator.least_refused_bytes, ROUND_LARGE_BYTES), most)
        capacity = lower + (most - lower) // 2 // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES
    return most


def breakdown(
    trace: Trace, position: int, settings: AllocatorSettings = DEFAULT_SETTINGS, capacity_bytes: int | None = None
) -> dict[Category, int]:
    """Return the allocated bytes of each category after event ``position``; every category is present.

    At a replay's ``peak_position`` the values sum to its peak allocated, given equal settings and capacity.
    """
    allocator = CachingAllocator(capacity_bytes, settings)
    events = trace.events[: position + 1]
    addresses = [0] * len(trace.sizes)
    _run_events(allocator, events, trace.sizes, addresses)
    held = dict.fromkeys(Category, 0)
    for block in _live_blocks(events):
        held[trace.categories[block]] += allocator.block_bytes(addresses[block])
    return held


def _replay(allocator: CachingAllocator, events: Sequence[int], sizes: Sequence[int], since: int = 0) -> ReplayResult:
    addresses = [0] * len(sizes)
    peak, position, fits = _run_events(allocator, events[:since], sizes, addresses)
    if fits:
        allocator.reset_peaks()
        peak, position, fits = _run_events(allocator, events[since:], sizes, addresses)
        position += since
    return ReplayResult(peak, allocator.peak_reserved_bytes, fits, allocator.retries, position)


def _run_events(
    allocator: CachingAllocator, events: Iterable[int], sizes: Sequence[int], addresses: list[int]
) -> tuple[int, int, bool]:
    """Run events and store each block's address; return the peak allocated, the index of its event, and success."""
    malloc, free = allocator.malloc, allocator.free
    peak = allocator.allocated_bytes
    position = -1
    for index, event in enumerate(events):
        if event < 0:
            free(addresses[~event])
            continue
        address = malloc(sizes[event])
        if address is None:
            return peak, position, False
        addresses[event] = address
        if allocator.allocated_bytes > peak:
            peak = allocator.allocated_bytes
            position = index
    return peak, position, True


def _live_blocks(events: Iterable[int]) -> set[int]:
    taken: set[int] = set()
    for event in events:
        if event < 0:
            taken.discard(~event)
        else:
            taken.add(event)
    return taken


def _peak_requested(events: Iterable[int], sizes: Sequence[int], settings: AllocatorSettings) -> int:
    """Return the peak of the rounded requests, which is a lower bound of the capacity."""
    rounded_by_size = {size: settings.rounded(size) if size else 0 for size in set(sizes)}
    rounded = [rounded_by_size[size] for size in sizes]
    held = most = 0
    for event in events:
        if event < 0:
            held -= rounded[~event]
        else:
            held += rounded[event]
            most = max(most, held)
    return most
