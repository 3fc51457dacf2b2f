"""Replays of traces: the figures, the least capacity, the breakdown; and traces at every micro-batch size."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.recorded_requests import recorded_requests
from tuner.errors import EstimateError
from tuner.estimation.allocator.config import DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS, AllocatorSettings
from tuner.estimation.allocator.replay import Replayed, breakdown, minimum_capacity, replay
from tuner.estimation.trace import Bound, Category, Mark, SizedTrace, Trace

MIB = 1024**2
BOTH = [DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS]
many = settings(max_examples=150, deadline=None, derandomize=True)


def trace_of(events: list[int], sizes: list[int], micro_batch_size: int = 1) -> Trace:
    """A trace whose blocks take turns at the categories."""
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
    """Random blocks that come and go, from bytes to 40 MiB."""
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


def test_a_replay_tells_peaks_and_where_most_was_allocated() -> None:
    """12 MiB, then 30 instead and 1 more: most is allocated after the event at index 3."""
    assert replay([0, ~0, 1, 2, ~2], [12 * MIB, 30 * MIB, MIB]) == Replayed(31 * MIB, 44 * MIB, True, 0, 3)


def test_a_capacity_forces_a_retry() -> None:
    """With 32 MiB the cached 12 are given back before 30 are taken: it fits, thrashing."""
    found = replay([0, ~0, 1, 2], [12 * MIB, 30 * MIB, MIB], capacity_bytes=32 * MIB)
    assert (found.fits, found.retries, found.peak_reserved_bytes) == (True, 1, 32 * MIB)


def test_a_replay_ends_where_memory_runs_out() -> None:
    """With 31 MiB the last block does not fit; the peaks are those until then."""
    found = replay([0, ~0, 1, 2, ~2], [12 * MIB, 30 * MIB, MIB], capacity_bytes=31 * MIB)
    assert (found.fits, found.peak_allocated_bytes, found.peak_position) == (False, 30 * MIB, 2)


def test_peaks_may_count_from_a_mark_on() -> None:
    """From the fourth event on 10 MiB are held at most, and what was cached before is still reserved."""
    events, sizes = [0, 1, ~0, 2, ~2], [40 * MIB, 4 * MIB, 6 * MIB]
    assert replay(events, sizes).peak_allocated_bytes == 44 * MIB
    later = replay(events, sizes, since=3)
    assert (later.peak_allocated_bytes, later.peak_position) == (10 * MIB, 3)
    assert later.peak_reserved_bytes == 60 * MIB


def test_what_is_held_at_the_mark_counts() -> None:
    """When nothing more is taken, the peak is what was held, after the event before the mark."""
    later = replay([0, 1, ~1, ~0], [40 * MIB, 4 * MIB], since=3)
    assert (later.peak_allocated_bytes, later.peak_position) == (40 * MIB, 2)


def test_what_was_given_back_before_the_mark_does_not_count() -> None:
    """20 MiB were reserved until 1 MiB needed their place; from then on it is 2."""
    later = replay([0, ~0, 1, 2], [20 * MIB, MIB, MIB], capacity_bytes=20 * MIB, since=3)
    assert (later.peak_reserved_bytes, later.retries) == (2 * MIB, 1)


def test_memory_that_runs_out_before_the_mark_is_told() -> None:
    """The mark is never reached."""
    assert not replay([0, ~0], [40 * MIB], capacity_bytes=20 * MIB, since=1).fits


def test_a_trace_without_events_takes_nothing() -> None:
    """No peak, and no position."""
    assert replay([], []) == Replayed(0, 0, True, 0, -1)
    assert minimum_capacity([], []) == 0


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH), capacity=st.integers(1, 200))
def test_the_breakdown_sums_to_the_peak(seed: int, allocator: AllocatorSettings, capacity: int) -> None:
    """At the peak's position, with and without a capacity, and every category is named."""
    events, sizes = workload(seed)
    for limit in (None, capacity * 2 * MIB):
        found = replay(events, sizes, allocator, limit)
        held = breakdown(trace_of(events, sizes), found.peak_position, allocator, limit)
        assert set(held) == set(Category)
        assert sum(held.values()) == found.peak_allocated_bytes


