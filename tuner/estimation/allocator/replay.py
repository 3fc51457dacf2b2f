"""A trace's requests, replayed through the simulated allocator: peaks, and the least memory that suffices. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.errors import EstimateError
from tuner.estimation.allocator.config import DEFAULT_SETTINGS, ROUND_LARGE_BYTES, AllocatorSettings, rounded_up
from tuner.estimation.allocator.simulator import CachingAllocator
from tuner.estimation.trace import Category, Trace


@dataclass(frozen=True)
class Replayed:
    """What the allocator came to.

    Attributes:
        peak_allocated_bytes: most bytes of taken blocks (`torch.cuda.max_memory_allocated`).
        peak_reserved_bytes: most bytes of segments (`torch.cuda.max_memory_reserved`).
        fits: whether every request was met. If not, the replay ends at the first that was not, and so do the peaks.
        retries: how often the whole cache was given back (`num_alloc_retries`): a fit with retries thrashes.
        peak_position: index of the event after which most was allocated for the first time; -1 without any event.
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
) -> Replayed:
    """Run ``events`` (see ``Trace``) with blocks of ``sizes`` bytes through an allocator.

    Args:
        events: ``i`` takes block ``i``, ``~i`` gives it back.
        sizes: bytes asked for, by block.
        settings: of the allocator.
        capacity_bytes: what the device can give it; None for as much as it wants.
        since: peaks count from this event on, what is held by then included, as after
            `torch.cuda.reset_peak_memory_stats`. Retries count from the first.
    """
    return _replayed(CachingAllocator(capacity_bytes, settings), events, sizes, since)


def minimum_capacity(
    events: Sequence[int], sizes: Sequence[int], settings: AllocatorSettings = DEFAULT_SETTINGS
) -> int:
    """The least capacity found, in steps of 2 MiB, with which every request is met.

    A replay tells more than its outcome. One that passes and has reserved ``r`` bytes at most passes in the same way
    with a capacity of ``r``. One that fails, and was refused nothing that needed less than ``m``, fails in the same way
    with every capacity up to ``m``.

    What fits is not monotone: with more memory the cache is given back at other moments, and blocks may come to lie
    worse. The search halves an interval as if it were: a smaller capacity than the answer may pass too, and a larger
    one may not. The answer itself was seen to pass. No capacity below the peak of the rounded requests can.

    Raises:
        EstimateError: when it does not get through with any.
    """
    free = replay(events, sizes, settings)
    if not free.fits:
        raise EstimateError("an update takes more memory than can be addressed: lower the micro-batch size")
    least = rounded_up(_peak_rounded(events, sizes, settings), ROUND_LARGE_BYTES)
    most = rounded_up(free.peak_reserved_bytes, ROUND_LARGE_BYTES)
    tried = least
    while least < most:
        allocator = CachingAllocator(tried, settings)
        replayed = _replayed(allocator, events, sizes)
        if replayed.fits:
            most = min(rounded_up(replayed.peak_reserved_bytes, ROUND_LARGE_BYTES), tried)
        else:
            least = min(rounded_up(allocator.least_refused_bytes, ROUND_LARGE_BYTES), most)
        tried = least + (most - least) // 2 // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES
    return most


def breakdown(
    trace: Trace, position: int, settings: AllocatorSettings = DEFAULT_SETTINGS, capacity_bytes: int | None = None
) -> dict[Category, int]:
    """What the blocks taken after event ``position`` hold, in bytes of the allocator; every category is in it.

    At a replay's ``peak_position`` the values sum to its peak allocated, given the same settings and capacity.
    """
    allocator = CachingAllocator(capacity_bytes, settings)
    events = trace.events[: position + 1]
    addresses = [0] * len(trace.sizes)
    _through(allocator, events, trace.sizes, addresses)
    held = dict.fromkeys(Category, 0)
    for block in _taken_after(events):
        held[trace.categories[block]] += allocator.block_bytes(addresses[block])
    return held


def _replayed(allocator: CachingAllocator, events: Sequence[int], sizes: Sequence[int], since: int = 0) -> Replayed:
    addresses = [0] * len(sizes)
    peak, position, fits = _through(allocator, events[:since], sizes, addresses)
    if fits:
        allocator.reset_peaks()
        peak, position, fits = _through(allocator, events[since:], sizes, addresses)
        position += since
    return Replayed(peak, allocator.peak_reserved_bytes, fits, allocator.retries, position)


def _through(
    allocator: CachingAllocator, events: Iterable[int], sizes: Sequence[int], addresses: list[int]
) -> tuple[int, int, bool]:
    """Run events and note each block's address: most allocated, the index of its event or -1, and whether all fit."""
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


def _taken_after(events: Iterable[int]) -> set[int]:
    taken: set[int] = set()
    for event in events:
        if event < 0:
            taken.discard(~event)
        else:
            taken.add(event)
    return taken


def _peak_rounded(events: Iterable[int], sizes: Sequence[int], settings: AllocatorSettings) -> int:
    """Most bytes of rounded requests at once: no capacity below can do."""
    known = {size: settings.rounded(size) if size else 0 for size in set(sizes)}
    rounded = [known[size] for size in sizes]
    held = most = 0
    for event in events:
        if event < 0:
            held -= rounded[~event]
        else:
            held += rounded[event]
            most = max(most, held)
    return most
