"""The run of a job whose workload is a registered command."""

from __future__ import annotations

import signal

from batchwright.commands.command_job import CommandJob
from batchwright.errors import StorageError
from batchwright.schemas.training import CommandProgress, TrainingResult


class CommandRun:
    """A started command. A ``batchwright_service.worker.executors.local.RunProcess``."""

    def __init__(self, job: CommandJob) -> None:
        self._job = job
        self._reported = 0

    def new_progress(self) -> list[CommandProgress]:
        """Return the progress, if the command has made updates since the last call."""
        progress = self._job.progress
        if progress.update <= self._reported:
            return []
        self._reported = progress.update
        return [progress]

    def poll(self) -> TrainingResult | None:
        """Return the result once every process of the command has ended, else None."""
        try:
            return self._job.poll()
        except StorageError:  # no space for the file of the result, which the store has too
            return self._job.poll()

    def request_stop(self) -> None:
        """Send SIGTERM to the process group of the command, which may end by itself. Does not wait."""
        self._job.request_stop(signal.SIGTERM)

    def stop(self, grace_seconds: float = 0.0) -> TrainingResult | None:
        """Kill every process of the command, and return its result. Idempotent.

        Args:
            grace_seconds: not used: the caller of ``request_stop`` has waited.
        """
        del grace_seconds
        self._job.kill()
        return self.poll()
