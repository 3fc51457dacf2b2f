"""Documents of a training run: its progress, its result and its failures. Pure data, no torch."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tuner.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt


class RunOutcome(StrEnum):
    """How a training process ended."""

    SUCCEEDED = "SUCCEEDED"
    """All updates were made; the final checkpoint and weights are written."""
    STOPPED = "STOPPED"
    """It received a request to stop (SIGTERM) and wrote a checkpoint if it had begun: the run can be resumed."""
    FAILED = "FAILED"
    """It cannot go on; the message says why."""


class MicroBatchSplit(Document):
    """A micro-batch that did not fit in memory, and went through in smaller parts: the effective batch stays."""

    rank: NonNegativeInt
    """The rank that it happened on."""
    size: PositiveInt
    """Samples in the micro-batch that did not fit."""
    parts: tuple[PositiveInt, ...]
    """Samples in the micro-batches it was divided into. Later ones of this rank are no larger than these."""
    message: str
    """What the device said."""


class TrainingProgress(Document):
    """One optimizer update, as a line of ``progress.jsonl``."""

    update: PositiveInt
    """Number of this update, from 1."""
    updates: PositiveInt
    """Updates the run will make."""
    loss: float | None
    """Mean over the window's weight (tokens or samples), summed over the terms; none when it is not finite."""
    terms: dict[str, float | None]
    """Mean of each named loss term; none when it is not finite."""
    weights: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """What the window weighed for each term: the tokens or samples its mean is over."""
    learning_rate: NonNegativeFloat
    """Rate used by this update."""
    gradient_norm: NonNegativeFloat | None
    """L2 norm of the whole gradient before clipping; none when it was not finite."""
    skipped: bool
    """Whether no step was made: a gradient was not finite for the loss scaler, or nothing in the window counts."""
    samples: PositiveInt
    """Samples in this update's window over all ranks."""
    micro_batch_sizes: tuple[PositiveInt, ...]
    """Sizes of rank 0's micro-batches in the window."""
    splits: tuple[MicroBatchSplit, ...] = ()
    """Micro-batches of any rank that did not fit, and went through in smaller parts."""
    samples_seen: NonNegativeInt
    """Samples committed since the run began, over all epochs."""
    epoch: NonNegativeInt
    """Passes over the data that were finished before this window."""
    seconds: NonNegativeFloat
    """Wall time of this update."""
    peak_bytes: NonNegativeInt | None
    """Most memory a rank has held so far: reserved on CUDA, of the process on the CPU."""

    @property
    def samples_per_second(self) -> float:
        """Over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens over all ranks; none for a loss that does not weigh tokens (as many as samples)."""
        weight = max(self.weights.values(), default=0.0)
        return weight / self.seconds if self.seconds and weight > self.samples else None


class SystemTrouble(Document):
    """A disk that ended the run: full, read-only or broken."""

    cause: str
    """A stable word, such as `disk-full`."""
    message: str
    """The missing space, and its path."""
    needed_bytes: NonNegativeInt = 0
    """Room on the disk without which the run cannot go on; 0 where that is not known."""


class TrainingResult(Document):
    """How the run's last process ended: ``result.json``."""

    outcome: RunOutcome
    """How it ended."""
    message: str
    """One line for people."""
    error_type: str | None = None
    """Class of the exception that ended it."""
    traceback: str | None = None
    """Where it was raised, for failures of the workload."""
    updates: NonNegativeInt
    """Updates made so far, those of earlier processes of the run included."""
    resumed_from: NonNegativeInt | None = None
    """Update of the checkpoint this process went on from; none for a fresh start."""
    loss: float | None = None
    """Loss of the last update."""
    samples_seen: NonNegativeInt = 0
    """Samples committed so far."""
    notes: tuple[str, ...] = ()
    """What the user should know of the run, such as a loss that accumulation changes."""
    smaller_micro_batch: PositiveInt | None = None
    """Set when memory ran out and the run can go on from its checkpoint with micro-batches of at most this size."""
    trouble: SystemTrouble | None = None
    """Set when a disk ended the run, and not the workload."""
    weights_sha256: str | None = None
    """SHA-256 of the final weights file, when the run succeeded."""
    seconds: NonNegativeFloat = 0.0
    """Wall time of this process, start-up included."""
