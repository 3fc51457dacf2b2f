"""Time the updates of a probe, and the micro-batches within each update.

As in a run, the device is not synchronised between the micro-batches of an update: on CUDA their times come from events
in the stream.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from batchwright.device_traits import traits_of
from batchwright.schemas.results import UpdateTiming
from batchwright.training.micro_batches.loss_window import UpdateReport
from batchwright.training.micro_batches.splitting import MicroBatch
from batchwright.training.update_engine import UpdateEngine
from batchwright.workloads.base import Batch, LossTerms

_MIN_UPDATES, _MAX_UPDATES = 3, 50
_SUFFICIENT_SECONDS = 2.0
"""Updates are repeated until they have taken this long in total."""
_NORMAL_QUARTILES = 1.349
"""Standard deviations between the quartiles of a normal distribution."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of the median over that of the mean, for a normal distribution."""


@dataclass(frozen=True)
class TimedUpdate:
    """One update, in seconds.

    Attributes:
        sizes: its micro-batch sizes, in order.
        seconds: from its start until the device was done.
        gap_seconds: for each micro-batch but the last, from its start to that of the next.
    """

    sizes: tuple[int, ...]
    seconds: float
    gap_seconds: tuple[float, ...]


class TimedEngine(UpdateEngine):
    """An engine that times its updates, and keeps the time of the last.

    Attributes:
        timed: the time of the last update.
        micro_batches: the micro-batches that were begun, in all updates.
    """

    timed: TimedUpdate
    micro_batches = 0

    def update(self, micro_batches: Sequence[MicroBatch], *, measures_noise: bool = False) -> UpdateReport:
        """Run and time one update; returns when the device is done."""
        self._timestamps = _Timestamps(self.device)
        _synchronize(self.device)
        started = time.perf_counter()
        report = super().update(micro_batches, measures_noise=measures_noise)
        _synchronize(self.device)
        seconds = time.perf_counter() - started
        sizes = tuple(micro_batch.size for micro_batch in micro_batches)
        self.timed = TimedUpdate(sizes, seconds, self._timestamps.gaps())
        return report

    def _loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        self._timestamps.add()
        self.micro_batches += 1
        return super()._loss(model, batch)


def has_enough_updates(updates: Sequence[TimedUpdate]) -> bool:
    """Return whether there are enough updates for a median."""
    timed = sum(update.seconds for update in updates)
    return len(updates) >= _MAX_UPDATES or (len(updates) >= _MIN_UPDATES and timed >= _SUFFICIENT_SECONDS)


def timing(updates: Sequence[TimedUpdate]) -> UpdateTiming:
    """Summarise the times of updates with equal micro-batches."""
    seconds = [update.seconds for update in updates]
    gap_seconds = [gap for update in updates for gap in update.gap_seconds]
    return UpdateTiming(
        updates=len(updates),
        micro_batch_sizes=updates[0].sizes,
        update_seconds=statistics.median(seconds),
        micro_batch_seconds=statistics.median(gap_seconds) if gap_seconds else None,
        noise=_noise(seconds),
    )


def _noise(seconds: Sequence[float]) -> float:
    """Relative standard error of the median; from the quartiles, which a single slow update hardly moves."""
    if len(seconds) < _MIN_UPDATES:
        return 0.0
    low, median, high = statistics.quantiles(seconds, method="inclusive")
    deviation = (high - low) / _NORMAL_QUARTILES
    return _MEDIAN_ERROR * deviation / math.sqrt(len(seconds)) / median if median > 0 else 0.0


class _Timestamps:
    """Timestamps in the stream of a device, and the gaps between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def add(self) -> None:
        """Record a timestamp at the current position of the stream."""
        if not traits_of(self._device.type).is_gpu:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def gaps(self) -> tuple[float, ...]:
        """Seconds from each timestamp to the next; the device must be synchronised."""
        if self._events:
            return tuple(float(start.elapsed_time(end)) / 1000.0 for start, end in pairwise(self._events))
        return tuple(end - start for start, end in pairwise(self._times))


def _synchronize(device: torch.device) -> None:
    if traits_of(device.type).is_gpu:
        torch.cuda.synchronize(device)
