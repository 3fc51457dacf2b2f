"""Progress of a run, written for machines (a line of JSON per update) and for TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.schemas.training import TrainingProgress
from tuner.training.launching.run_directory import ProgressLog, RunPaths
from tuner.training.required_packages import require_tensorboard

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class ProgressWriter:
    """Writer of the progress of one process of a run; a context manager that closes its files.

    Args:
        paths: the run's files.
        resumed_from: the update that this process resumes from; lines and events of later updates are dropped.
        tensorboard: whether to write events for TensorBoard too.

    Raises:
        SpecError: when TensorBoard is requested and not installed.
    """

    def __init__(self, paths: RunPaths, resumed_from: int, *, tensorboard: bool) -> None:
        self._log = ProgressLog(paths.progress)
        self._log.truncate_after(resumed_from)
        self._events: SummaryWriter | None = None
        if tensorboard:
            self._events = import_tensorboard()(str(paths.tensorboard), purge_step=resumed_from + 1)

    def append(self, progress: TrainingProgress) -> None:
        """Write an update to the disk before returning: a kill must not lose an update that a checkpoint has."""
        self._log.append(progress)
        if self._events is not None:
            for name, value in scalars(progress).items():
                self._events.add_scalar(name, value, progress.update)
            self._events.flush()

    def __enter__(self) -> ProgressWriter:  # noqa: PYI034 - not meant for subclassing
        """Return the writer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the TensorBoard events."""
        if self._events is not None:
            self._events.close()


def import_tensorboard() -> type[SummaryWriter]:
    """Import torch's ``SummaryWriter``.

    Raises:
        SpecError: when TensorBoard is not installed.
    """
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an optional part

    return SummaryWriter


def scalars(progress: TrainingProgress) -> dict[str, float]:
    """The figures of an update for TensorBoard, by tag."""
    figures = {
        "loss/total": progress.loss,
        **{f"loss/{name}": value for name, value in progress.terms.items() if len(progress.terms) > 1},
        "optimizer/learning_rate": progress.learning_rate,
        "optimizer/gradient_norm": progress.gradient_norm,
        "speed/updates_per_second": 1.0 / progress.seconds if progress.seconds else None,
        "speed/samples_per_second": progress.samples_per_second,
        "speed/tokens_per_second": progress.tokens_per_second,
        "memory/peak_bytes": progress.peak_bytes,
        "micro_batches/count": len(progress.micro_batch_sizes),
        "micro_batches/splits": len(progress.splits),
        "optimizer/noise_scale_samples": None if progress.noise_scale is None else progress.noise_scale.samples,
    }
    for evaluation in progress.evaluations:
        if evaluation.update == progress.update:
            figures["evaluation/loss"] = evaluation.loss
            figures |= {f"evaluation/{name}": value for name, value in evaluation.metrics.items()}
    return {name: float(value) for name, value in figures.items() if value is not None}
