"""Runs everything in this process: for tests, and for someone with a debugger."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from service.executor.base import Executor, OnProgress, StopWithin, TrainingRun
from tuner.requests import ProbeRequest, TuningRequest
from tuner.results import DeviceInfo, ProbeResult
from tuner.training.runs import TrainingResult
from tuner.tuning import ProbeRunner

TrainFunction = Callable[[TrainingRun, OnProgress, StopWithin], TrainingResult]
"""Makes a run in this process: reports its updates, and ends soon when it is told to stop."""


class InlineExecutor(Executor):
    """Probes go to ``runner``, which it owns; runs are made by ``train``."""

    def __init__(self, device: DeviceInfo, runner: ProbeRunner, train: TrainFunction) -> None:
        super().__init__(device)
        self._runner = runner
        self._train_function = train

    @override
    def environment(self) -> dict[str, str]:
        return self._runner.environment()

    @override
    def _check(self, request: TuningRequest, should_stop: Callable[[], bool]) -> None:
        self._runner.check(request, should_stop)

    @override
    def _probe(self, request: ProbeRequest, should_stop: Callable[[], bool]) -> ProbeResult:
        return self._runner.run(request, should_stop)

    @override
    def _train(self, run: TrainingRun, on_progress: OnProgress, stop_within: StopWithin) -> TrainingResult:
        return self._train_function(run, on_progress, stop_within)

    @override
    def _close(self) -> None:
        self._runner.close()
