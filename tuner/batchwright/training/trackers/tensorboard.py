"""Events for TensorBoard, in the run's folder."""

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from batchwright.schemas.training import RunOutcome
from batchwright.training.trackers.base import TrackedRun


class TensorBoard:
    """Writes each update's events before ``log`` returns: a kill loses none.

    Args:
        run: the run, whose folder the events are in.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._directory = str(run.paths.tensorboard)
        self._events: SummaryWriter | None = None

    def begin(self, resumed_from: int) -> None:
        """Open the events; TensorBoard drops those of updates after ``resumed_from``."""
        self._events = SummaryWriter(self._directory, purge_step=resumed_from + 1)

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Write figures as scalars."""
        if self._events is None:
            return
        for name, value in figures.items():
            self._events.add_scalar(name, value, update)
        self._events.flush()

    def close(self, outcome: RunOutcome) -> None:  # noqa: ARG002 - events have no outcome
        """Close the events."""
        if self._events is not None:
            self._events.close()