def test_the_breakdown_names_what_the_blocks_hold() -> None:
    """A parameter of 4 MiB and an optimizer state of 512 bytes; the freed gradient is not counted."""
    trace = trace_of([0, 1, ~1, 2], [4 * MIB, 6 * MIB, 5])
    held = breakdown(trace, 3)
    assert held[Category.PARAMETERS] == 4 * MIB
    assert held[Category.GRADIENTS] == 0
    assert held[Category.OPTIMIZER_STATE] == 512


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH))
def test_the_least_capacity_passes_and_what_cannot_pass_is_below_it(seed: int, allocator: AllocatorSettings) -> None:
    """It was seen to pass, lies between the live bytes and the free replay's peak, and is a multiple of 2 MiB."""
    events, sizes = workload(seed)
    least = minimum_capacity(events, sizes, allocator)
    free = replay(events, sizes, allocator)
    passing = replay(events, sizes, allocator, least)
    assert passing.fits
    assert passing.peak_reserved_bytes <= least <= free.peak_reserved_bytes
    assert sum(sizes[block] for block in range(len(sizes)) if block in events and ~block not in events) <= least
    assert least % (2 * MIB) == 0


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH))
def test_where_more_memory_never_hurts_the_least_capacity_is_exact(seed: int, allocator: AllocatorSettings) -> None:
    """A scan of all capacities finds the same, whenever the scan is monotone."""
    events, sizes = workload(seed, steps=60)
    free = replay(events, sizes, allocator).peak_reserved_bytes
    capacities = range(2 * MIB, free + 2 * MIB, 2 * MIB)
    passing = [replay(events, sizes, allocator, capacity).fits for capacity in capacities]
    assume(passing == sorted(passing) and passing)
    assert minimum_capacity(events, sizes, allocator) == capacities[passing.index(True)]


@many
@given(seed=st.integers(0, 10**6), allocator=st.sampled_from(BOTH), capacity=st.integers(1, 200))
def test_a_capacity_that_is_not_reached_changes_nothing(seed: int, allocator: AllocatorSettings, capacity: int) -> None:
    """A replay that passes with ``r`` bytes reserved at most is the same with a capacity of ``r``."""
    events, sizes = workload(seed)
    found = replay(events, sizes, allocator, capacity * 2 * MIB)
    assume(found.fits)
    assert replay(events, sizes, allocator, found.peak_reserved_bytes) == found


def test_more_memory_may_be_too_little() -> None:
    """With 40 MiB the cached 40 are given back for 1; with 42 they are kept, and a block of 15 settles in them."""
    events, sizes = [0, ~0, 1, 2, 3, 4], [40 * MIB, MIB, 15 * MIB, MIB, MIB]
    outcomes = [replay(events, sizes, capacity_bytes=capacity * MIB).fits for capacity in (38, 40, 42, 44)]
    assert outcomes == [False, True, False, True]
    assert minimum_capacity(events, sizes) == 40 * MIB


@pytest.mark.parametrize("allocator", BOTH)
def test_an_absurd_update_is_followed_all_the_same(allocator: AllocatorSettings) -> None:
    """A tensor of 2**70 bytes among small ones: its peak is told, and any real capacity is too small."""
    events, sizes = [0, 1, ~1, 2], [3 * MIB, 2**70, 5 * MIB]
    assert replay(events, sizes, allocator).fits
    assert minimum_capacity(events, sizes, allocator) >= 2**70
    assert not replay(events, sizes, allocator, 2**46).fits


@pytest.mark.parametrize("allocator", BOTH)
def test_what_cannot_be_addressed_is_refused(allocator: AllocatorSettings) -> None:
    """No capacity is told where even a replay without a limit ends early."""
    with pytest.raises(EstimateError, match="more memory than can be addressed"):
        minimum_capacity([0], [2**101], allocator)


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
"""Entries of the form that `torch.cuda.memory._snapshot` describes."""


def test_a_recorded_history_becomes_events() -> None:
    """Blocks are numbered as taken, an address may return, and what was taken before the history is left out."""
    assert recorded_requests(HISTORY) == ([0, 1, ~0, 2, ~2], [1000, 4, 600])


