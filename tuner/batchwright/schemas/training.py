"""Documents of a training run: its progress, its result and its failures. Pure data, no torch."""

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeAlias

from pydantic import Field

from batchwright.schemas.base import Document, NonNegativeFloat, NonNegativeInt, PositiveInt
from batchwright.schemas.dataset.evaluation_spec import EvaluatedWeights


class RunOutcome(StrEnum):
    """Outcome of a training process."""

    SUCCEEDED = "SUCCEEDED"
    """All updates were made, or early stopping ended the run. The final checkpoint and weights are written."""
    STOPPED = "STOPPED"
    """The process was stopped (SIGTERM) and wrote a checkpoint if training had begun. The run can be resumed."""
    FAILED = "FAILED"
    """The process cannot continue; see the message."""


class MicroBatchSplit(Document):
    """A micro-batch that did not fit in memory and was run in smaller parts, with the same effective batch."""

    rank: NonNegativeInt
    """Rank of the micro-batch."""
    size: PositiveInt
    """Samples in the micro-batch that did not fit."""
    parts: tuple[PositiveInt, ...]
    """Samples in each of the parts. Later micro-batches of this rank are no larger."""
    message: str
    """Error message of the device."""


class NoiseScale(Document):
    """The gradient noise scale of a run: the effective batch that its gradients suggest, with the evidence.

    See ``batchwright.planning.noise_scale`` for definition, source and assumptions.
    """

    measured_updates: NonNegativeInt
    """Updates that the estimate averages, the newest that were measured."""
    effective_batch_size: PositiveInt
    """Samples of the updates that were measured: the run's effective batch."""
    gradient_variance: float | None = None
    """Unbiased estimate of the trace of the covariance of one sample's gradient; none before the first measurement."""
    squared_gradient_norm: float | None = None
    """Unbiased estimate of the squared norm of the expected gradient, negative where noise hides it."""
    samples: NonNegativeFloat | None = None
    """The noise scale: samples of the batch whose gradient has as much noise as signal; none where only a lower end is
    known, or nothing."""
    lower_samples: NonNegativeFloat | None = None
    """Lower end of the 95 % interval; none where nothing can be said."""
    upper_samples: NonNegativeFloat | None = None
    """Upper end of the 95 % interval; none where noise dominates, so that the interval has no upper end."""
    suggested_effective_batch_size: PositiveInt | None = None
    """The noise scale as an effective batch; none where it is not known."""
    message: str
    """The estimate in words, or the reason why there is none."""


class TrainedFigures(Document):
    """Figures of the weights that train, beside those of their moving averages."""

    loss: float | None
    """Mean over the held-out data, as that of the averages; none for the same reasons."""
    terms: dict[str, float | None]
    """Mean of each named loss term."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Each requested metric."""


class EvaluationReport(Document):
    """An evaluation: the loss and metrics of the weights after an update, over all held-out samples."""

    update: NonNegativeInt
    """Updates made before it; 0 for the weights that training starts from."""
    loss: float | None
    """Mean over the tokens or samples of the held-out data, summed over the terms, without smoothed labels; none when
    not finite, without a weight, or where memory ran out with a single sample."""
    terms: dict[str, float | None]
    """Mean of each named loss term; none when not finite, or without a weight."""
    weights: dict[str, NonNegativeFloat]
    """Weight of each term: the number of tokens or samples of the mean."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Each requested metric; none when not finite, or without a label."""
    of_averages: bool = False
    """True if these are the loss, terms and metrics of the moving averages of the weights."""
    trained: TrainedFigures | None = None
    """The figures of the weights that train, where both were evaluated; they choose nothing."""
    samples: NonNegativeInt
    """Samples that were evaluated, over all ranks."""
    micro_batch_size: PositiveInt
    """Samples of the largest forward pass that may still be tried."""
    splits: tuple[MicroBatchSplit, ...] = ()
    """Batches of any rank that did not fit and were run in smaller parts."""
    is_best: bool = False
    """True if the monitored figure is better than after all earlier updates. The weights are kept."""
    message: str | None = None
    """Reason why there is no loss; none where there is one."""
    seconds: NonNegativeFloat
    """Wall time of the evaluation."""


class EvaluationSummary(Document):
    """The evaluations of a run so far."""

    monitor: str
    """The figure that chooses the best weights."""
    weights: EvaluatedWeights = "trained"
    """The weights that were evaluated."""
    held_out_samples: PositiveInt
    """Samples in the held-out data."""
    evaluations: NonNegativeInt
    """Evaluations made, with that of the weights that training started from."""
    first: EvaluationReport | None = None
    """The first evaluation."""
    best: EvaluationReport | None = None
    """The best evaluation after an update."""
    last: EvaluationReport | None = None
    """The newest evaluation."""
    stopped_early: bool = False
    """True if the run ended early, because the monitored figure had not improved."""
    message: str
    """The evaluations in words."""


