"""A simulation of torch's CUDA caching allocator: its blocks and segments after each request. No torch.

Follows torch 2.13: `c10/cuda/CUDACachingAllocator.cpp` (functions of its `DeviceCachingAllocator` are named below) and
`c10/core/AllocatorConfig.h` (the constants). Omitted are several streams, blocks held by events, and private pools of
CUDA graphs, because a training step on one stream has none of them, and `garbage_collection_threshold`, which torch
applies only with a memory fraction. Of free blocks of equal size, the one at the lowest address is taken here, so the
addresses of segments are in the order in which the simulated version of torch prefers them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

from typing_extensions import override

from batchwright.estimation.allocator.config import (
    DEFAULT_SETTINGS,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    rounded_up,
)

_Addresses: TypeAlias = "_AddressesByAge | _DriverAddresses"
_UNLIMITED = 1 << 100
"""More than any update needs: a million tensors of 2**64 bytes."""
_ADDRESS_BITS = 128
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_FIRST_ADDRESS = 1 << 50
_ADDRESS_SPACE = 1 << 110
"""Addresses of a pool; an expandable segment never reaches the end."""
_LARGE_ADDRESSES = _FIRST_ADDRESS + _ADDRESS_SPACE
"""Addresses of the pool of large blocks begin here."""
_DRIVER_RANGE_BYTES = 32 * 1024**2
"""The driver reserves addresses in ranges of multiples of this. Seen on an H100 with driver 580."""


class CachingAllocator:
    """One device's allocator on one stream.

    Args:
        capacity_bytes: memory of the device for segments; None for no limit.
        settings: the settings of the allocator.

    Attributes:
        allocated_bytes: bytes of allocated blocks (`torch.cuda.memory_allocated`).
        peak_reserved_bytes: peak of the bytes of segments since ``reset_peaks`` (`torch.cuda.max_memory_reserved`).
        retries: how often the whole cache was freed for lack of memory (`num_alloc_retries`).
        least_refused_bytes: the smallest capacity with which a request refused so far would have succeeded. With any
            smaller capacity, down to this allocator's, the blocks are the same.
    """

    def __init__(self, capacity_bytes: int | None = None, settings: AllocatorSettings = DEFAULT_SETTINGS) -> None:
        kind = _ExpandablePool if settings.expandable_segments else _Pool
        self._live: dict[int, int] = {}
        addresses = _AddressesByAge() if settings.oldest_first else _DriverAddresses()
        self._small = kind(settings, self._live, addresses, is_small=True)
        self._large = kind(settings, self._live, addresses, is_small=False)
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
        """Reset the peaks (`torch.cuda.reset_peak_memory_stats`)."""
        self.peak_reserved_bytes = self.reserved_bytes

    def block_bytes(self, address: int) -> int:
        """Return the bytes of an allocated block, which may exceed the request; 0 for address 0."""
        return self._live.get(address, 0)

    def malloc(self, requested: int) -> int | None:
        """Allocate a block and return its address (`malloc`); 0 for a request of 0 bytes, None if memory runs out."""
        if not requested:
            return 0
        size = self._rounded_size(requested)
        pool = self._small if size <= SMALL_BYTES else self._large
        address = pool.allocate(size)
        if not address:
            address = self._allocate_new(pool, size)
            if not address:
                return None
        self.allocated_bytes += self._live[address]
        return address

    def malloc_run(self, requested: int, count: int) -> list[int] | None:
        """Allocate equal blocks one after the other, as that many calls of ``malloc`` do, in far fewer steps.

        Neighbours of a run count as one block from then on. So the blocks of a run must be freed one after the other,
        with no request in between: the state after that is the same.

        Returns:
            The addresses to free; None if memory runs out, with the blocks before that request left allocated.
        """
        addresses: list[int] = []
        if not requested:
            return addresses
        size = self._rounded_size(requested)
        pool = self._small if size <= SMALL_BYTES else self._large
        while count:
            address, taken = pool.allocate_run(size, count)
            if not address:
                address, taken = self._allocate_new(pool, size), 1
                if not address:
                    return None
            self.allocated_bytes += self._live[address]
            addresses.append(address)
            count -= taken
        return addresses

    def free(self, address: int) -> None:
        """Return a block, or the neighbours of a run, to the cache (`free_block`); address 0 is ignored."""
        if address:
            size = self._live.pop(address)
            self.allocated_bytes -= size
            (self._small if address < _LARGE_ADDRESSES else self._large).free(address, size)

    def _rounded_size(self, requested: int) -> int:
        size = self._rounded.get(requested)
        if size is None:
            size = self._rounded[requested] = self._settings.rounded(requested)
        return size

    def _allocate_new(self, pool: _Pool, size: int) -> int:
        """Allocate a block in new memory, after freeing cached memory if necessary (the rest of `malloc`)."""
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
        other_bytes = self.reserved_bytes - pool.reserved_bytes
        address = pool.grow(size, self._capacity - other_bytes)
        if not address:
            self.least_refused_bytes = min(self.least_refused_bytes, other_bytes + pool.refused_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, other_bytes + pool.reserved_bytes)
        return address


class _AddressesByAge:
    """Addresses of segments in the order of their allocation."""

    def __init__(self) -> None:
        self._next = 0

    def place(self, nbytes: int) -> int:
        """Return where a segment lies."""
        self._next += nbytes
        return self._next - nbytes

    def give_back(self, start: int, nbytes: int) -> None:
        """Do nothing: addresses are not given again."""


class _DriverAddresses:
    """The order of the addresses that `cudaMalloc` gives to segments.

    A segment is put into the lowest gap above the lowest range that has room, else at the begin of a new range below
    all others. So it was on an H100 with driver 580, in 99.7 % of all pairs of segments.
    """

    def __init__(self) -> None:
        self._lowest = _ADDRESS_SPACE // 4
        self._gaps: list[tuple[int, int]] = []
        """Start and bytes of the gaps, by address."""

    def place(self, nbytes: int) -> int:
        """Return where a segment lies."""
        for index, (start, room) in enumerate(self._gaps):
            if room >= nbytes:
                self._gaps[index : index + 1] = [(start + nbytes, room - nbytes)] if room > nbytes else []
                return start
        room = rounded_up(nbytes, _DRIVER_RANGE_BYTES)
        self._lowest -= room
        if room > nbytes:
            self._gaps.insert(0, (self._lowest + nbytes, room - nbytes))
        return self._lowest

    def give_back(self, start: int, nbytes: int) -> None:
        """Make a gap of a segment, and join it with its neighbours."""
        index = bisect_left(self._gaps, (start, 0))
        if index < len(self._gaps) and self._gaps[index][0] == start + nbytes:
            nbytes += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == start:
            start, room = self._gaps.pop(index - 1)
            nbytes += room
        if start == self._lowest:
            self._lowest += nbytes - nbytes % _DRIVER_RANGE_BYTES
            start, nbytes = self._lowest, nbytes % _DRIVER_RANGE_BYTES
        if nbytes:
            insort(self._gaps, (start, nbytes))


class _Pool:
    """The cached blocks of a pool and their segments, one for each `cudaMalloc`.

    A free block is found by size (``_keys``: size and address in one number, sorted), by its start and by its end.
    Segments never touch, so neighbours are always in one segment, and a block as large as the segment at its address is
    not split.
    """

    def __init__(
        self, settings: AllocatorSettings, live: dict[int, int], addresses: _Addresses, *, is_small: bool
    ) -> None:
        self.reserved_bytes = 0
        self.refused_bytes = 0
        """The ``reserved_bytes`` that the last refused ``grow`` would have led to."""
        self._settings = settings
        self._live = live
        self._keys: list[int] = []
        self._size_at: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self._addresses = addresses
        self._base = _FIRST_ADDRESS if is_small else _LARGE_ADDRESSES
        self._max_split = settings.max_split_bytes or _UNLIMITED
        # `should_split`
        self._min_remainder = MIN_BLOCK_BYTES if is_small or settings.expandable_segments else SMALL_BYTES + 1
        self._max_split_in_pool = _UNLIMITED if is_small or settings.expandable_segments else self._max_split

    def allocate(self, size: int) -> int:
        """Allocate the best fitting cached block (`get_free_block`): the smallest, then the lowest; 0 if none fits."""
        address, found = self._take(size)
        return self._allocate_found(address, found, size) if address else 0

    def allocate_run(self, size: int, count: int) -> tuple[int, int]:
        """Allocate up to ``count`` neighbours in the best fitting cached block; their address (0 if none) and number.

        What remains of the best fitting block, if it is large enough, fits the next request best.
        """
        address, found = self._take(size)
        if not address:
            return 0, 0
        number = min(count, found // size) if size < self._max_split_in_pool else 1
        return self._allocate_found(address, found, number * size), number

    def _take(self, size: int) -> tuple[int, int]:
        """Remove the best fitting block from the cache, but for its end; its address (0 if none fits) and its size."""
        index = bisect_left(self._keys, size << _ADDRESS_BITS)
        if index == len(self._keys):
            return 0, 0
        index = self._preferred_index(index)
        key = self._keys[index]
        found = key >> _ADDRESS_BITS
        if found >= self._max_split and (
            size < self._max_split or found >= size + self._settings.max_non_split_rounding_bytes
        ):
            return 0, 0
        del self._keys[index]
        address = key & _ADDRESS_MASK
        del self._size_at[address]
        return address, found

    def free(self, address: int, size: int) -> None:
        """Free a block, and merge it with free neighbours (`free_block`, `try_merge_blocks`)."""
        start = self._start_by_end.pop(address, 0)
        if start:
            del self._keys[bisect_left(self._keys, (address - start) << _ADDRESS_BITS | start)]
            size += address - start
            address = start
        end = address + size
        next_size = self._size_at.pop(end, 0)
        if next_size:
            del self._keys[bisect_left(self._keys, next_size << _ADDRESS_BITS | end)]
            size += next_size
        self._add(address, size)

    def grow(self, size: int, limit_bytes: int) -> int:
        """Allocate a block in a new segment (`alloc_block`); 0 if the pool would exceed ``limit_bytes``."""
        segment = self._settings.segment_bytes(size)
        if self.reserved_bytes + segment > limit_bytes:
            self.refused_bytes = self.reserved_bytes + segment
            return 0
        address = self._base + 2 * self._addresses.place(segment)  # twice: segments never touch
        self._segments[address] = segment
        self.reserved_bytes += segment
        self._start_by_end[address + segment] = address
        return self._allocate_found(address, segment, size)

    def release(self) -> None:
        """Free every segment that is one free block (`release_blocks`)."""
        for address, size in list(self._segments.items()):
            if self._size_at.get(address) == size:
                self._release_segment(address)

    def release_oversize(self, size: int) -> bool:
        """With a splitting limit, free just enough blocks above it (`release_available_cached_blocks`)."""
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

    def _preferred_index(self, index: int) -> int:
        """Return the index of the block to use, given that of the smallest block that is large enough."""
        return index

    def _release_segment(self, address: int) -> None:
        self._remove(address)
        segment = self._segments.pop(address)
        self.reserved_bytes -= segment
        self._addresses.give_back((address - self._base) // 2, segment)

    def _allocate_found(self, address: int, found: int, size: int) -> int:
        """Allocate a block that is only listed by its end, and cache its remainder (`alloc_found_block`)."""
        remainder = found - size
        if remainder >= self._min_remainder and size < self._max_split_in_pool:
            start = address + size
            self._size_at[start] = remainder
            self._start_by_end[start + remainder] = start
            insort(self._keys, remainder << _ADDRESS_BITS | start)
        else:
            size = found
            del self._start_by_end[address + found]
        self._live[address] = size
        return address

    def _add(self, address: int, size: int) -> None:
        self._size_at[address] = size
        self._start_by_end[address + size] = address
        insort(self._keys, size << _ADDRESS_BITS | address)

    def _remove(self, address: int) -> int:
        size = self._size_at.pop(address)
        del self._start_by_end[address + size]
        del self._keys[bisect_left(self._keys, size << _ADDRESS_BITS | address)]
        return size


class _ExpandablePool(_Pool):
    """The cached blocks of a pool with one segment that grows by pages: `ExpandableSegment`.

    ``_holes`` are the unmapped address ranges, by start in increasing order; the last one is unlimited.
    """

    def __init__(
        self, settings: AllocatorSettings, live: dict[int, int], addresses: _Addresses, *, is_small: bool
    ) -> None:
        super().__init__(settings, live, addresses, is_small=is_small)
        self._page = SMALL_SEGMENT_BYTES if is_small else settings.large_segment_bytes
        self._holes = {self._base: _ADDRESS_SPACE // 2}

    @override
    def allocate_run(self, size: int, count: int) -> tuple[int, int]:
        """Allocate one block: what remains of one may have more space to grow than another."""
        address = self.allocate(size)
        return address, int(address > 0)

    @override
    def _preferred_index(self, index: int) -> int:
        """Return the index of the block that has the least space to grow (`get_free_block`)."""
        keys = self._keys
        while index + 1 < len(keys) and self._potential(keys[index + 1]) < self._potential(keys[index]):
            index += 1
        return index

    @override
    def grow(self, size: int, limit_bytes: int) -> int:
        """Allocate a block at the lowest sufficient address, mapping pages there (`try_allocate_expandable_block`).

        Pages that were mapped before a refused one stay mapped, as in torch.
        """
        address = self._lowest_address(size)
        while (free_bytes := self._size_at.get(address, 0)) < size:
            if not self._map(address + free_bytes, size - free_bytes, limit_bytes):
                return 0
        del self._size_at[address]
        del self._keys[bisect_left(self._keys, free_bytes << _ADDRESS_BITS | address)]
        return self._allocate_found(address, free_bytes, size)

    @override
    def release(self) -> None:
        """Unmap all pages that are entirely free (`unmap_block`)."""
        for address, size in list(self._size_at.items()):
            first = self._base + rounded_up(address - self._base, self._page)
            last = address + size - (address + size - self._base) % self._page
            if first < last:
                self._unmap(address, first, last)
        self._merge_holes()

    @override
    def release_oversize(self, size: int) -> bool:
        """Do nothing, as torch does for expandable segments."""
        return False

    def _potential(self, key: int) -> int:
        size = key >> _ADDRESS_BITS
        return size + self._holes.get((key & _ADDRESS_MASK) + size, 0)

    def _lowest_address(self, size: int) -> int:
        """Return the lowest address followed by ``size`` bytes of free blocks and holes (`find_expandable_block`)."""
        for hole in self._holes:
            start = end = self._start_by_end.get(hole, hole)
            while end - start < size and (length := self._size_at.get(end) or self._holes.get(end, 0)):
                end += length
            if end - start >= size:
                return start
        raise AssertionError("the last hole has no end")  # pragma: no cover

    def _map(self, hole: int, wanted: int, limit_bytes: int) -> bool:
        """Map as many pages of a hole as are needed, if the limit allows (`map_block`)."""
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
        self.free(hole, mapped)
        return True

    def _unmap(self, address: int, first: int, last: int) -> None:
        end = address + self._remove(address)
        if address < first:
            self._add(address, first - address)
        if last < end:
            self._add(last, end - last)
        self._holes[first] = last - first
        self.reserved_bytes -= last - first

    def _merge_holes(self) -> None:
        merged: dict[int, int] = {}
        last = -1
        for hole, length in sorted(self._holes.items()):
            if last >= 0 and last + merged[last] == hole:
                merged[last] += length
            else:
                merged[hole] = length
                last = hole
        self._holes = merged
