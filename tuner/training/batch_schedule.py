"""Where a run is, and which samples each of its updates takes on each rank. Pure arithmetic over the epochs' orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tuner.planning.accumulation import balanced_split
from tuner.training.data.loading import Part, Window
from tuner.training.data.order import epoch_order


@dataclass(frozen=True)
class Position:
    """Where a run is. All of it is in a checkpoint."""

    update: int = 0
    """Updates made."""
    epoch: int = 0
    """Passes over the data that are finished."""
    committed: int = 0
    """Samples of this epoch that updates have used."""
    seen: int = 0
    """Samples used since the run began."""
    loss: float | None = None
    """Of the last update; none when it was not finite, or before the first."""


@dataclass(frozen=True)
class Windows:
    """The windows of a run: every sample of an epoch once, the last window of an epoch keeping what is left.

    A window's samples are one stretch of the epoch's order, which the ranks share in stretches that differ by at most
    one sample: the same samples whatever the number of ranks and the size of micro-batches.
    """

    seed: int
    """Of the order of samples."""
    samples: int
    """Samples in an epoch."""
    effective_batch_size: int
    """Samples of a whole window over all ranks."""
    rank: int = 0
    """This rank."""
    world_size: int = 1
    """Number of ranks."""

    def size(self, position: Position) -> int:
        """Samples in the window at ``position``, over all ranks."""
        return min(self.effective_batch_size, self.samples - position.committed)

    def advanced(self, position: Position) -> Position:
        """The position after the window at ``position``."""
        size = self.size(position)
        ended = position.committed + size >= self.samples
        return replace(
            position,
            update=position.update + 1,
            seen=position.seen + size,
            epoch=position.epoch + ended,
            committed=0 if ended else position.committed + size,
        )

    def parts(self, position: Position, largest: int, *, alike: bool = False) -> Window:
        """This rank's micro-batches of at most ``largest`` samples in the window at ``position``.

        Args:
            position: which window.
            largest: samples in the largest micro-batch.
            alike: whether every rank gets as many micro-batches as the one with the most samples; a rank that has fewer
                samples than that then gets idle ones, of one sample.
        """
        size = self.size(position)
        shares = _padded(balanced_split(size, self.world_size), self.world_size)
        start = position.committed + sum(shares[: self.rank])
        share = shares[self.rank]
        order = epoch_order(self.seed, position.epoch, self.samples)
        indices = tuple(order[start : start + share].tolist())
        steps = -(-(shares[0] if alike else share) // largest)
        parts = [Part(position.epoch, part) for part in cut(indices, balanced_split(share, steps))]
        idle = Part(position.epoch, (int(order[position.committed]),), idle=True)
        return (*parts, *[idle] * (steps - len(parts) if alike else 0))

    def after(
        self, position: Position, updates: int, largest: Callable[[], int], *, alike: bool = False
    ) -> Iterator[Window]:
        """The windows from ``position`` up to ``updates``; ``largest`` is asked for each as it is drawn."""
        while position.update < updates:
            yield self.parts(position, largest(), alike=alike)
            position = self.advanced(position)


def _padded(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    return sizes + (0,) * (count - len(sizes))


def cut(indices: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """``indices`` in stretches of ``sizes``."""
    parts, start = [], 0
    for size in sizes:
        parts.append(indices[start : start + size])
        start += size
    return parts
