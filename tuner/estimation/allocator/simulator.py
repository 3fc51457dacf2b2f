"""torch's CUDA caching allocator, simulated: which blocks and segments a sequence of requests leads to. No torch.

Follows torch 2.13: `c10/cuda/CUDACachingAllocator.cpp` (functions of its `DeviceCachingAllocator` are named below) and
`c10/core/AllocatorConfig.h` (the constants). Left out, since a training step on one stream has none of it: several
streams, blocks held by events, private pools of CUDA graphs. `garbage_collection_threshold` acts in torch only below a
memory fraction, so it is left out too. Addresses rise with every segment here; the driver gives them as it likes, which
matters only where two free blocks are exactly equally large.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from typing_extensions import override

from tuner.estimation.allocator.config import (
    DEFAULT_SETTINGS,
    MIN_BLOCK_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    rounded_up,
)

_UNLIMITED = 1 << 100
"""More than any update takes: tensors of 2**64 bytes, by the million."""
_ADDRESS_BITS = 128
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_FIRST_ADDRESS = 1 << 50
_ADDRESS_SPACE = 1 << 110
"""Of a pool; an expandable segment never comes to its end."""


class CachingAllocator:
    """One device's allocator on one stream.

    Args:
        capacity_bytes: what the device can give to segments; None for as much as is asked for.
        settings: as the process would have them.

    Attributes:
        allocated_bytes: of blocks now taken (`torch.cuda.memory_allocated`).
        peak_reserved_bytes: most bytes of segments since ``reset_peaks`` (`torch.cuda.max_memory_reserved`).
        retries: how often everything cached was given back for want of memory (`num_alloc_retries`).
        least_refused_bytes: the smallest capacity with which anything refused so far would not have been; every
            capacity from this one's up to it leads to the same blocks.
    """

    def __init__(self, capacity_bytes: int | None = None, settings: AllocatorSettings = DEFAULT_SETTINGS) -> None:
        kind = _ExpandablePool if settings.expandable_segments else _Pool
        self._live: dict[int, int] = {}
        self._small = kind(settings, self._live, is_small=True)
        self._large = kind(settings, self._live, is_small=False)
        self._capacity = _UNLIMITED if capacity_bytes is None else capacity_bytes
        self._settings = settings
        self._rounded: dict[int, int] = {}
        self.allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        self.least_refused_bytes = _UNLIMITED

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments (`torch.cuda.memory_reserved`)."""
        return self._small.reserved_bytes + self._large.reserved_bytes

    def reset_peaks(self) -> None:
        """Forget earlier peaks (`torch.cuda.reset_peak_memory_stats`)."""
        self.peak_reserved_bytes = self.reserved_bytes

    def block_bytes(self, address: int) -> int:
        """Bytes of a taken block, which may be more than were asked for; 0 for address 0."""
        return self._live.get(address, 0)

    def malloc(self, requested: int) -> int | None:
        """The address of a block (`malloc`); 0 for a request of nothing, None when there is not enough memory."""
        if not requested:
            return 0
        size = self._rounded.get(requested)
        if size is None:
            size = self._rounded[requested] = self._settings.rounded(requested)
        pool = self._small if size <= SMALL_BYTES else self._large
        address = pool.take(size)
        if not address:
            address = self._take_new(pool, size)
            if not address:
                return None
        self.allocated_bytes += self._live[address]
        return address

    def free(self, address: int) -> None:
        """Give a block back to the cache (`free_block`); address 0 is no block."""
        if address:
            size = self._live.pop(address)
            self.allocated_bytes -= size
            (self._small if size <= SMALL_BYTES else self._large).give(address, size)

    def _take_new(self, pool: _Pool, size: int) -> int:
        """A block of new memory, giving cached memory back if need be (the rest of `malloc`)."""
        address = self._grow(pool, size)
        if not address and pool.release_oversize(size):
            address = self._grow(pool, size)
        if not address:
            self.retries += 1
            self._large.release()
            self._small.release()
            address = self._grow(pool, size)
        return address

    def _grow(self, pool: _Pool, size: int) -> int:
        others = self.reserved_bytes - pool.reserved_bytes
        address = pool.grow(size, self._capacity - others)
        if not address:
            self.least_refused_bytes = min(self.least_refused_bytes, others + pool.refused_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, others + pool.reserved_bytes)
        return address


