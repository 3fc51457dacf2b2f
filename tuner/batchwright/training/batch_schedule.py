"""Position of a run, and the samples of each update on each rank, as ranges and as loaded micro-batches.

The ranges are pure arithmetic over the epochs' orders.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from torch import Tensor

from batchwright.planning.accumulation import balanced_split
from batchwright.training.data.base import TrainingData
from batchwright.training.data.loading import AccumulationWindow, SampleRange
from batchwright.training.data.seeding import epoch_order, longest_first
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.workloads.base import Batch


@dataclass(frozen=True)
class Position:
    """Progress of a run between two updates, stored in its checkpoints."""

    update: int = 0
    """Updates made."""
    epoch: int = 0
    """Finished passes over the data."""
    committed: int = 0
    """Samples of this epoch that updates have used."""
    seen: int = 0
    """Samples used since the run began."""
    loss: float | None = None
    """Loss of the last update; None when it was not finite, or before the first update."""


@dataclass(frozen=True)
class BatchSchedule:
    """The accumulation windows of a run: every sample of an epoch once, with the remainder in the last window.

    A window's samples are one range of the epoch's order. The ranks share it in ranges whose sizes differ by at most
    one sample, so an update has the same samples whatever the number of ranks and the size of micro-batches.

    Within a window the samples of a rank are grouped by length, so that a micro-batch is padded little. The sum of an
    update is that of the same samples in any order. The first micro-batch has samples as they are drawn: the gradient
    noise compares its gradient with the window's, which needs a random part.
    """

    seed: int
    """Seed of the order of samples."""
    samples: int
    """Samples in an epoch."""
    effective_batch_size: int
    """Samples of a full window over all ranks."""
    rank: int = 0
    """This rank."""
    world_size: int = 1
    """Number of ranks."""
    lengths: Tensor | None = field(default=None, compare=False)
    """Length of each sample in any unit, int64 ``(samples,)``; None if the samples are not to be grouped."""

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

    def window(self, position: Position, largest: int, *, equal_counts: bool = False) -> AccumulationWindow:
        """This rank's sample ranges, of at most ``largest`` samples each, in the window at ``position``.

        With ``equal_counts`` every rank gets as many micro-batches as the rank with the most samples has: one with
        fewer samples gets padding micro-batches of one sample.
        """
        size = self.size(position)
        shares = balanced_split(size, self.world_size)
        shares += (0,) * (self.world_size - len(shares))
        start = position.committed + sum(shares[: self.rank])
        share = shares[self.rank]
        order = epoch_order(self.seed, position.epoch, self.samples)
        indices = tuple(order[start : start + share].tolist())
        steps = -(-(shares[0] if equal_counts else share) // largest)
        sizes = balanced_split(share, steps)
        indices = indices[: sizes[0]] + longest_first(indices[sizes[0] :], self.lengths) if sizes else indices
        ranges = [SampleRange(position.epoch, part) for part in cut(indices, sizes)]
        padding = SampleRange(position.epoch, (int(order[position.committed]),), is_padding=True)
        return (*ranges, *[padding] * (steps - len(ranges) if equal_counts else 0))

    def windows(
        self, position: Position, updates: int, largest: Callable[[], int], *, equal_counts: bool = False
    ) -> Iterator[AccumulationWindow]:
        """The windows from ``position`` up to ``updates``; ``largest`` is called for each one as it is drawn."""
        while position.update < updates:
            yield self.window(position, largest(), equal_counts=equal_counts)
            position = self.advanced(position)


def cut(indices: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cut ``indices`` into consecutive pieces of the given sizes."""
    rest = iter(indices)
    return [tuple(islice(rest, size)) for size in sizes]


class WindowQueue(Iterator[AccumulationWindow]):
    """Accumulation windows that a loader draws ahead of use, queued for the training loop."""

    def __init__(self, windows: Iterator[AccumulationWindow]) -> None:
        self._windows = windows
        self._pending: deque[AccumulationWindow] = deque()

    def __next__(self) -> AccumulationWindow:
        window = next(self._windows)
        self._pending.append(window)
        return window

    def pop(self) -> AccumulationWindow:
        """Remove and return the window whose batches the loader has just yielded."""
        return self._pending.popleft()


def micro_batches_of(
    data: TrainingData, window: AccumulationWindow, batches: list[Batch], seed: int
) -> list[MicroBatch]:
    """The loaded batches of a window as micro-batches of this rank."""
    return [_micro_batch(data, samples, batch, seed) for samples, batch in zip(window, batches, strict=True)]


def _micro_batch(data: TrainingData, samples: SampleRange, batch: Batch, seed: int) -> MicroBatch:
    """Loaded samples as a micro-batch whose parts are collated again, as padding depends on the samples in a part."""

    def divide(sizes: Sequence[int]) -> list[MicroBatch]:
        smaller = [SampleRange(samples.epoch, indices) for indices in cut(samples.indices, tuple(sizes))]
        return [_micro_batch(data, part, data.load(part.epoch, part.indices, seed), seed) for part in smaller]

    return MicroBatch(batch, len(samples.indices), divide, is_padding=samples.is_padding)
