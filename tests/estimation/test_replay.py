"""Replays of traces: peaks, the smallest capacity, the breakdown; and traces at every micro-batch size."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings, strategies as st

from batchwright.errors import EstimateError
from batchwright.estimation.allocator.config import DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS, AllocatorSettings
from batchwright.estimation.allocator.replay import (
    CapacitySearch,
    ReplayResult,
    breakdown,
    replay,
    requested_at_peak,
)
from batchwright.estimation.trace import Bound, Category, Mark, SizedTrace, Trace
from tests.support.recorded_requests import recorded_requests

MIB = 1024**2
BOTH = [DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS]
many = settings(max_examples=150, deadline=None, derandomize=True)


def trace_of(events: list[int], sizes: list[int], micro_batch_size: int = 1) -> Trace:
    """A trace whose blocks cycle through the categories."""
    kinds = list(Category)
    return Trace(
        micro_batch_size=micro_batch_size,
        accumulates=True,
        sizes=tuple(sizes),
        categories=tuple(kinds[index % len(kinds)] for index in range(len(sizes))),
        events=tuple(events),
        marks=(Mark(name="build", position=0),),
        decisions="cpu",
    )


def workload(seed: int, steps: int = 120) -> tuple[list[int], list[int]]:
    """Random blocks from bytes to 40 MiB that are allocated and freed."""
    random = Random(seed)
    events: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    for _ in range(steps):
        if live and random.random() < 0.45:
            events.append(~live.pop(random.randrange(len(live))))
        else:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(random.choice([0, 100, 5000, MIB // 2, MIB + 1, 3 * MIB, 9 * MIB, 15 * MIB, 40 * MIB]))
    return events, sizes


def test_a_replay_returns_the_peaks_and_their_position() -> None:
    """After 12 MiB, then 30 instead and 1 more, the peak allocated is at the event with index 3."""
    assert replay([0, ~0, 1, 2, ~2], [12 * MIB, 30 * MIB, MIB]) == ReplayResult(31 * MIB, 44 * MIB, True, 0, 3)


def test_a_capacity_forces_a_retry() -> None:
    """With 32 MiB the cached 12 are freed before 30 are allocated, which is a retry."""
    found = replay([0, ~0, 1, 2], [12 * MIB, 30 * MIB, MIB], capacity_bytes=32 * MIB)
    assert (found.fits, found.retries, found.peak_reserved_bytes) == (True, 1, 32 * MIB)


def test_a_replay_ends_where_memory_runs_out() -> None:
    """With 31 MiB the last block does not fit; the peaks are those before it."""
    found = replay([0, ~0, 1, 2, ~2], [12 * MIB, 30 * MIB, MIB], capacity_bytes=31 * MIB)
    assert (found.fits, found.peak_allocated_bytes, found.peak_position) == (False, 30 * MIB, 2)


def test_peaks_may_be_reset_at_a_mark() -> None:
    """From the fourth event on the peak allocated is 10 MiB, and earlier cached blocks are still reserved."""
    events, sizes = [0, 1, ~0, 2, ~2], [40 * MIB, 4 * MIB, 6 * MIB]
    assert replay(events, sizes).peak_allocated_bytes == 44 * MIB
    later = replay(events, sizes, since=3)
    assert (later.peak_allocated_bytes, later.peak_position) == (10 * MIB, 3)
    assert later.peak_reserved_bytes == 60 * MIB


def test_blocks_held_at_the_mark_count() -> None:
    """Without further allocations the peak is the memory held at the mark, at the event before it."""
    later = replay([0, 1, ~1, ~0], [40 * MIB, 4 * MIB], since=3)
    assert (later.peak_allocated_bytes, later.peak_position) == (40 * MIB, 2)


def test_segments_freed_before_the_mark_do_not_count() -> None:
    """The 20 MiB that were reserved before the mark are freed; after it 2 MiB are reserved."""
    later = replay([0, ~0, 1, 2], [20 * MIB, MIB, MIB], capacity_bytes=20 * MIB, since=3)
    assert (later.peak_reserved_bytes, later.retries) == (2 * MIB, 1)


def test_running_out_of_memory_before_the_mark_does_not_fit() -> None:
    """The replay ends before the mark."""
    assert not replay([0, ~0], [40 * MIB], capacity_bytes=20 * MIB, since=1).fits


def test_a_trace_without_events_takes_no_memory() -> None:
    """The peak is 0, and has no position."""
    assert replay([], []) == ReplayResult(0, 0, True, 0, -1)
    assert CapacitySearch([], []).result() == 0


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH), capacity=st.integers(1, 200))
def test_the_breakdown_sums_to_the_peak(seed: int, allocator: AllocatorSettings, capacity: int) -> None:
    """The categories sum to the peak at its position, with and without a capacity."""
    events, sizes = workload(seed)
    for limit in (None, capacity * 2 * MIB):
        found = replay(events, sizes, allocator, limit)
        held = breakdown(trace_of(events, sizes), found.peak_position, allocator, limit)
        assert set(held) == set(Category)
        assert sum(held.values()) == found.peak_allocated_bytes


def in_parts(seed: int) -> tuple[list[int], list[int], dict[int, int]]:
    """A random workload, of whose blocks every third stands for 2 to 60 equal ones."""
    events, sizes = workload(seed)
    random = Random(seed)
    parts = {block: random.choice([2, 3, 17, 60]) for block in range(0, len(sizes), 3)}
    return events, [size * parts.get(block, 1) for block, size in enumerate(sizes)], parts


def spread_out(events: list[int], sizes: list[int], parts: dict[int, int]) -> tuple[list[int], list[int]]:
    """Spread each run of equal blocks out into a block for each part."""
    counts = [parts.get(block, 1) for block in range(len(sizes))]
    first = [sum(counts[:block]) for block in range(len(sizes))]
    every: list[int] = []
    for event in events:
        block = event if event >= 0 else ~event
        numbers = range(first[block], first[block] + counts[block])
        every += numbers if event >= 0 else [~number for number in numbers]
    return every, [size // count for size, count in zip(sizes, counts, strict=True) for _ in range(count)]


@many
@given(
    seed=st.integers(0, 10**6),
    allocator=st.sampled_from([*BOTH, AllocatorSettings.parse("max_split_size_mb:21")]),
    capacity=st.one_of(st.none(), st.integers(1, 800)),
)
def test_blocks_in_parts_take_the_memory_of_the_parts(
    seed: int, allocator: AllocatorSettings, capacity: int | None
) -> None:
    """Peaks, retries, success and the smallest capacity are those of a replay of every part."""
    events, sizes, parts = in_parts(seed)
    limit = capacity and capacity * 2 * MIB
    found = replay(events, sizes, allocator, limit, parts=parts)
    every = spread_out(events, sizes, parts)
    expected = replay(*every, allocator, limit)
    assert replace(found, peak_position=0) == replace(expected, peak_position=0)
    assert CapacitySearch(events, sizes, allocator, parts=parts).result() == CapacitySearch(*every, allocator).result()
    trace = trace_of(events, sizes).model_copy(update={"parts": parts})
    held = breakdown(trace, found.peak_position, allocator, limit)
    if found.fits:
        assert sum(held.values()) == found.peak_allocated_bytes


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH), limits=st.lists(st.integers(0, 300), max_size=4))
def test_a_search_of_the_capacity_goes_as_far_as_it_is_asked(
    seed: int, allocator: AllocatorSettings, limits: list[int]
) -> None:
    """Early decisions on limits agree with the result, which does not depend on the limits or their order."""
    events, sizes = workload(seed)
    least = CapacitySearch(events, sizes, allocator).result()
    search = CapacitySearch(events, sizes, allocator)
    for limit in limits:
        assert search.is_at_most(limit * MIB) is (least <= limit * MIB)
    assert search.result() == least


@many
@given(seed=st.integers(0, 10**6))
def test_requests_at_their_peak_are_at_most_what_is_allocated(seed: int) -> None:
    """A block may be larger than its request, where too little would remain to be split off."""
    events, sizes, parts = in_parts(seed)
    trace = trace_of(events, sizes).model_copy(update={"parts": parts})
    requested = sum(requested_at_peak(trace).values())
    allocated = replay(events, sizes, parts=parts).peak_allocated_bytes
    assert 0.9 * allocated <= requested <= allocated


def test_the_breakdown_has_the_category_of_each_block() -> None:
    """A parameter of 4 MiB and an optimizer state of 512 bytes; the freed gradient is not counted."""
    trace = trace_of([0, 1, ~1, 2], [4 * MIB, 6 * MIB, 5])
    held = breakdown(trace, 3)
    assert held[Category.PARAMETERS] == 4 * MIB
    assert held[Category.GRADIENTS] == 0
    assert held[Category.OPTIMIZER_STATE] == 512


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH))
def test_the_least_capacity_fits_and_is_within_its_bounds(seed: int, allocator: AllocatorSettings) -> None:
    """A replay with it fits; it is between the live bytes and the unlimited peak, and a multiple of 2 MiB."""
    events, sizes = workload(seed)
    least = CapacitySearch(events, sizes, allocator).result()
    free = replay(events, sizes, allocator)
    passing = replay(events, sizes, allocator, least)
    assert passing.fits
    assert passing.peak_reserved_bytes <= least <= free.peak_reserved_bytes
    assert sum(sizes[block] for block in range(len(sizes)) if block in events and ~block not in events) <= least
    assert least % (2 * MIB) == 0


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH))
def test_where_more_memory_never_hurts_the_least_capacity_is_exact(seed: int, allocator: AllocatorSettings) -> None:
    """A scan of all capacities finds the same capacity whenever the scan is monotone."""
    events, sizes = workload(seed, steps=60)
    free = replay(events, sizes, allocator).peak_reserved_bytes
    capacities = range(2 * MIB, free + 2 * MIB, 2 * MIB)
    passing = [replay(events, sizes, allocator, capacity).fits for capacity in capacities]
    assume(passing == sorted(passing) and passing)
    assert CapacitySearch(events, sizes, allocator).result() == capacities[passing.index(True)]


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH), capacity=st.integers(1, 200))
def test_a_capacity_that_is_not_reached_changes_nothing(seed: int, allocator: AllocatorSettings, capacity: int) -> None:
    """A replay that fits and reserves at most ``r`` bytes is equal with a capacity of ``r``."""
    events, sizes = workload(seed)
    found = replay(events, sizes, allocator, capacity * 2 * MIB)
    assume(found.fits)
    assert replay(events, sizes, allocator, found.peak_reserved_bytes) == found


def test_more_memory_may_be_too_little() -> None:
    """With 40 MiB the cached 40 are freed for 1; with 42 they stay cached, and a block of 15 is put into them."""
    events, sizes = [0, ~0, 1, 2, 3, 4], [40 * MIB, MIB, 15 * MIB, MIB, MIB]
    outcomes = [replay(events, sizes, capacity_bytes=capacity * MIB).fits for capacity in (38, 40, 42, 44)]
    assert outcomes == [False, True, False, True]
    assert CapacitySearch(events, sizes).result() == 40 * MIB


@pytest.mark.parametrize("allocator", BOTH)
def test_an_absurdly_large_update_is_replayed(allocator: AllocatorSettings) -> None:
    """An update with a tensor of 2**70 bytes has a peak, and does not fit in any real capacity."""
    events, sizes = [0, 1, ~1, 2], [3 * MIB, 2**70, 5 * MIB]
    assert replay(events, sizes, allocator).fits
    assert CapacitySearch(events, sizes, allocator).result() >= 2**70
    assert not replay(events, sizes, allocator, 2**46).fits


@pytest.mark.parametrize("allocator", BOTH)
def test_an_update_that_cannot_be_addressed_is_refused(allocator: AllocatorSettings) -> None:
    """No capacity is returned if even a replay without a limit fails."""
    with pytest.raises(EstimateError, match="more memory than can be addressed"):
        CapacitySearch([0], [2**101], allocator).result()


HISTORY = [
    {"action": "segment_alloc", "addr": 0x7F00, "size": 2 * MIB, "stream": 0, "time_us": 1, "frames": []},
    {"action": "free_completed", "addr": 0x6E00, "size": 77, "stream": 0, "time_us": 2, "frames": []},
    {"action": "alloc", "addr": 0x7F00, "size": 1000, "stream": 0, "time_us": 3, "frames": []},
    {"action": "alloc", "addr": 0x8300, "size": 4, "stream": 0, "time_us": 4, "frames": []},
    {"action": "free_requested", "addr": 0x7F00, "size": 1000, "stream": 0, "time_us": 5, "frames": []},
    {"action": "free_completed", "addr": 0x7F00, "size": 1000, "stream": 0, "time_us": 5, "frames": []},
    {"action": "alloc", "addr": 0x7F00, "size": 600, "stream": 0, "time_us": 6, "frames": []},
    {"action": "free_requested", "addr": 0x7F00, "size": 600, "stream": 0, "time_us": 7, "frames": []},
    {"action": "free_completed", "addr": 0x7F00, "size": 600, "stream": 0, "time_us": 7, "frames": []},
    {"action": "segment_free", "addr": 0x9F00, "size": 20 * MIB, "stream": 0, "time_us": 8, "frames": []},
    {"action": "oom", "device_free": 0, "size": 8, "stream": 0, "time_us": 8, "frames": []},
    {"action": "snapshot", "addr": 0, "size": 512, "stream": 0, "time_us": 9, "frames": []},
]
"""Entries in the format of `torch.cuda.memory._snapshot`."""


def test_a_recorded_history_becomes_events() -> None:
    """Blocks are numbered by allocation, addresses may be reused, and earlier allocations are ignored."""
    assert recorded_requests(HISTORY) == ([0, 1, ~0, 2, ~2], [1000, 4, 600])


def traces_at(*sizes_at: tuple[int, list[int]]) -> list[Trace]:
    """Traces of the same events at several micro-batch sizes."""
    return [trace_of(list(range(len(sizes))), sizes, size) for size, sizes in sizes_at]


def test_two_traces_determine_every_affine_size() -> None:
    """Constant, proportional and affine blocks are exact between and beyond the two sizes."""
    sized = SizedTrace.of(traces_at((2, [100, 20, 50]), (8, [100, 80, 110])))
    assert sized.sizes_at(1) == [100, 10, 40]
    assert sized.sizes_at(64) == [100, 640, 670]
    assert sized.at(64).micro_batch_size == 64
    assert sized.at(64).sizes == (100, 640, 670)
    assert sized.at(64).events == (0, 1, 2)


def test_three_traces_determine_a_quadratic_size() -> None:
    """A block of ``(3 b + 1) (b + 2)`` bytes is exact, beside an affine one."""
    sized = SizedTrace.of(traces_at(*((b, [3 * b * b + 7 * b + 2, 4 * b]) for b in (1, 2, 5))))
    assert sized.sizes_at(100) == [30702, 400]
    assert sized.exact


def test_a_deviating_block_makes_a_trace_inexact_if_it_is_large() -> None:
    """A bounded block makes a trace inexact, but not beside a block ten thousand times as large."""
    at = (4, 6, 10)
    assert not SizedTrace.of(traces_at(*((b, [100 * min(b, 7)]) for b in at))).exact
    assert SizedTrace.of(traces_at(*((b, [100 * min(b, 7), 10**6 * b]) for b in at))).exact


def test_a_known_bound_is_kept_at_every_size() -> None:
    """A block of 100 bytes per sample and at most 700 is exact below, at and above the bound, in both updates."""

    def bounded(size: int) -> Trace:
        bound = Bound(unbounded_bytes=100 * size, max_bytes=700)
        trace = trace_of([0, 1, ~1], [5, bound.nbytes], size)
        marks = (Mark(name="measured-update", position=1), Mark(name="end", position=3))
        return trace.model_copy(update={"bounds": {1: bound}, "marks": marks}).with_warm_up_update()

    traces = [Trace.model_validate_json(bounded(size).model_dump_json()) for size in (4, 6, 10)]
    sized = SizedTrace.of(traces)
    assert sized.exact
    assert [sized.sizes_at(size) for size in (1, 8)] == [[5, 100, 100], [5, 700, 700]]
    assert [sized.sizes_at(size)[1] for size in (7, 100)] == [700, 700]


def test_bytes_are_never_negative() -> None:
    """A block that shrinks with the size has at least 0 bytes."""
    assert SizedTrace.of(traces_at((1, [90]), (2, [50]))).sizes_at(9) == [0]


def test_traces_of_different_events_are_refused() -> None:
    """The error has the sizes and the numbers of events."""
    one, other = trace_of([0, ~0], [5], 1), trace_of([0, ~0, 1], [5, 5], 4)
    with pytest.raises(EstimateError, match=r"micro-batch 1 and 4 .* \(2 and 3 events\)"):
        SizedTrace.of([one, other])


def test_traces_of_different_categories_are_refused() -> None:
    """Equal requests of other categories are another workload."""
    one = trace_of([0], [5], 1)
    other = one.model_copy(update={"micro_batch_size": 2, "categories": (Category.WORKSPACE,)})
    with pytest.raises(EstimateError, match="micro-batch 1 and 2"):
        SizedTrace.of([one, other])


def test_an_update_is_repeated_before_itself() -> None:
    """Block 2, which is kept, and block 1 of the build, which is freed, occur once; all others occur twice."""
    once = Trace(
        micro_batch_size=2,
        accumulates=True,
        sizes=(10, 20, 30, 40),
        categories=(Category.PARAMETERS, Category.GRADIENTS, Category.WORKSPACE, Category.TEMPORARIES),
        events=(0, 1, 2, 3, ~1, ~3),
        marks=(
            Mark(name="build", position=0),
            Mark(name="measured-update", position=2),
            Mark(name="end", position=6),
        ),
        decisions="cuda",
    )
    twice = once.with_warm_up_update()
    assert twice.events == (0, 1, 2, 3, ~1, ~3, 4, ~4)
    assert twice.sizes == (10, 20, 30, 40, 40)
    assert twice.categories[4] is Category.TEMPORARIES
    assert [(mark.name, mark.position) for mark in twice.marks] == [
        ("build", 0),
        ("first-update", 2),
        ("measured-update", 6),
        ("end", 8),
    ]
