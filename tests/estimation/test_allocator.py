"""The simulated caching allocator: every rule by an example, and all of them together against a slow model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.slow_allocator import ENDLESS, Segment, SlowAllocator
from tuner.errors import EstimateError
from tuner.estimation.allocator.config import DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS, AllocatorSettings
from tuner.estimation.allocator.simulator import CachingAllocator

KIB = 1024
MIB = 1024**2
many = settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is slow


def taken(allocator: CachingAllocator, requested: int) -> int:
    """The address of a block that has to be there."""
    address = allocator.malloc(requested)
    assert address is not None
    return address


def test_a_request_is_rounded_up_to_512_bytes() -> None:
    """1 byte takes 512, 513 take 1024; nothing takes nothing."""
    allocator = CachingAllocator()
    taken(allocator, 1)
    assert allocator.allocated_bytes == 512
    taken(allocator, 513)
    assert allocator.allocated_bytes == 512 + 1024
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.allocated_bytes == 512 + 1024


def test_small_requests_share_a_segment_of_2_mib() -> None:
    """Two requests of 1 MiB are small and fill one segment; the next one begins another."""
    allocator = CachingAllocator()
    first, second = taken(allocator, MIB), taken(allocator, MIB)
    assert (second - first, allocator.reserved_bytes) == (MIB, 2 * MIB)
    taken(allocator, 1)
    assert allocator.reserved_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("requested", "reserved"),
    [
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_segment_depends_on_the_rounded_size(requested: int, reserved: int) -> None:
    """2 MiB up to 1 MiB, 20 MiB below 10 MiB, then the size in steps of 2 MiB."""
    allocator = CachingAllocator()
    taken(allocator, requested)
    assert allocator.reserved_bytes == reserved


def test_medium_requests_share_a_segment_of_20_mib() -> None:
    """Of 20 MiB the first 6 are taken, then the next 6; the third finds 8 MiB and leaves 2."""
    allocator = CachingAllocator()
    places = [taken(allocator, 6 * MIB) for _ in range(3)]
    assert [place - places[0] for place in places] == [0, 6 * MIB, 12 * MIB]
    assert allocator.reserved_bytes == 20 * MIB
    assert taken(allocator, 2 * MIB) - places[0] == 18 * MIB


@pytest.mark.parametrize(("rest", "kept"), [(MIB, 0), (MIB + 512, MIB + 512)])
def test_a_large_block_is_split_when_more_than_1_mib_remains(rest: int, kept: int) -> None:
    """A rest of 1 MiB stays with the block, which then counts as allocated; 512 bytes more are split off."""
    allocator = CachingAllocator()
    allocator.free(taken(allocator, 12 * MIB))
    taken(allocator, 12 * MIB - rest)
    assert allocator.reserved_bytes == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB - kept


def test_a_small_block_is_split_when_512_bytes_remain() -> None:
    """The rest of 512 bytes serves the next request."""
    allocator = CachingAllocator()
    address = taken(allocator, MIB - 512)
    taken(allocator, MIB)
    assert taken(allocator, 512) - address == 2 * MIB - 512
    assert allocator.reserved_bytes == 2 * MIB


@pytest.mark.parametrize("kind", [DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS])
def test_the_smallest_block_that_suffices_is_taken_and_of_equals_the_lowest(kind: AllocatorSettings) -> None:
    """Of free blocks of 4, 3, 3 and 2 MiB a request of 3 gets the lower one of 3."""
    allocator = CachingAllocator(None, kind)
    blocks = {}
    for name, size in (("4", 4), ("low", 3), ("2", 2), ("high", 3)):
        blocks[name] = taken(allocator, size * MIB)
        taken(allocator, 2 * MIB)
    for address in blocks.values():
        allocator.free(address)
    assert taken(allocator, 3 * MIB) == blocks["low"]


def test_a_freed_block_joins_both_neighbours() -> None:
    """Three blocks that were freed one by one, the middle one last, serve a request of their sum."""
    allocator = CachingAllocator()
    first, middle, last = (taken(allocator, 5 * MIB) for _ in range(3))
    for address in (first, last, middle):
        allocator.free(address)
    assert taken(allocator, 20 * MIB) == first
    assert allocator.reserved_bytes == 20 * MIB


def test_blocks_of_different_segments_never_join() -> None:
    """Two free segments of 12 MiB do not serve 24 MiB."""
    allocator = CachingAllocator()
    for address in [taken(allocator, 12 * MIB) for _ in range(2)]:
        allocator.free(address)
    taken(allocator, 24 * MIB)
    assert allocator.reserved_bytes == 48 * MIB


def test_before_memory_runs_out_unsplit_cached_segments_are_given_back() -> None:
    """12 MiB cached, of 20 MiB: a request of 14 gives them back, and the retry is counted."""
    allocator = CachingAllocator(20 * MIB)
    allocator.free(taken(allocator, 12 * MIB))
    taken(allocator, 14 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (14 * MIB, 1)
    assert allocator.peak_reserved_bytes == 14 * MIB


def test_fragmentation_runs_out_of_memory_although_enough_is_free() -> None:
    """Of 40 MiB, 9 are taken in each of two segments: 22 are free, but no 18 in a row, and both segments are in use."""
    allocator = CachingAllocator(40 * MIB)
    blocks = [taken(allocator, 9 * MIB) for _ in range(4)]
    keepers = [blocks[0], blocks[2]]
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    assert keepers[1] - keepers[0] >= 20 * MIB
    assert allocator.malloc(18 * MIB) is None
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.retries) == (18 * MIB, 40 * MIB, 1)


def test_expandable_segments_fit_where_fixed_ones_are_fragmented() -> None:
    """The same sizes lie in a row of 40 MiB, so that the two blocks in its middle, once freed, serve 18."""
    allocator = CachingAllocator(40 * MIB, EXPANDABLE_SEGMENTS)
    blocks = [taken(allocator, 9 * MIB) for _ in range(4)]
    assert [block - blocks[0] for block in blocks] == [0, 9 * MIB, 18 * MIB, 27 * MIB]
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    assert taken(allocator, 18 * MIB) == blocks[1]
    assert (allocator.reserved_bytes, allocator.retries) == (40 * MIB, 0)


def test_an_expandable_segment_grows_by_pages_at_its_end() -> None:
    """15 MiB map one page of 20; 15 more begin in it and map one further page."""
    allocator = CachingAllocator(None, EXPANDABLE_SEGMENTS)
    first = taken(allocator, 15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    assert taken(allocator, 15 * MIB) - first == 15 * MIB
    assert allocator.reserved_bytes == 40 * MIB
    taken(allocator, 1)
    assert allocator.reserved_bytes == 42 * MIB, "the small pool has pages of 2 MiB"


def test_expandable_segments_keep_no_rest_of_a_block() -> None:
    """Of 1 MiB too much the block gets nothing: it is split whatever its pool."""
    allocator = CachingAllocator(None, EXPANDABLE_SEGMENTS)
    taken(allocator, 19 * MIB)
    assert allocator.allocated_bytes == 19 * MIB


def test_pressed_expandable_segments_give_back_the_pages_that_are_free_as_a_whole() -> None:
    """Free are 5 to 50 MiB of 60: the page from 20 to 40 goes, and 10 MiB of the small pool's find room."""
    allocator = CachingAllocator(62 * MIB, EXPANDABLE_SEGMENTS)
    taken(allocator, 5 * MIB)
    middle = taken(allocator, 45 * MIB)
    taken(allocator, 10 * MIB)
    allocator.free(middle)
    for _ in range(4):
        taken(allocator, MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (44 * MIB, 1)


def test_a_hole_is_filled_before_the_end_is_extended() -> None:
    """After the middle page was given back, a request of 40 MiB maps it again: 15 free before it, 20, 10 behind."""
    allocator = CachingAllocator(62 * MIB, EXPANDABLE_SEGMENTS)
    first = taken(allocator, 5 * MIB)
    middle = taken(allocator, 45 * MIB)
    taken(allocator, 10 * MIB)
    allocator.free(middle)
    small = [taken(allocator, MIB) for _ in range(4)]
    for address in small:
        allocator.free(address)
    assert taken(allocator, 40 * MIB) == first + 5 * MIB
    assert (allocator.reserved_bytes, allocator.retries) == (60 * MIB, 2)


def test_of_a_hole_no_more_pages_are_mapped_than_needed_the_lowest_first() -> None:
    """In a hole of 20 to 80 MiB, 10 free before it: 15 MiB map one page, then 30 begin behind them and map another."""
    allocator = CachingAllocator(102 * MIB, EXPANDABLE_SEGMENTS)
    first = taken(allocator, 10 * MIB)
    middle = taken(allocator, 80 * MIB)
    taken(allocator, 10 * MIB)
    allocator.free(middle)
    for _ in range(4):
        taken(allocator, MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (44 * MIB, 1)
    assert taken(allocator, 15 * MIB) == first + 10 * MIB
    assert allocator.reserved_bytes == 64 * MIB
    assert taken(allocator, 30 * MIB) == first + 25 * MIB
    assert (allocator.reserved_bytes, allocator.retries) == (84 * MIB, 1)


def test_a_block_that_could_grow_is_spared_for_others() -> None:
    """Free are 3 MiB at the end, which could grow, and 4 MiB in between: a request of 2 gets the 4."""
    allocator = CachingAllocator(None, EXPANDABLE_SEGMENTS)
    between = taken(allocator, 4 * MIB)
    taken(allocator, 13 * MIB)
    allocator.free(between)
    assert taken(allocator, 2 * MIB) == between


def test_above_the_splitting_limit_blocks_are_not_split() -> None:
    """A free block of 60 MiB serves neither 30 MiB, below the limit of 40, nor 40, which would waste 20; but 41."""
    allocator = CachingAllocator(None, AllocatorSettings(max_split_bytes=40 * MIB))
    allocator.free(taken(allocator, 60 * MIB))
    taken(allocator, 30 * MIB)
    assert allocator.reserved_bytes == 90 * MIB
    taken(allocator, 40 * MIB)
    assert allocator.reserved_bytes == 130 * MIB
    taken(allocator, 41 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (130 * MIB, 130 * MIB)


def test_with_a_splitting_limit_just_enough_large_blocks_are_given_back_first() -> None:
    """Of cached 50, 60 and 12 MiB a request of 30 gives back the 50 alone, without a retry."""
    allocator = CachingAllocator(130 * MIB, AllocatorSettings(max_split_bytes=40 * MIB))
    for address in [taken(allocator, size * MIB) for size in (50, 60, 12)]:
        allocator.free(address)
    taken(allocator, 30 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == ((60 + 12 + 30) * MIB, 0)


def test_the_largest_blocks_are_given_back_until_they_suffice() -> None:
    """No single cached block has 100 MiB: 60 and 50 go, the largest first."""
    allocator = CachingAllocator(150 * MIB, AllocatorSettings(max_split_bytes=40 * MIB))
    for address in [taken(allocator, size * MIB) for size in (50, 60, 40)]:
        allocator.free(address)
    taken(allocator, 100 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (140 * MIB, 0)


@pytest.mark.parametrize(
    ("requested", "rounded"),
    [(1200, 1536), (5000, 5120), (3 * MIB + 1, 3 * MIB + MIB // 2), (4 * MIB, 4 * MIB), (7 * MIB + 1, 7 * MIB + MIB)],
)
def test_sizes_are_rounded_to_divisions_of_powers_of_two(requested: int, rounded: int) -> None:
    """With 4 divisions up to 2 KiB stay multiples of 512; from there the steps are a quarter of the power below."""
    assert AllocatorSettings.parse("roundup_power2_divisions:4").rounded(requested) == rounded


def test_peaks_begin_anew_at_what_is_reserved() -> None:
    """After 14 MiB of the small pool replaced 20, a reset forgets the 20."""
    allocator = CachingAllocator(20 * MIB)
    allocator.free(taken(allocator, 20 * MIB))
    for _ in range(14):
        taken(allocator, MIB)
    assert allocator.peak_reserved_bytes == 20 * MIB
    allocator.reset_peaks()
    assert allocator.peak_reserved_bytes == 14 * MIB


NO_DIVISIONS = (0,) * 16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", DEFAULT_SETTINGS),
        ("expandable_segments:True", EXPANDABLE_SEGMENTS),
        (" expandable_segments : False , unknown:[1:2,3:4], backend:native,", DEFAULT_SETTINGS),
        ("max_split_size_mb:20", AllocatorSettings(max_split_bytes=20 * MIB)),
        ("max_non_split_rounding_mb:21", AllocatorSettings(max_non_split_rounding_bytes=21 * MIB)),
        (
            "large_segment_size_mb:40",
            AllocatorSettings(large_segment_bytes=40 * MIB, max_non_split_rounding_bytes=40 * MIB),
        ),
        ("roundup_power2_divisions:4", AllocatorSettings(roundup_power2_divisions=(4,) * 16)),
        (
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:True",
            AllocatorSettings(True, roundup_power2_divisions=(1,) * 9 + (2, 4) + (8,) * 5),
        ),
        ("roundup_power2_divisions:[>:8]", AllocatorSettings(roundup_power2_divisions=(0,) + (8,) * 15)),
        ("roundup_power2_divisions:[1:2,4:4]", AllocatorSettings(roundup_power2_divisions=(2, 0, 4) + (0,) * 13)),
        ("roundup_power2_divisions:[4:4,1:2,>:16]", AllocatorSettings(roundup_power2_divisions=(2,) + (16,) * 15)),
        ("roundup_power2_divisions:[131072:4]", AllocatorSettings(roundup_power2_divisions=(4,) * 16)),
        ("roundup_power2_divisions:[4:0]", DEFAULT_SETTINGS),
    ],
)
def test_settings_are_read_as_torch_reads_them(text: str, expected: AllocatorSettings) -> None:
    """The values are those of torch 2.13's `AcceleratorAllocatorConfig` after `setAllocatorSettings` of the text."""
    assert AllocatorSettings.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "max_split_size_mb:",
        "max_split_size_mb",
        "max_split_size_mb:x",
        "max_split_size_mb:30,large_segment_size_mb:40",
        "max_non_split_rounding_mb:19",
        "large_segment_size_mb:10",
        "expandable_segments:true",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[3:4]",
        "backend:cudaMallocAsync",
    ],
)
def test_settings_that_cannot_be_followed_are_refused(text: str) -> None:
    """What torch refuses, and another allocator: the message names the value and the variable."""
    with pytest.raises(EstimateError, match="PYTORCH_ALLOC_CONF"):
        AllocatorSettings.parse(text)


def test_the_older_variable_comes_first() -> None:
    """As in torch 2.13, which reads the newer one only where the older is not set."""
    newer = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert AllocatorSettings.from_environment(newer) == EXPANDABLE_SEGMENTS
    assert AllocatorSettings.from_environment({**newer, "PYTORCH_CUDA_ALLOC_CONF": ""}) == DEFAULT_SETTINGS
    assert AllocatorSettings.from_environment({}) == DEFAULT_SETTINGS


SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, MIB),
    st.integers(1, 24).map(lambda it: it * 256 * KIB),
    st.integers(MIB + 1, 12 * MIB),
    st.integers(1, 45).map(lambda it: it * MIB),
)
ACTIONS = st.lists(st.one_of(SIZES, SIZES, st.integers(-40, -1)), min_size=1, max_size=80)
"""A size to take, or which of the taken blocks to give back."""
CAPACITIES = st.integers(1, 100).map(lambda it: it * 2 * MIB)


@many
@given(
    actions=ACTIONS,
    capacity=st.none() | CAPACITIES,
    expandable=st.booleans(),
    max_split=st.sampled_from([None, 20 * MIB, 30 * MIB]),
)
def test_it_does_what_a_slow_model_does(
    *, actions: list[int], capacity: int | None, expandable: bool, max_split: int | None
) -> None:
    """After every request and every block given back: the same blocks and bytes, retries and peaks, and refusals."""
    fast = CachingAllocator(capacity, AllocatorSettings(expandable_segments=expandable, max_split_bytes=max_split))
    slow = SlowAllocator(capacity or ENDLESS, expandable=expandable, max_split=max_split or ENDLESS)
    blocks: list[tuple[int, tuple[Segment, int]]] = []
    for action in actions:
        if action < 0 and blocks:
            address, (segment, start) = blocks.pop(action % len(blocks))
            fast.free(address)
            slow.free(segment, start)
        elif action > 0:
            got, expected = fast.malloc(action), slow.malloc(action)
            assert (got is None) == (expected is None)
            if got is None or expected is None:
                continue
            assert fast.block_bytes(got) == expected[0].taken[expected[1]]
            blocks.append((got, expected))
        assert fast.allocated_bytes == slow.allocated
        assert fast.reserved_bytes == slow.reserved
        assert (fast.retries, fast.peak_reserved_bytes) == (slow.retries, slow.peak_reserved)
    in_fast = sorted(address for address, _ in blocks)
    in_slow = sorted((not it.small, slow.segments.index(it), start, address) for address, (it, start) in blocks)
    assert [place[-1] for place in in_slow] == in_fast, "blocks lie in the same order"


@many
@given(actions=ACTIONS, capacity=CAPACITIES, expandable=st.booleans())
def test_it_stays_between_what_is_asked_for_and_what_there_is(
    *, actions: list[int], capacity: int, expandable: bool
) -> None:
    """Allocated is never below the live requests, reserved never below allocated nor above the capacity."""
    allocator = CachingAllocator(capacity, AllocatorSettings(expandable_segments=expandable))
    live: list[tuple[int, int]] = []
    for action in actions:
        if action < 0 and live:
            allocator.free(live.pop(action % len(live))[0])
        elif action >= 0 and (address := allocator.malloc(action)) is not None:
            live.append((address, action))
        requested = sum(size for _, size in live)
        assert requested <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes <= capacity


@many
@given(actions=ACTIONS, capacity=CAPACITIES, expandable=st.booleans())
def test_blocks_never_overlap(*, actions: list[int], capacity: int, expandable: bool) -> None:
    """Each taken block ends before the next begins."""
    allocator = CachingAllocator(capacity, AllocatorSettings(expandable_segments=expandable))
    live: list[int] = []
    for action in actions:
        if action < 0 and live:
            allocator.free(live.pop(action % len(live)))
        elif action > 0 and (address := allocator.malloc(action)) is not None:
            live.append(address)
        live.sort()
        ends = [address + allocator.block_bytes(address) for address in live]
        assert all(end <= address for end, address in zip(ends, live[1:], strict=False))
