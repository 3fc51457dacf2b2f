"""The sizes worth probing. Pure, no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from tuner.errors import SearchError
from tuner.schemas.results import ExpectedPeaks


@dataclass(frozen=True)
class SearchSpace:
    """The sizes worth probing: multiples of ``granularity`` up to ``bound`` (``bound`` itself where it is smaller).

    Attributes:
        bound: the largest useful size.
        bound_reason: explanation of the bound, for the proof.
        granularity: step between the sizes.
        limit_bytes: the memory a probe may take, if known.
        expected: the estimated memory curve. A wrong estimate costs probes, never correctness.
        elastic: whether a part of the measured memory is reclaimable where memory is short, as with buffers of a
            process's libraries. It changes only the order of probes.
        sizes: the only sizes worth probing, rising, up to ``bound``; ``granularity`` is 1 then.

    Raises:
        SearchError: when a number is below 1, or the sizes are empty, do not rise, or exceed the bound.
    """

    bound: int
    bound_reason: str
    granularity: int = 1
    limit_bytes: int | None = None
    expected: ExpectedPeaks | None = None
    sizes: tuple[int, ...] | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.bound < 1 or self.granularity < 1:
            raise SearchError(f"bound and granularity must be at least 1, got {self.bound} and {self.granularity}")
        if self.sizes is None:
            return
        rises = all(low < high for low, high in pairwise((0, *self.sizes)))
        if not self.sizes or not rises or self.sizes[-1] > self.bound or self.granularity > 1:
            raise SearchError(
                f"sizes must rise from 1 or more to at most {self.bound}, with a granularity of 1, got "
                f"{list(self.sizes)} and {self.granularity}"
            )

    @property
    def count(self) -> int:
        """Number of candidates."""
        return len(self.sizes) if self.sizes else max(1, self.bound // self.granularity)

    def size(self, index: int) -> int:
        """The candidate with an index from 1 to ``count``; 0 for index 0."""
        return (0, *self.sizes)[index] if self.sizes else min(index * self.granularity, self.bound)

    def index(self, size: int) -> int:
        """The index of a candidate.

        Raises:
            SearchError: when the size is not a candidate.
        """
        index = bisect_left(self.sizes, size) + 1 if self.sizes else -(-size // self.granularity)
        if not 1 <= index <= self.count or self.size(index) != size:
            candidates = f"{self.count} sizes" if self.sizes else f"multiples of {self.granularity}"
            raise SearchError(
                f"micro-batch {size} is not among the sizes searched: {candidates} from {self.size(1)} to "
                f"{self.size(self.count)}"
            )
        return index

    def at_most(self, size: float) -> int:
        """The index of the largest candidate of at most ``size``; 0 when there is none."""
        if self.sizes:
            return bisect_right(self.sizes, size)
        return min(int(size) // self.granularity, self.count) if size < self.bound else self.count
