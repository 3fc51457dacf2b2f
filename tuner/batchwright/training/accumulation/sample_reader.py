"""The samples of the batches that a loop of one's own gives to an update."""

from collections.abc import Iterable, Sequence

from batchwright.training.micro_batches.sample_layout import SampleLayout, UnknownSamplesError
from batchwright.training.micro_batches.splitting import (
    CountSamples,
    MicroBatch,
    as_micro_batch,
    laid_out,
    unknown_micro_batch,
)
from batchwright.workloads.base import Batch


class SampleReader:
    """Reads batches as micro-batches, all by the layout of the first one.

    Args:
        samples: counts the samples of a batch, if the user says so.
        share: samples of this rank in an update, if there is a plan: those of a window of one batch.
        is_checked: whether the loss of the first window confirms how its batches are read.
    """

    def __init__(self, samples: CountSamples | None, share: int | None, *, is_checked: bool) -> None:
        self._samples = samples
        self._share = share
        self._is_checked = is_checked
        """True until the loss of the first window has run."""
        self._layout: SampleLayout | None = None
        self._is_unknown = False
        """True if every reading of the first batch was a guess, and is wrong."""

    def read(self, window: Iterable[Batch | MicroBatch]) -> list[MicroBatch]:
        """The micro-batches of a window."""
        batches = list(window)
        size = getattr(window, "batch_size", None)
        if size is None and len(batches) == 1:
            size = self._share
        return [batch if isinstance(batch, MicroBatch) else self._read(batch, size) for batch in batches]

    def _read(self, batch: Batch, size: int | None) -> MicroBatch:
        if self._is_unknown:
            return self._unknown(batch)
        if self._layout is not None:
            try:
                count = self._layout.count(batch)
                if self._samples is None or self._samples(batch) == count:
                    return laid_out(batch, count, self._layout)
            except UnknownSamplesError:
                pass
        found = as_micro_batch(batch, size, self._samples)
        if not self._is_checked and found.layout is not None and found.layout.shares_tensors:
            return self._unknown(batch)
        self._layout = found.layout
        return found

    def _unknown(self, batch: Batch) -> MicroBatch:
        size = None if self._samples is None else self._samples(batch)
        return unknown_micro_batch(batch, size, is_counted=size is not None)

    def settle(self, window: Sequence[MicroBatch], chosen: MicroBatch | None) -> list[MicroBatch]:
        """The window, where every batch is read as ``chosen``, one of the readings of one of them."""
        self._is_checked = False
        if chosen is not None and chosen.indivisible is not None:
            self._is_unknown = True
            return [one if one.layout is None and not one.readings else self._unknown(one.batch) for one in window]
        if chosen is None or chosen.layout is None:
            return list(window)
        self._layout = layout = chosen.layout
        return [
            laid_out(one.batch, layout.count(one.batch), layout) if one.layout is not None or one.readings else one
            for one in window
        ]
