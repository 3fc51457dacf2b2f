"""Detection of a loss that writes to a batch that will run again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from batchwright.errors import WorkloadError
from batchwright.torch_internals import version_of
from batchwright.training.micro_batches.nested_batches import named_tensors
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.workloads.base import Batch

_NO_VERSION = -1
"""Version of an inference tensor, which has no version counter and cannot be written to in training."""


class BatchVersions:
    """Number of writes to each tensor of some micro-batches, by autograd's version counters.

    Args:
        micro_batches: the micro-batches that would run again after a failure.

    A write that bypasses torch (through a numpy array that shares a tensor's memory, or ``.data``) is not counted.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self._versions = [_versions(micro_batch.batch) for micro_batch in micro_batches]

    def require_unchanged(self) -> None:
        """Check that no tensor has been written to since construction.

        Raises:
            WorkloadError: naming the first tensor that was written to.
        """
        for number, (micro_batch, before) in enumerate(zip(self._micro_batches, self._versions, strict=True), start=1):
            if _versions(micro_batch.batch) != before:
                pairs = zip(named_tensors(micro_batch.batch), before, strict=False)
                written = (name for (name, tensor), version in pairs if _version(tensor) != version)
                of_many = f" of micro-batch {number} of {len(self._versions)}" if len(self._versions) > 1 else ""
                raise WorkloadError(
                    f"the loss writes to `{next(written, 'batch')}`{of_many}, so a window that ran out of memory "
                    "cannot be run again: make the loss write to a copy"
                )


def _versions(batch: Batch) -> list[int]:
    if type(batch) is dict:  # most batches: skip the names, which take longer than the versions
        values = batch.values()
        if all(isinstance(value, Tensor) for value in values):
            return [_version(value) for value in values]
    return [_version(tensor) for _, tensor in named_tensors(batch)]


def _version(tensor: Tensor) -> int:
    return _NO_VERSION if tensor.is_inference() else version_of(tensor)
