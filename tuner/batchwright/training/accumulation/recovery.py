"""Recovery from a micro-batch that ran out of memory.

The decision table, for an out-of-memory error (or a size that a kernel refuses). The device matters only through its
default way of summing gradients (``gathering`` chooses another):

======  ============================  =======================  ======================================================
device  strategy                      error came from          action
======  ============================  =======================  ======================================================
GPU     one device or data-parallel   a pass (scratch sums)    divide the micro-batch, run its parts
CPU     one device or data-parallel   a pass (sums in place)   divide the micro-batch, run the whole window again
any     lock step (FSDP)              a pass                   raise; the run restarts from its checkpoint with half
any     any                           outside a pass           raise; the last checkpoint stays
======  ============================  =======================  ======================================================

A pass is the forward and backward pass of one micro-batch. Outside of passes are the construction of the model, the
reduction over ranks, the optimizer's step (which may be incomplete) and checkpoints. In lock step the model's own
collectives are inside the passes, so a rank that divided a micro-batch alone would leave the other ranks waiting.

The error is also raised for a micro-batch of one sample, for one that cannot be divided, and without ``recovers``.
"""

from collections.abc import Iterable, Sequence
from enum import Enum

from batchwright.errors import InvalidSizeError, OutOfMemoryError, WorkloadError
from batchwright.hardware.memory_devices.base import MemoryDevice
from batchwright.planning.accumulation import balanced_split
from batchwright.schemas.training import MicroBatchSplit
from batchwright.training.accumulation.gradient_sums import GradientSums
from batchwright.training.micro_batches.snapshot import BatchVersions, Snapshot
from batchwright.training.micro_batches.splitting import MicroBatch


class Action(Enum):
    """Response to an out-of-memory error in a pass."""

    DIVIDE_MICRO_BATCH = "divide the micro-batch and run its parts"
    DIVIDE_WINDOW = "divide the micro-batch and run the whole window again"
    RESTART = "raise; the run restarts from its checkpoint with smaller micro-batches"
    RAISE = "raise"


def decide(*, lock_step: bool, sums_in_place: bool) -> Action:
    """Look up the decision table of this module, for an error in a pass."""
    if lock_step:
        return Action.RESTART
    return Action.DIVIDE_WINDOW if sums_in_place else Action.DIVIDE_MICRO_BATCH


class Recovery:
    """Division of micro-batches that do not fit, and the rollback of the failed pass.

    ``snapshot`` is None in lock step, where no pass is run again.

    Attributes:
        largest_micro_batch: micro-batches above this size are divided before they run; lowered by every split.
        failed_micro_batch: the size of the last micro-batch that did not fit; None when all did.
        splits: the divisions of this window.
    """

    def __init__(
        self, memory: MemoryDevice, gradients: GradientSums, snapshot: Snapshot | None, action: Action, rank: int
    ) -> None:
        self.largest_micro_batch: int | None = None
        self.failed_micro_batch: int | None = None
        self.splits: list[MicroBatchSplit] = []
        self._memory = memory
        self._gradients = gradients
        self._snapshot = snapshot
        self._divides = action in {Action.DIVIDE_MICRO_BATCH, Action.DIVIDE_WINDOW}
        self._rank = rank
        self._versions = BatchVersions([])

    def start(self, window: Sequence[MicroBatch]) -> None:
        """Begin a window: clear the recorded splits, and protect all micro-batches if all would run again."""
        self.splits = []
        if self._gradients.in_place:
            self.protect(window if self._divides else [])

    def protect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Capture the state that a failed pass over ``micro_batches`` would have to restore."""
        if self._snapshot is not None:
            self._snapshot.capture()
        self._versions = BatchVersions(micro_batches)

    def passed(self) -> None:
        """Note that a pass has ended, which shows the state that passes change."""
        if self._snapshot is not None:
            self._snapshot.learn()

    def divide(self, failure: Exception, micro_batch: MicroBatch) -> None:
        """Lower the bound on micro-batches after one did not fit.

        Raises:
            OutOfMemoryError, InvalidSizeError: when there is no smaller micro-batch.
            Exception: ``failure`` itself, when it is not an out-of-memory error, or the table says to raise.
        """
        oom_error = self._memory.translate(failure)
        if not isinstance(oom_error, (OutOfMemoryError, InvalidSizeError)):
            raise failure
        self.failed_micro_batch = micro_batch.size
        if not self._divides:
            raise failure
        if micro_batch.indivisible is not None:
            raise type(oom_error)(f"{oom_error}; and {micro_batch.indivisible}")
        if micro_batch.size == 1:
            raise type(oom_error)(f"a micro-batch of one sample does not fit: {oom_error}")
        parts = balanced_split(micro_batch.size, 2)
        self.largest_micro_batch = parts[0]
        split = MicroBatchSplit(rank=self._rank, size=micro_batch.size, parts=parts, message=str(oom_error))
        self.splits.append(split)

    def roll_back(self) -> None:
        """Undo the failed pass: free its memory, restore random numbers and the model's state, drop its gradients.

        The caller must have dropped the error, whose traceback keeps the tensors of the failed pass alive.

        Raises:
            WorkloadError: when the loss has written to a batch that is to run again, or as ``Snapshot.roll_back``.
        """
        # Free first: restoring takes memory, of which there is none left. Kernels of the failed pass may still write.
        self._gradients.discard()
        self._memory.synchronize()
        self._memory.release()
        if self._snapshot is not None:
            self._snapshot.roll_back()
        self._gradients.allocate_buffers()
        self._versions.require_unchanged()

    def requeued(self, micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches that are still to run after a split, within the lowered bound.

        Raises:
            OutOfMemoryError: when one of them cannot be divided, with the device's message.
        """
        try:
            return self.within_bound(micro_batches)
        except WorkloadError as error:
            raise OutOfMemoryError(f"{self.splits[-1].message}; and {error}") from None

    def within_bound(self, micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """``micro_batches``, where those above the bound are divided."""
        largest = self.largest_micro_batch
        if largest is None:
            return list(micro_batches)
        return [part for micro_batch in micro_batches for part in micro_batch.at_most(largest)]
