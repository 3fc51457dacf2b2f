"""Times the updates of a probe: when each micro-batch began, and how long the whole took.

Nothing waits for the device between the micro-batches of an update, as nothing does in a run: on CUDA their times come
from events in the stream.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from tuner.schemas.results import UpdateTiming
from tuner.training.micro_batches.loss_window import UpdateReport
from tuner.training.micro_batches.splitting import MicroBatch
from tuner.training.update_engine import UpdateEngine
from tuner.workloads.base import Batch, LossTerms

_FEWEST_UPDATES, _MOST_UPDATES = 3, 50
_ENOUGH_SECONDS = 2.0
"""Short updates are timed until this much time has passed, long ones a few times."""
_NORMAL_QUARTILES = 1.349
"""Standard deviations between the quartiles of a normal distribution."""
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of the median over that of the mean, for a normal distribution."""


@dataclass(frozen=True)
class TimedUpdate:
    """One update, in seconds.

    Attributes:
        sizes: its micro-batches, in order.
        seconds: the whole, until the device was done.
        earlier: for each micro-batch but the last, from its start to that of the next.
    """

    sizes: tuple[int, ...]
    seconds: float
    earlier: tuple[float, ...]


class TimedEngine(UpdateEngine):
    """An engine that times its updates.

    Attributes:
        timed: the last one.
    """

    timed: TimedUpdate

    def update(self, micro_batches: Sequence[MicroBatch]) -> UpdateReport:
        """One update; returns when the device is done with it."""
        self._marks = _Marks(self.device)
        _wait_for(self.device)
        began = time.perf_counter()
        report = super().update(micro_batches)
        _wait_for(self.device)
        seconds = time.perf_counter() - began
        sizes = tuple(it.size for it in micro_batches)
        self.timed = TimedUpdate(sizes, seconds, self._marks.gaps())
        return report

    def _loss(self, model: nn.Module, batch: Batch) -> LossTerms:
        self._marks.add()
        return super()._loss(model, batch)


def enough(updates: Sequence[TimedUpdate]) -> bool:
    """Whether these updates tell how long one takes."""
    timed = sum(it.seconds for it in updates)
    return len(updates) >= _MOST_UPDATES or (len(updates) >= _FEWEST_UPDATES and timed >= _ENOUGH_SECONDS)


def timing(updates: Sequence[TimedUpdate]) -> UpdateTiming:
    """What updates of the same micro-batches took."""
    seconds = [it.seconds for it in updates]
    earlier = [taken for it in updates for taken in it.earlier]
    return UpdateTiming(
        updates=len(updates),
        micro_batch_sizes=updates[0].sizes,
        update_seconds=statistics.median(seconds),
        micro_batch_seconds=statistics.median(earlier) if earlier else None,
        noise=_noise(seconds),
    )


def _noise(seconds: Sequence[float]) -> float:
    """The standard error of the median as a share of it; from the quartiles, as a single slow update means little."""
    if len(seconds) < _FEWEST_UPDATES:
        return 0.0
    low, median, high = statistics.quantiles(seconds, method="inclusive")
    deviation = (high - low) / _NORMAL_QUARTILES
    return _MEDIAN_ERROR * deviation / math.sqrt(len(seconds)) / median if median > 0 else 0.0


class _Marks:
    """Places in a device's work, and the time between them once the device is past them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def add(self) -> None:
        """Note this place."""
        if self._device.type != "cuda":
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def gaps(self) -> tuple[float, ...]:
        """Seconds from each place to the next."""
        if self._events:
            return tuple(float(start.elapsed_time(end)) / 1000.0 for start, end in pairwise(self._events))
        return tuple(end - start for start, end in pairwise(self._times))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