class TrainingProgress(Document):
    """One optimizer update, as a line of ``progress.jsonl``."""

    update: PositiveInt
    """Number of this update, from 1."""
    updates: PositiveInt
    """Updates the run will make."""
    loss: float | None
    """Mean over the tokens or samples of the update, summed over the terms; none when not finite."""
    terms: dict[str, float | None]
    """Mean of each named loss term; none when not finite."""
    weights: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Weight of each term in the update: the number of tokens or samples of the mean."""
    learning_rate: NonNegativeFloat
    """Rate used by this update."""
    gradient_norm: NonNegativeFloat | None
    """L2 norm of the whole gradient before clipping; none when not finite."""
    skipped: bool
    """True if no step was made: a gradient was not finite for the loss scaler, or the update has no target."""
    samples: PositiveInt
    """Samples of this update over all ranks."""
    micro_batch_sizes: tuple[PositiveInt, ...]
    """Sizes of rank 0's micro-batches in this update."""
    splits: tuple[MicroBatchSplit, ...] = ()
    """Micro-batches of any rank that did not fit and were run in smaller parts."""
    samples_seen: NonNegativeInt
    """Samples committed since the run began, over all epochs."""
    epoch: NonNegativeInt
    """Passes over the data completed before this update."""
    seconds: NonNegativeFloat
    """Wall time of this update."""
    peak_bytes: NonNegativeInt | None
    """Most memory a rank has held so far: on CUDA reserved by the allocator, without the context; on the CPU of the
    process."""
    noise_scale: NoiseScale | None = None
    """The gradient noise scale after this update, if the update was measured for it."""
    evaluations: tuple[EvaluationReport, ...] = ()
    """Evaluations since the update before: that of the weights after this update, if there was one. With the first
    update also that of the weights before it, and after a stop that of the update at which the run was stopped."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Target tokens per second over all ranks; none for a loss that is not weighted by tokens."""
        weight = max(self.weights.values(), default=0.0)
        return weight / self.seconds if self.seconds and weight > self.samples else None


class SystemTrouble(Document):
    """Trouble that ended the run: of a disk, the loss of one of its hosts, or a model hub that does not answer."""

    cause: str
    """A stable word, such as `disk-full`."""
    message: str
    """Missing space and path, or the host."""
    needed_bytes: NonNegativeInt = 0
    """Space on the disk that the run needs to continue; 0 where not known."""


class TrainingResult(Document):
    """Result of the last process of a run, or of a command: ``result.json``."""

    outcome: RunOutcome
    """Outcome of the process."""
    message: str
    """Explanation of the outcome, one line."""
    error_type: str | None = None
    """Class of the exception that ended the process, or the way in which a command ended."""
    traceback: str | None = None
    """Traceback, for failures of the workload."""
    exit_status: int | None = None
    """Commands: exit status, negative for a signal; none where the command had to be killed."""
    output: str = ""
    """Commands: end of the output."""
    updates: NonNegativeInt
    """Updates made so far, including earlier processes of the run; of a command, since its last start."""
    resumed_from: NonNegativeInt | None = None
    """Update of the checkpoint from which this process resumed; none for a fresh start."""
    loss: float | None = None
    """Loss of the last update."""
    samples_seen: NonNegativeInt = 0
    """Samples committed so far."""
    peak_bytes: NonNegativeInt | None = None
    """Commands: most memory a rank has held."""
    limit_bytes: PositiveInt | None = None
    """Commands: memory limit of the recommendation. The job of a command is watched, and not ended above it."""
    notes: tuple[str, ...] = ()
    """Notes on the run, such as a loss that accumulation changes, or a peak above the limit."""
    smaller_micro_batch: PositiveInt | None = None
    """Set when memory ran out and the run can be resumed with micro-batches of at most this size."""
    out_of_memory: bool = False
    """True when the end of memory ended the process, with or without a smaller micro-batch to resume with."""
    not_finite_since: PositiveInt | None = None
    """Set when the run ended because its loss, gradient or weights are infinite or NaN: the first of the updates in a
    row for which this was seen. The newest checkpoint is finite."""
    trouble: SystemTrouble | None = None
    """Set when a disk, a host or the model hub, not the workload, ended the run."""
    weights_sha256: str | None = None
    """SHA-256 of the final weights file, when the run succeeded."""
    noise_scale: NoiseScale | None = None
    """The gradient noise scale at the end, and the effective batch that it suggests; none where it was not to be
    measured, or training did not begin."""
    evaluation: EvaluationSummary | None = None
    """The evaluations on held-out samples; none where none were requested, or training did not begin."""
    seconds: NonNegativeFloat = 0.0
    """Wall time of this process, including start-up."""


