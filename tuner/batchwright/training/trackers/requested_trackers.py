"""The trackers of a request, and the handling of their failures."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module

from batchwright.schemas.requests import TrackerName
from batchwright.schemas.training import RunOutcome
from batchwright.training.trackers.base import TrackedRun, Tracker
from batchwright.workloads.required_packages import require_trackers

_CLASSES: Mapping[TrackerName, tuple[str, str]] = {
    "mlflow": ("mlflow", "MLflow"),
    "tensorboard": ("tensorboard", "TensorBoard"),
    "wandb": ("weights_and_biases", "WeightsAndBiases"),
}
"""Module beside this one, and class, by the name in a request."""


class Trackers:
    """The trackers of one process of a run. Their failures are notes: no tracker ends a run, but for a disk of its own.

    TensorBoard's events are part of the run's folder, as its progress is: an error of the disk is raised.

    Args:
        names: the requested trackers.
        run: the run.
        note: called with each failure, in a line.

    Raises:
        SpecError: when a package is missing.
    """

    def __init__(self, names: Sequence[TrackerName], run: TrackedRun, note: Callable[[str], None]) -> None:
        require_trackers(names)
        self._note = note
        self._trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):  # each once
            self._guard(name, partial(self._open, name, run))

    def _open(self, name: TrackerName, run: TrackedRun) -> None:
        module, kind = _CLASSES[name]
        self._trackers[name] = getattr(import_module(f"{__package__}.{module}"), kind)(run)

    def _guard(self, name: str, act: Callable[[], None]) -> None:
        """Run ``act``; a tracker that fails is noted, and left out from now on."""
        try:
            act()
        except Exception as error:
            if name == "tensorboard":
                raise
            self._trackers.pop(name, None)
            self._note(f"`{name}` no longer tracks this run: {type(error).__name__}: {error}")

    def begin(self, resumed_from: int) -> None:
        """Go on after an update; 0 for a run from its start."""
        for name, tracker in list(self._trackers.items()):
            self._guard(name, partial(tracker.begin, resumed_from))

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Write figures of the weights after an update."""
        for name, tracker in list(self._trackers.items()):
            self._guard(name, partial(tracker.log, update, figures))

    def close(self, outcome: RunOutcome) -> None:
        """Write what is left, and say how the process ended. Idempotent."""
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            self._guard(name, partial(tracker.close, outcome))
