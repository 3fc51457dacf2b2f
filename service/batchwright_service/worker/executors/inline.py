"""An executor in this process, for tests and for debugging."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from batchwright.driving.probe_runner import WorkloadRunner
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.training import TrainingResult
from batchwright_service.worker.executors.base import Executor, GraceSeconds, OnProgress, TrainingRun

TrainFunction = Callable[[TrainingRun, OnProgress, GraceSeconds], TrainingResult]
"""Makes a run in this process, reports its updates, and ends soon after a stop request."""


class InlineExecutor(Executor):
    """Run probes with ``runner``, which the executor owns, and training runs with ``train``."""

    def __init__(self, device: DeviceInfo, runner: WorkloadRunner, train: TrainFunction) -> None:
        super().__init__(device, runner)
        self._train_function = train

    @override
    def _train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        return self._train_function(run, on_progress, grace_seconds)
