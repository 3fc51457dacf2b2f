"""The gradient noise scale of a run: when updates are measured, and the measurements that checkpoints keep."""

from collections import deque

from batchwright.planning.noise_scale import MOST_UPDATES, NoiseMeasurement, noise_scale
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import NoiseScale
from batchwright.training.batch_schedule import BatchSchedule, Position

_LONGEST_INTERVAL = 10
"""Updates between two measurements of a long run, by default: a measurement is a pass over the gradients, which then
takes a tenth of what clipping takes."""


class RunNoiseScale:
    """The measurements of a run, and the decision which update to measure. All ranks decide alike.

    Only updates of a full window are measured: the last window of an epoch has fewer samples, and more noise.

    Args:
        request: number of updates, and updates between two measurements.
        schedule: the windows of the run, and the samples in its data.
    """

    def __init__(self, request: TrainingRequest, schedule: BatchSchedule) -> None:
        self._interval = interval(request)
        self._window_samples = schedule.size(Position())
        self._data_samples = schedule.samples
        self._measurements: deque[NoiseMeasurement] = deque(maxlen=MOST_UPDATES)
        self._last: int | None = None
        """The newest update that was measured."""

    def is_due(self, update: int, samples: int) -> bool:
        """Return whether to measure ``update``, of this number of samples over all ranks."""
        if not self._interval or samples < self._window_samples:
            return False
        return self._last is None or update - self._last >= self._interval

    def add(self, update: int, measurement: NoiseMeasurement | None) -> NoiseScale | None:
        """Add the measurement of ``update``. Return the new estimate; None where nothing was measured."""
        if measurement is None:
            return None
        self._last = update
        self._measurements.append(measurement.within(self._data_samples))
        return self.estimate()

    def estimate(self) -> NoiseScale | None:
        """The noise scale by the measurements so far, or the reason why there is none; None if it was not requested."""
        if not self._interval:
            return None
        return noise_scale(list(self._measurements), self._window_samples, self._data_samples)

    def state(self) -> dict[str, object]:
        """Plain state for a checkpoint."""
        return {"last": self._last, "measured": [(each.variance, each.squared_norm) for each in self._measurements]}

    def load_state(self, *, last: int | None, measured: list[tuple[float, float]]) -> None:
        """Continue from the state of a checkpoint."""
        self._last = last
        self._measurements = deque((NoiseMeasurement(*pair) for pair in measured), maxlen=MOST_UPDATES)


def interval(request: TrainingRequest) -> int:
    """Updates between two measurements; 0 if none is to be made.

    By default a run has at least ``MOST_UPDATES`` measurements, or one of each of its updates.
    """
    if request.noise_scale_every is not None:
        return request.noise_scale_every
    return max(1, min(_LONGEST_INTERVAL, request.updates // MOST_UPDATES))
