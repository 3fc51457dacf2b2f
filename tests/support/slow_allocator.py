"""The caching allocator as its rules say: no index, it looks at everything each time. For tests to compare with."""

from dataclasses import dataclass, field
from typing import Literal

MIB = 1024**2
ENDLESS = 10**18


@dataclass
class Stretch:
    """Part of a segment, of one kind throughout."""

    start: int
    length: int
    kind: Literal["taken", "free", "hole"]


@dataclass(eq=False)
class Segment:
    """A segment as a ruler: which parts are taken, and which pages have memory; nothing else is kept."""

    small: bool
    pages: list[bool]
    page: int
    grows: bool
    place: int = 0
    taken: dict[int, int] = field(default_factory=dict)

    def stretches(self) -> list[Stretch]:
        """The ruler read from the left; neighbours of a kind are one, but for taken ones."""
        found: list[Stretch] = []
        position = 0
        while position < len(self.pages) * self.page:
            if position in self.taken:
                found.append(Stretch(position, self.taken[position], "taken"))
            else:
                kind: Literal["free", "hole"] = "free" if self.pages[position // self.page] else "hole"
                stop = min([(position // self.page + 1) * self.page, *(at for at in self.taken if at > position)])
                if found and found[-1].kind == kind:
                    found[-1].length += stop - position
                    position = stop
                    continue
                found.append(Stretch(position, stop - position, kind))
            position += found[-1].length
        if self.grows and found and found[-1].kind == "hole":
            found[-1].length += ENDLESS
        elif self.grows:
            found.append(Stretch(position, ENDLESS, "hole"))
        return found

    @property
    def reserved(self) -> int:
        """Bytes of memory in it."""
        return sum(self.pages) * self.page


class SlowAllocator:
    """The allocator as its rules say, by looking at everything each time."""

    def __init__(self, capacity: int, *, expandable: bool, max_split: int, oldest_first: bool) -> None:
        self.capacity = capacity
        self.oldest_first = oldest_first
        self.expandable = expandable
        self.max_split = max_split
        self.segments: list[Segment] = []
        self.retries = 0
        self.peak_reserved = 0
        if expandable:
            self.segments = [Segment(True, [], 2 * MIB, True), Segment(False, [], 20 * MIB, True)]

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(segment.reserved for segment in self.segments)

    @property
    def allocated(self) -> int:
        """Bytes of all taken blocks."""
        return sum(sum(segment.taken.values()) for segment in self.segments)

    def malloc(self, requested: int) -> tuple[Segment, int] | None:
        """A block, or None when memory ran out."""
        size = max(512, (requested + 511) // 512 * 512)
        found = self.cached(size) or self.new(size)
        if not found and self.give_back_oversize(size):
            found = self.new(size)
        if not found:
            self.retries += 1
            self.give_back()
            found = self.new(size)
        return found and self.take(*found, size)

    def free(self, segment: Segment, start: int) -> None:
        """Give a block back."""
        del segment.taken[start]

    def pool(self, size: int) -> list[Segment]:
        """The segments for blocks of a size, by age or by address."""
        return [segment for segment in self.segments if segment.small == (size <= MIB)]

    def cached(self, size: int) -> tuple[Segment, Stretch] | None:
        """The free block that fits best."""
        fitting = [
            (stretch.length, number, stretch.start, stretch, stretches[index + 1 : index + 2])
            for number, segment in enumerate(self.pool(size))
            for stretches in [segment.stretches()]
            for index, stretch in enumerate(stretches)
            if stretch.kind == "free" and stretch.length >= size
        ]
        fitting.sort(key=lambda it: it[:3])
        potential = [
            length + sum(it.length for it in behind if it.kind == "hole") for length, _, _, _, behind in fitting
        ]
        best = 0
        while best + 1 < len(fitting) and potential[best + 1] < potential[best]:
            best += 1
        if not fitting:
            return None
        length, number, _, stretch, _ = fitting[best]
        if length >= self.max_split and (size < self.max_split or length >= size + 20 * MIB):
            return None
        return self.pool(size)[number], stretch

    def new(self, size: int) -> tuple[Segment, Stretch] | None:
        """A free block of new memory."""
        found = self.extended(size) if self.expandable else self.another(size)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return found

    def another(self, size: int) -> tuple[Segment, Stretch] | None:
        """A whole new segment."""
        length = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // MIB // 2 * 2 * MIB
        if self.reserved + length > self.capacity:
            return None
        segment = Segment(size <= MIB, [True], length, grows=False, place=self.place(length))
        if self.oldest_first:
            self.segments.append(segment)
            return segment, segment.stretches()[0]
        self.segments = sorted([*self.segments, segment], key=lambda it: it.place)
        return segment, segment.stretches()[0]

    def place(self, length: int) -> int:
        """Where the driver puts a segment: in the lowest gap with room, or in a new range of 32 MiB or more below."""
        lowest = min((it.place for it in self.segments), default=0) // (32 * MIB) * 32 * MIB
        begins = [it.place for it in self.segments] + [0]
        for start in [lowest, *(it.place + it.reserved for it in self.segments)]:
            if min(at for at in [*begins, ENDLESS] if at >= start) - start >= length and start < 0:
                return start
        return lowest - -(-length // (32 * MIB)) * 32 * MIB

    def extended(self, size: int) -> tuple[Segment, Stretch] | None:
        """The lowest place where free blocks and holes in a row have room; holes are filled from the left."""
        [segment] = self.pool(size)
        stretches = segment.stretches()
        for index, hole in enumerate(stretches):
            if hole.kind != "hole":
                continue
            first = index - 1 if index and stretches[index - 1].kind == "free" else index
            row: list[Stretch] = []
            for stretch in stretches[first:]:
                if stretch.kind == "taken" or sum(it.length for it in row) >= size:
                    break
                row.append(stretch)
            if sum(it.length for it in row) < size:
                continue
            for stretch in row:
                if stretch.kind == "hole" and not self.fill(segment, stretch, row[0].start + size):
                    return None
            return segment, next(it for it in segment.stretches() if it.start == row[0].start)
        raise AssertionError

    def fill(self, segment: Segment, hole: Stretch, end: int) -> bool:
        """Put memory behind a hole up to ``end``, all of it or nothing."""
        first = hole.start // segment.page
        last = -(-min(end, hole.start + hole.length) // segment.page)
        if self.reserved + (last - first) * segment.page > self.capacity:
            return False
        segment.pages += [False] * (last - len(segment.pages))
        segment.pages[first:last] = [True] * (last - first)
        return True

    def take(self, segment: Segment, stretch: Stretch, size: int) -> tuple[Segment, int]:
        """Take a block out of a free stretch."""
        rest = stretch.length - size
        splits = rest >= 512 if segment.small or self.expandable else rest > MIB and size < self.max_split
        segment.taken[stretch.start] = size if splits else stretch.length
        return segment, stretch.start

    def give_back(self) -> None:
        """Every segment without a block, or every page without one."""
        if not self.expandable:
            self.segments = [segment for segment in self.segments if segment.taken]
        for segment in self.segments if self.expandable else ():
            for page in range(len(segment.pages)):
                start, stop = page * segment.page, (page + 1) * segment.page
                if all(at >= stop or at + length <= start for at, length in segment.taken.items()):
                    segment.pages[page] = False

    def give_back_oversize(self, size: int) -> bool:
        """The smallest cached block above the limit that suffices, else the largest until they do."""
        if self.max_split == ENDLESS or self.expandable:
            return False
        wanted = max(size, self.max_split)
        cached = [it for it in self.pool(size) if not it.taken and it.reserved >= self.max_split]
        cached.sort(key=lambda it: it.reserved)  # stable: of equals the lowest comes first
        if sufficing := [it for it in cached if it.reserved >= wanted]:
            self.segments = [it for it in self.segments if it is not sufficing[0]]
            return True
        released = 0
        while cached and released < wanted:
            gone = cached.pop()
            released += gone.reserved
            self.segments = [it for it in self.segments if it is not gone]
        return released >= wanted