class _Pool:
    """The cached blocks of a pool and the segments they lie in: one for each `cudaMalloc`.

    A free block is found by size (``_keys``: size and address in one number, sorted), by its first byte and by the byte
    behind its last. Segments never touch, so neighbours are always of one segment, and a block that is as large as the
    segment at its address is not split.
    """

    def __init__(self, settings: AllocatorSettings, live: dict[int, int], *, is_small: bool) -> None:
        self.reserved_bytes = 0
        self.refused_bytes = 0
        """What ``reserved_bytes`` would have become where ``grow`` last refused."""
        self._settings = settings
        self._live = live
        self._keys: list[int] = []
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self._next_address = _FIRST_ADDRESS + (0 if is_small else _ADDRESS_SPACE)
        self._max_split = settings.max_split_bytes or _UNLIMITED
        # `should_split`
        self._least_rest = MIN_BLOCK_BYTES if is_small or settings.expandable_segments else SMALL_BYTES + 1
        self._max_split_here = _UNLIMITED if is_small or settings.expandable_segments else self._max_split

    def take(self, size: int) -> int:
        """The address of the cached block that fits best, or 0 (`get_free_block`): smallest, then lowest."""
        index = bisect_left(self._keys, size << _ADDRESS_BITS)
        if index == len(self._keys):
            return 0
        index = self._preferred(index)
        key = self._keys[index]
        found = key >> _ADDRESS_BITS
        if found >= self._max_split and (
            size < self._max_split or found >= size + self._settings.max_non_split_rounding_bytes
        ):
            return 0
        del self._keys[index]
        address = key & _ADDRESS_MASK
        del self._size_at[address]
        return self._hand_out(address, found, size)

    def give(self, address: int, size: int) -> None:
        """A block becomes free and one with free neighbours (`free_block`, `try_merge_blocks`)."""
        start = self._start_of.pop(address, 0)
        if start:
            del self._keys[bisect_left(self._keys, (address - start) << _ADDRESS_BITS | start)]
            size += address - start
            address = start
        end = address + size
        behind = self._size_at.pop(end, 0)
        if behind:
            del self._keys[bisect_left(self._keys, behind << _ADDRESS_BITS | end)]
            size += behind
        self._add(address, size)

    def grow(self, size: int, limit_bytes: int) -> int:
        """The address of a block in a new segment, or 0 when the pool would exceed ``limit_bytes`` (`alloc_block`)."""
        segment = self._settings.segment_bytes(size)
        if self.reserved_bytes + segment > limit_bytes:
            self.refused_bytes = self.reserved_bytes + segment
            return 0
        address = self._next_address
        self._next_address += segment + ROUND_LARGE_BYTES
        self._segments[address] = segment
        self.reserved_bytes += segment
        self._start_of[address + segment] = address
        return self._hand_out(address, segment, size)

    def release(self) -> None:
        """Give back every segment that is one free block (`release_blocks`)."""
        for address, size in list(self._segments.items()):
            if self._size_at.get(address) == size:
                self._release_segment(address)

    def release_oversize(self, size: int) -> bool:
        """With a splitting limit, give back just enough blocks above it (`release_available_cached_blocks`)."""
        if self._max_split == _UNLIMITED:
            return False
        wanted = max(size, self._max_split)
        index = bisect_left(self._keys, wanted << _ADDRESS_BITS)
        if index < len(self._keys):
            self._release_segment(self._keys[index] & _ADDRESS_MASK)
            return True
        released = 0
        while self._keys and released < wanted and self._keys[-1] >> _ADDRESS_BITS >= self._max_split:
            released += self._keys[-1] >> _ADDRESS_BITS
            self._release_segment(self._keys[-1] & _ADDRESS_MASK)
        return released >= wanted

    def _preferred(self, index: int) -> int:
        """Which of the blocks that are large enough, the smallest being at ``index``, is taken: that one."""
        return index

    def _release_segment(self, address: int) -> None:
        self._remove(address)
        self.reserved_bytes -= self._segments.pop(address)

    def _hand_out(self, address: int, found: int, size: int) -> int:
        """Take a block that is in no list but by its end; what it has too much stays (`alloc_found_block`)."""
        rest = found - size
        if rest >= self._least_rest and size < self._max_split_here:
            start = address + size
            self._size_at[start] = rest
            self._start_of[start + rest] = start
            insort(self._keys, rest << _ADDRESS_BITS | start)
        else:
            size = found
            del self._start_of[address + found]
        self._live[address] = size
        return address

    def _add(self, address: int, size: int) -> None:
        self._size_at[address] = size
        self._start_of[address + size] = address
        insort(self._keys, size << _ADDRESS_BITS | address)

    def _remove(self, address: int) -> int:
        size = self._size_at.pop(address)
        del self._start_of[address + size]
        del self._keys[bisect_left(self._keys, size << _ADDRESS_BITS | address)]
        return size


