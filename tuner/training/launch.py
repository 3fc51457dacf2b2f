"""Starts, watches and stops the process of a training run. Never imports torch."""

from __future__ import annotations

from pathlib import Path

from tuner.requests import TrainingRequest
from tuner.results import Recommendation
from tuner.training.runs import RunPaths, TrainingProgress, TrainingResult


class TrainingProcess:
    """One operating-system process that makes, or goes on with, the run in ``directory``.

    ``start`` writes ``recommendation.json`` and ``training.json`` when they are absent, and runs
    ``python -m tuner.training.worker DIRECTORY`` with the recommendation's environment, in a process group of its own
    that dies with this process.
    """

    def __init__(self, directory: Path) -> None:
        self.paths = RunPaths(directory)

    def start(self, recommendation: Recommendation, request: TrainingRequest) -> None:
        """Start it; it resumes from the newest checkpoint of the directory, if there is one."""
        raise NotImplementedError

    def new_progress(self) -> list[TrainingProgress]:
        """Updates finished since the last call."""
        raise NotImplementedError

    def poll(self) -> TrainingResult | None:
        """The result once the process has ended (a crash without one is FAILED, with the log's tail), else none."""
        raise NotImplementedError

    def stop(self, grace_seconds: float = 10.0) -> TrainingResult:
        """SIGTERM, so that it writes a checkpoint; SIGKILL to its whole group after ``grace_seconds``. Idempotent."""
        raise NotImplementedError
