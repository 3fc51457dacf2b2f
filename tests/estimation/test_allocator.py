"""The simulated caching allocator: an example of every rule, and a comparison with a slow model."""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from batchwright.errors import EstimateError
from batchwright.estimation.allocator.config import (
    DEFAULT_SETTINGS,
    EXPANDABLE_SEGMENTS,
    AllocatorSettings,
    takes_oldest_first,
)
from batchwright.estimation.allocator.simulator import CachingAllocator
from tests.support.slow_allocator import ENDLESS, Segment, SlowAllocator

KIB = 1024
MIB = 1024**2
many = settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is slow


def taken(allocator: CachingAllocator, requested: int) -> int:
    """Allocate a block that must fit, and return its address."""
    address = allocator.malloc(requested)
    assert address is not None
    return address


def test_a_request_is_rounded_up_to_512_bytes() -> None:
    """A request of 1 byte takes 512, one of 513 takes 1024, and one of 0 takes 0."""
    allocator = CachingAllocator()
    taken(allocator, 1)
    assert allocator.allocated_bytes == 512
    taken(allocator, 513)
    assert allocator.allocated_bytes == 512 + 1024
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.allocated_bytes == 512 + 1024


def test_small_requests_share_a_segment_of_2_mib() -> None:
    """Two requests of 1 MiB are small and fill one segment; the next request starts another."""
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
    """Segments have 2 MiB up to 1 MiB, 20 MiB below 10 MiB, and then the size in steps of 2 MiB."""
    allocator = CachingAllocator()
    taken(allocator, requested)
    assert allocator.reserved_bytes == reserved


def test_medium_requests_share_a_segment_of_20_mib() -> None:
    """Three requests of 6 MiB share a segment of 20 MiB and leave 2."""
    allocator = CachingAllocator()
    places = [taken(allocator, 6 * MIB) for _ in range(3)]
    assert [place - places[0] for place in places] == [0, 6 * MIB, 12 * MIB]
    assert allocator.reserved_bytes == 20 * MIB
    assert taken(allocator, 2 * MIB) - places[0] == 18 * MIB


@pytest.mark.parametrize(("rest", "kept"), [(MIB, 0), (MIB + 512, MIB + 512)])
def test_a_large_block_is_split_when_more_than_1_mib_remains(rest: int, kept: int) -> None:
    """A remainder of 1 MiB stays in the block and counts as allocated; 512 bytes more are split off."""
    allocator = CachingAllocator()
    allocator.free(taken(allocator, 12 * MIB))
    taken(allocator, 12 * MIB - rest)
    assert allocator.reserved_bytes == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB - kept


def test_a_small_block_is_split_when_512_bytes_remain() -> None:
    """The remainder of 512 bytes serves the next request."""
    allocator = CachingAllocator()
    address = taken(allocator, MIB - 512)
    taken(allocator, MIB)
    assert taken(allocator, 512) - address == 2 * MIB - 512
    assert allocator.reserved_bytes == 2 * MIB


@pytest.mark.parametrize("kind", [DEFAULT_SETTINGS, EXPANDABLE_SEGMENTS])
def test_the_smallest_sufficient_block_is_used_and_of_equals_the_lowest(kind: AllocatorSettings) -> None:
    """Of free blocks of 4, 3, 3 and 2 MiB, a request of 3 gets the lower block of 3."""
    allocator = CachingAllocator(None, kind)
    blocks = {}
    for name, size in (("4", 4), ("low", 3), ("2", 2), ("high", 3)):
        blocks[name] = taken(allocator, size * MIB)
        taken(allocator, 2 * MIB)
    for address in blocks.values():
        allocator.free(address)
    assert taken(allocator, 3 * MIB) == blocks["low"]


def test_a_freed_block_merges_with_both_neighbours() -> None:
    """Three blocks that are freed one by one, the middle one last, serve a request of their sum."""
    allocator = CachingAllocator()
    first, middle, last = (taken(allocator, 5 * MIB) for _ in range(3))
    for address in (first, last, middle):
        allocator.free(address)
    assert taken(allocator, 20 * MIB) == first
    assert allocator.reserved_bytes == 20 * MIB


def test_blocks_of_different_segments_never_merge() -> None:
    """Two free segments of 12 MiB do not serve 24 MiB."""
    allocator = CachingAllocator()
    for address in [taken(allocator, 12 * MIB) for _ in range(2)]:
        allocator.free(address)
    taken(allocator, 24 * MIB)
    assert allocator.reserved_bytes == 48 * MIB