def traces_at(*sizes_at: tuple[int, list[int]]) -> list[Trace]:
    """Traces of the same events at several micro-batch sizes."""
    return [trace_of(list(range(len(sizes))), sizes, size) for size, sizes in sizes_at]


def test_two_traces_tell_every_affine_size() -> None:
    """Constant, proportional and affine blocks, at sizes between and beyond the two."""
    sized = SizedTrace.of(traces_at((2, [100, 20, 50]), (8, [100, 80, 110])))
    assert sized.sizes_at(1) == [100, 10, 40]
    assert sized.sizes_at(64) == [100, 640, 670]
    assert sized.at(64).micro_batch_size == 64
    assert sized.at(64).sizes == (100, 640, 670)
    assert sized.at(64).events == (0, 1, 2)


def test_three_traces_tell_a_quadratic_size() -> None:
    """``(3 b + 1) (b + 2)`` beside an affine block."""
    sized = SizedTrace.of(traces_at(*((b, [3 * b * b + 7 * b + 2, 4 * b]) for b in (1, 2, 5))))
    assert sized.sizes_at(100) == [30702, 400]
    assert sized.exact


def test_a_block_that_bends_makes_a_trace_inexact_where_it_matters() -> None:
    """A block that stops growing unseen, alone and beside one that is ten thousand times as large."""
    at = (4, 6, 10)
    assert not SizedTrace.of(traces_at(*((b, [100 * min(b, 7)]) for b in at))).exact
    assert SizedTrace.of(traces_at(*((b, [100 * min(b, 7), 10**6 * b]) for b in at))).exact


def test_a_known_bound_is_kept_at_every_size() -> None:
    """A block of 100 bytes a sample and at most 700: exact below, at and above the bound, in both updates."""

    def bounded(size: int) -> Trace:
        bound = Bound(growing=100 * size, most=700)
        trace = trace_of([0, 1, ~1], [5, bound.nbytes], size)
        marks = (Mark(name="measured-update", position=1), Mark(name="end", position=3))
        return trace.model_copy(update={"bounds": {1: bound}, "marks": marks}).warmed_up()

    traces = [Trace.model_validate_json(bounded(size).model_dump_json()) for size in (4, 6, 10)]
    sized = SizedTrace.of(traces)
    assert sized.exact
    assert [sized.sizes_at(size) for size in (1, 8)] == [[5, 100, 100], [5, 700, 700]]
    assert [sized.sizes_at(size)[1] for size in (7, 100)] == [700, 700]


def test_a_size_is_never_below_nothing() -> None:
    """A block that shrinks with the size ends at 0 bytes."""
    assert SizedTrace.of(traces_at((1, [90]), (2, [50]))).sizes_at(9) == [0]


def test_traces_of_different_events_are_refused() -> None:
    """The sizes and the numbers of events are named."""
    one, other = trace_of([0, ~0], [5], 1), trace_of([0, ~0, 1], [5, 5], 4)
    with pytest.raises(EstimateError, match=r"micro-batch 1 and 4 .* \(2 and 3 events\)"):
        SizedTrace.of([one, other])


def test_traces_of_different_categories_are_refused() -> None:
    """The same requests for another purpose are another workload."""
    one = trace_of([0], [5], 1)
    other = one.model_copy(update={"micro_batch_size": 2, "categories": (Category.WORKSPACE,)})
    with pytest.raises(EstimateError, match="micro-batch 1 and 2"):
        SizedTrace.of([one, other])


def test_an_update_is_repeated_before_itself() -> None:
    """What it keeps (block 2) and what it gives back of the build (block 1) happens once, the rest twice."""
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
    twice = once.warmed_up()
    assert twice.events == (0, 1, 2, 3, ~1, ~3, 4, ~4)
    assert twice.sizes == (10, 20, 30, 40, 40)
    assert twice.categories[4] is Category.TEMPORARIES
    assert [(mark.name, mark.position) for mark in twice.marks] == [
        ("build", 0),
        ("first-update", 2),
        ("measured-update", 6),
        ("end", 8),
    ]