class _ExpandablePool(_Pool):
    """The cached blocks of a pool with one segment that grows by pages: `ExpandableSegment`.

    ``_holes`` are the stretches of its addresses without memory, by first byte in rising order; the last has no end.
    """

    def __init__(self, settings: AllocatorSettings, live: dict[int, int], *, is_small: bool) -> None:
        super().__init__(settings, live, is_small=is_small)
        self._page = SMALL_SEGMENT_BYTES if is_small else settings.large_segment_bytes
        self._base = self._next_address
        self._holes = {self._base: _ADDRESS_SPACE // 2}

    @override
    def _preferred(self, index: int) -> int:
        """Of blocks that could grow, the one that could become least large (`get_free_block`)."""
        keys = self._keys
        while index + 1 < len(keys) and self._potential(keys[index + 1]) < self._potential(keys[index]):
            index += 1
        return index

    @override
    def grow(self, size: int, limit_bytes: int) -> int:
        """The address of a block at the lowest place with room, mapping pages there (`try_allocate_expandable_block`).

        Pages that were mapped before one was refused stay, as in torch.
        """
        address = self._lowest_place(size)
        while (there := self._size_at.get(address, 0)) < size:
            if not self._map(address + there, size - there, limit_bytes):
                return 0
        del self._size_at[address]
        del self._keys[bisect_left(self._keys, there << _ADDRESS_BITS | address)]
        return self._hand_out(address, there, size)

    @override
    def release(self) -> None:
        """Give back all pages that lie in free blocks as a whole (`unmap_block`)."""
        for address, size in list(self._size_at.items()):
            first = self._base + rounded_up(address - self._base, self._page)
            last = address + size - (address + size - self._base) % self._page
            if first < last:
                self._unmap(address, first, last)
        self._join_holes()

    @override
    def release_oversize(self, size: int) -> bool:
        """Nothing: torch leaves expandable segments out here."""
        return False

    def _potential(self, key: int) -> int:
        size = key >> _ADDRESS_BITS
        return size + self._holes.get((key & _ADDRESS_MASK) + size, 0)

    def _lowest_place(self, size: int) -> int:
        """The lowest address from which free blocks and holes give ``size`` bytes (`find_expandable_block`)."""
        for hole in self._holes:
            start = end = self._start_of.get(hole, hole)
            while end - start < size and (length := self._size_at.get(end) or self._holes.get(end, 0)):
                end += length
            if end - start >= size:
                return start
        raise AssertionError("the last hole has no end")  # pragma: no cover

    def _map(self, hole: int, wanted: int, limit_bytes: int) -> bool:
        """Put memory behind as much of a hole as is wanted, in whole pages, if the limit allows it (`map_block`)."""
        length = self._holes[hole]
        mapped = rounded_up(min(wanted, length), self._page)
        if self.reserved_bytes + mapped > limit_bytes:
            self.refused_bytes = self.reserved_bytes + mapped
            return False
        del self._holes[hole]
        if mapped < length:
            self._holes[hole + mapped] = length - mapped
            self._holes = dict(sorted(self._holes.items()))
        self.reserved_bytes += mapped
        self.give(hole, mapped)
        return True

    def _unmap(self, address: int, first: int, last: int) -> None:
        end = address + self._remove(address)
        if address < first:
            self._add(address, first - address)
        if last < end:
            self._add(last, end - last)
        self._holes[first] = last - first
        self.reserved_bytes -= last - first

    def _join_holes(self) -> None:
        joined: dict[int, int] = {}
        last = -1
        for hole, length in sorted(self._holes.items()):
            if last >= 0 and last + joined[last] == hole:
                joined[last] += length
            else:
                joined[hole] = length
                last = hole
        self._holes = joined