def test_before_memory_runs_out_unsplit_cached_segments_are_freed() -> None:
    """With 12 of 20 MiB cached, a request of 14 frees them, and the retry is counted."""
    allocator = CachingAllocator(20 * MIB)
    allocator.free(taken(allocator, 12 * MIB))
    taken(allocator, 14 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (14 * MIB, 1)
    assert allocator.peak_reserved_bytes == 14 * MIB


def test_fragmentation_runs_out_of_memory_although_enough_is_free() -> None:
    """With 9 MiB used in each of two segments of 40 MiB, 22 are free, but no contiguous 18, and no unused segment."""
    allocator = CachingAllocator(40 * MIB)
    blocks = [taken(allocator, 9 * MIB) for _ in range(4)]
    keepers = [blocks[0], blocks[2]]
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    assert keepers[1] - keepers[0] >= 20 * MIB, "in two segments"
    assert allocator.malloc(18 * MIB) is None
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.retries) == (18 * MIB, 40 * MIB, 1)


def test_of_equal_blocks_that_of_the_oldest_segment_is_taken() -> None:
    """So in torch 2.13. Up to 2.11 the lowest address is taken, and a driver gives new segments lower addresses."""
    for oldest_first in (True, False):
        allocator = CachingAllocator(None, AllocatorSettings(oldest_first=oldest_first))
        older, newer = (taken(allocator, 20 * MIB) for _ in range(2))
        for block in (newer, older):
            allocator.free(block)
        assert taken(allocator, 20 * MIB) == (older if oldest_first else newer)


@pytest.mark.parametrize(
    ("version", "oldest"),
    [("2.8.0", False), ("2.11.0+cu130", False), ("2.12.1", True), ("2.13.0+cpu", True), ("3.0", True)],
)
def test_the_version_of_torch_decides_between_equal_blocks(version: str, *, oldest: bool) -> None:
    """The order of blocks changed in torch 2.12."""
    assert takes_oldest_first(version) == oldest


def test_segments_fill_a_range_of_addresses_upwards() -> None:
    """Two segments of 12 MiB in a range of 32; one of 20 has no room there, and leaves some for one of 2."""
    allocator = CachingAllocator(None, AllocatorSettings(oldest_first=False))
    first, second, wide = (taken(allocator, size * MIB) for size in (12, 12, 20))
    assert wide < first < second
    for block in (first, second):
        allocator.free(block)
    assert taken(allocator, 12 * MIB) == first


def test_expandable_segments_fit_where_fixed_ones_are_fragmented() -> None:
    """The same sizes are contiguous in 40 MiB, so that the two blocks in the middle, once freed, serve 18."""
    allocator = CachingAllocator(40 * MIB, EXPANDABLE_SEGMENTS)
    blocks = [taken(allocator, 9 * MIB) for _ in range(4)]
    assert [block - blocks[0] for block in blocks] == [0, 9 * MIB, 18 * MIB, 27 * MIB]
    allocator.free(blocks[1])
    allocator.free(blocks[2])
    assert taken(allocator, 18 * MIB) == blocks[1]
    assert (allocator.reserved_bytes, allocator.retries) == (40 * MIB, 0)


