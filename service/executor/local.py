"""Runs probes and jobs as processes of this host: never torch in this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from service.executor.base import Executor, OnProgress, StopWithin, TrainingRun
from tuner.results import DeviceInfo
from tuner.training.launch import TrainingProcess
from tuner.training.runs import TrainingResult
from tuner.tuning import ProbeRunner

_POLL_SECONDS = 0.1
"""How often a running job is looked at: bounds how late its progress and its end are seen."""


class LocalExecutor(Executor):
    """Probes go to a runner that starts processes; each job is a process per rank."""

    def __init__(
        self,
        device: DeviceInfo,
        runner: ProbeRunner,
        new_process: Callable[[Path], TrainingProcess] = TrainingProcess,
    ) -> None:
        super().__init__(device, runner)
        self._new_process = new_process

    @override
    def _train(self, run: TrainingRun, on_progress: OnProgress, stop_within: StopWithin) -> TrainingResult:
        process = self._new_process(run.directory)
        process.start(run.recommendation, run.request)
        try:
            result = _watch(process, on_progress, stop_within)
            on_progress(process.new_progress())
        except BaseException:
            process.stop(grace_seconds=0.0)
            raise
        return result


def _watch(process: TrainingProcess, on_progress: OnProgress, stop_within: StopWithin) -> TrainingResult:
    """The result of the process, stopped when ``stop_within`` says so."""
    while (result := process.poll()) is None:
        on_progress(process.new_progress())
        if (grace := stop_within()) is not None:
            return process.stop(grace_seconds=grace)
        time.sleep(_POLL_SECONDS)
    return result