class CommandProgress(Document):
    """Updates that a job of a command has made so far, as counted inside its processes."""

    update: NonNegativeInt = 0
    """Optimizer updates that every rank has made since the command was last started."""
    updates: PositiveInt | None = None
    """Updates the command will make; none where it does not take their number (`{updates}`)."""
    world_size: PositiveInt = 1
    """Ranks of the run, as its processes report them."""
    samples_seen: NonNegativeInt = 0
    """Samples over all ranks."""
    unlike_plan: NonNegativeInt = 0
    """Updates of the rank with the most that had other backward passes or samples than the plan."""
    samples_per_second: NonNegativeFloat | None = None
    """Samples per second over all ranks since the first update; none before the second one."""
    peak_bytes: NonNegativeInt | None = None
    """Most memory a rank has held so far: on CUDA reserved by the allocator, with the context; on the CPU of the
    process."""


RunProgress: TypeAlias = TrainingProgress | CommandProgress
"""Progress of a job: an update that Batchwright made, or the updates of a command so far. Their fields differ, so that
JSON is either."""

MOST_LOSSES = 32
"""Losses of a course: as many as a line of a list can show."""
_NEWEST_WEIGHT = 0.1
"""Least weight of the newest update in the pace, which thus follows a change within some twenty updates."""


class RunCourse(Document):
    """The course of a run in few numbers, for lists: how far it is, how fast it goes, and how its loss goes."""

    update: PositiveInt
    """Updates that are done."""
    updates: PositiveInt | None = None
    """Updates that the run will make; none for a command that does not take their number."""
    seconds_per_update: NonNegativeFloat | None = None
    """Measured pace: the mean over all updates, in which newer ones weigh more from the tenth on, with the evaluations
    between them. Of a command, that since its first update."""
    seconds_remaining: NonNegativeFloat | None = None
    """Seconds that the remaining updates take at this pace, from the newest update on."""
    losses: tuple[float | None, ...] = ()
    """Losses over the whole run, at most 32: every `loss_interval` updates, and the newest. None where not finite."""
    loss_interval: PositiveInt = 1
    """Updates between two of these losses, but for the newest."""


def course_after(course: RunCourse | None, progress: Sequence[RunProgress]) -> RunCourse:
    """Return the course of a run after further updates, at least one.

    A run that goes on from a checkpoint makes the updates after it again: their losses are replaced. A command counts
    anew, and its pace is that of its newest count alone.
    """
    pace = None if course is None else course.seconds_per_update
    for made in progress:
        pace = _pace_after(pace, made)
    newest = progress[-1]
    remaining = None if pace is None or newest.updates is None else max(0, newest.updates - newest.update) * pace
    losses, interval = _losses_after(course, [made for made in progress if isinstance(made, TrainingProgress)])
    return RunCourse(
        update=max(1, newest.update),
        updates=newest.updates,
        seconds_per_update=pace,
        seconds_remaining=None if remaining is None else round(remaining, 3),
        losses=losses,
        loss_interval=interval,
    )


def _pace_after(pace: float | None, made: RunProgress) -> float | None:
    if isinstance(made, CommandProgress):
        rate = made.samples_per_second
        return made.samples_seen / made.update / rate if rate and made.update else None
    weight = max(1 / made.update, _NEWEST_WEIGHT)
    seconds = made.seconds + sum(evaluation.seconds for evaluation in made.evaluations)
    return seconds if pace is None else pace + (seconds - pace) * weight


def _losses_after(
    course: RunCourse | None, progress: Sequence[TrainingProgress]
) -> tuple[tuple[float | None, ...], int]:
    """Return the losses with their interval, which doubles when there are too many."""
    losses, interval = ([], 1) if course is None else (_losses_by_update(course), course.loss_interval)
    if progress:  # the newest may be between two intervals, and a resumed run repeats updates
        losses = [(at, loss) for at, loss in losses if at % interval == 0 and at < progress[0].update]
    for made in progress:
        if made.update % interval == 0:
            losses.append((made.update, _short(made.loss)))
        if len(losses) == MOST_LOSSES:
            interval *= 2
            losses = [(at, loss) for at, loss in losses if at % interval == 0]
    if progress and progress[-1].update % interval:
        losses.append((progress[-1].update, _short(progress[-1].loss)))
    return tuple(loss for _, loss in losses), interval


def _losses_by_update(course: RunCourse) -> list[tuple[int, float | None]]:
    """Return the losses of a course with their updates, which follow from the newest."""
    beyond = course.update % course.loss_interval
    newest = course.losses[-1:] if beyond else ()
    regular = course.losses[: len(course.losses) - len(newest)]
    last = course.update - beyond
    numbered = [(last - index * course.loss_interval, loss) for index, loss in enumerate(reversed(regular))]
    return [*reversed(numbered), *((course.update, loss) for loss in newest)]


def _short(loss: float | None) -> float | None:
    """Return a loss with five digits, more than a line can show."""
    return None if loss is None else float(f"{loss:.5g}")