def test_an_expandable_segment_grows_by_pages_at_its_end() -> None:
    """A request of 15 MiB maps one page of 20; 15 more start in it and map one further page."""
    allocator = CachingAllocator(None, EXPANDABLE_SEGMENTS)
    first = taken(allocator, 15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    assert taken(allocator, 15 * MIB) - first == 15 * MIB
    assert allocator.reserved_bytes == 40 * MIB
    taken(allocator, 1)
    assert allocator.reserved_bytes == 42 * MIB, "the small pool has pages of 2 MiB"


def test_expandable_segments_split_every_remainder() -> None:
    """A remainder of 1 MiB is split off, in either pool."""
    allocator = CachingAllocator(None, EXPANDABLE_SEGMENTS)
    taken(allocator, 19 * MIB)
    assert allocator.allocated_bytes == 19 * MIB


def test_expandable_segments_without_memory_unmap_entirely_free_pages() -> None:
    """With 5 to 50 MiB of 60 free, the page from 20 to 40 is unmapped, and 10 MiB of the small pool fit."""
    allocator = CachingAllocator(62 * MIB, EXPANDABLE_SEGMENTS)
    taken(allocator, 5 * MIB)
    middle = taken(allocator, 45 * MIB)
    taken(allocator, 10 * MIB)
    allocator.free(middle)
    for _ in range(4):
        taken(allocator, MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (44 * MIB, 1)


def test_a_hole_is_filled_before_the_end_is_extended() -> None:
    """After the middle page was unmapped, a request of 40 MiB maps it again: 15 free before it, 20, and 10 after it."""
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


def test_only_the_needed_pages_of_a_hole_are_mapped_the_lowest_first() -> None:
    """In a hole from 20 to 80 MiB with 10 free before it, 15 MiB map one page; 30 more follow and map another."""
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


def test_a_block_that_could_grow_is_used_last() -> None:
    """With 3 MiB free at the end, which could grow, and 4 MiB in between, a request of 2 gets the 4."""
    allocator = CachingAllocator(None, EXPANDABLE_SEGMENTS)
    between = taken(allocator, 4 * MIB)
    taken(allocator, 13 * MIB)
    allocator.free(between)
    assert taken(allocator, 2 * MIB) == between


def test_above_the_splitting_limit_blocks_are_not_split() -> None:
    """A free block of 60 MiB serves neither 30 MiB (below the limit of 40) nor 40 (a waste of 20), but 41."""
    allocator = CachingAllocator(None, AllocatorSettings(max_split_bytes=40 * MIB))
    allocator.free(taken(allocator, 60 * MIB))
    taken(allocator, 30 * MIB)
    assert allocator.reserved_bytes == 90 * MIB
    taken(allocator, 40 * MIB)
    assert allocator.reserved_bytes == 130 * MIB
    taken(allocator, 41 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (130 * MIB, 130 * MIB)


def test_with_a_splitting_limit_just_enough_large_blocks_are_freed_first() -> None:
    """Of cached 50, 60 and 12 MiB, a request of 30 frees only the 50, without a retry."""
    allocator = CachingAllocator(130 * MIB, AllocatorSettings(max_split_bytes=40 * MIB))
    for address in [taken(allocator, size * MIB) for size in (50, 60, 12)]:
        allocator.free(address)
    taken(allocator, 30 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == ((60 + 12 + 30) * MIB, 0)


def test_the_largest_blocks_are_freed_until_they_suffice() -> None:
    """No single cached block has 100 MiB, so 60 and 50 are freed, the largest first."""
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
    """With 4 divisions, sizes up to 2 KiB are multiples of 512; above, the steps are a quarter of the power below."""
    assert AllocatorSettings.parse("roundup_power2_divisions:4").rounded(requested) == rounded


def test_reset_peaks_start_at_the_reserved_bytes() -> None:
    """After 14 MiB of the small pool have replaced 20, a reset discards the peak of 20."""
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
def test_settings_are_parsed_as_in_torch(text: str, expected: AllocatorSettings) -> None:
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
def test_settings_that_cannot_be_simulated_are_refused(text: str) -> None:
    """Settings that torch refuses, and other backends, raise an error with the value and the variable."""
    with pytest.raises(EstimateError, match="PYTORCH_ALLOC_CONF"):
        AllocatorSettings.parse(text)


def test_the_older_variable_takes_precedence() -> None:
    """As in torch 2.13, the newer variable is read only if the older is not set."""
    newer = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert AllocatorSettings.from_environment(newer) == EXPANDABLE_SEGMENTS
    assert AllocatorSettings.from_environment({**newer, "PYTORCH_CUDA_ALLOC_CONF": ""}) == DEFAULT_SETTINGS
    assert AllocatorSettings.from_environment({}) == DEFAULT_SETTINGS


SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, MIB),
    st.integers(1, 24).map(lambda size: size * 256 * KIB),
    st.integers(MIB + 1, 12 * MIB),
    st.integers(1, 45).map(lambda size: size * MIB),
)
ACTIONS = st.lists(st.one_of(SIZES, SIZES, st.integers(-40, -1)), min_size=1, max_size=80)
"""A size to allocate, or the index of an allocated block to free."""
CAPACITIES = st.integers(1, 100).map(lambda size: size * 2 * MIB)


@many
@given(
    actions=ACTIONS,
    capacity=st.none() | CAPACITIES,
    expandable=st.booleans(),
    max_split=st.sampled_from([None, 20 * MIB, 30 * MIB]),
    oldest_first=st.booleans(),
)
def test_the_simulator_equals_a_slow_model(
    *, actions: list[int], capacity: int | None, expandable: bool, max_split: int | None, oldest_first: bool
) -> None:
    """After every request and every free, blocks, bytes, retries, peaks and refusals are equal."""
    kind = AllocatorSettings(expandable_segments=expandable, max_split_bytes=max_split, oldest_first=oldest_first)
    fast = CachingAllocator(capacity, kind)
    slow = SlowAllocator(
        capacity or ENDLESS, expandable=expandable, max_split=max_split or ENDLESS, oldest_first=oldest_first
    )
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
    in_slow = sorted(
        (not segment.small, slow.segments.index(segment), start, address) for address, (segment, start) in blocks
    )
    assert [place[-1] for place in in_slow] == in_fast, "blocks lie in the same order"


@many
@given(actions=ACTIONS, capacity=CAPACITIES, expandable=st.booleans())
def test_allocated_and_reserved_bytes_are_within_their_bounds(
    *, actions: list[int], capacity: int, expandable: bool
) -> None:
    """Allocated is at least the live requests; reserved is at least allocated, and at most the capacity."""
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
    """Each allocated block ends before the next one starts."""
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
