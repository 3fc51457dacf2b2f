"""An executor with processes of this host; this process never imports torch."""

import math
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from batchwright.commands.command_job import CommandJob
from batchwright.driving.probe_runner import ProbeRunner, WorkloadRunner
from batchwright.errors import StorageError
from batchwright.hardware import inventory
from batchwright.hardware.memory_in_use import MemoryInUse, memory_in_use
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.training import CommandProgress, RunOutcome, RunProgress, TrainingResult
from batchwright.system.data_roots import ANY_FILE, DataRoots
from batchwright.system.files import lock_directory
from batchwright.training.launching.host_agents import Hosts
from batchwright.training.launching.launcher import TrainingProcess
from batchwright_service.worker.executors.base import Executor, GraceSeconds, OnProgress, TrainingRun

_POLL_SECONDS = 0.1
"""The interval at which a running job is polled: bounds the delay of its progress and its end."""
_RESTARTS = 3
"""Consecutive restarts, without a checkpoint in between, of a job whose process was killed."""


class RunProcess(Protocol):
    """The running processes of a job."""

    def new_progress(self) -> Sequence[RunProgress]:
        """Return the progress since the last call."""

    def poll(self) -> TrainingResult | None:
        """Return the result once all processes have ended, else None."""

    def request_stop(self) -> None:
        """Ask the processes to end. Does not wait."""

    def stop(self, grace_seconds: float) -> object:
        """End the processes, at the latest after ``grace_seconds``. Then ``poll`` returns the result. Idempotent."""


class LocalExecutor(Executor):
    """Run probes with ``runner``, and jobs as processes of this host.

    Args:
        device: the device.
        runner: runs the probes of workloads.
        new_process: makes the process of a job whose workload is described.
        data_roots: the folders from which such a job may read.
        check_command: checks that a job's command is registered on this host; raises ``SpecError`` if not.
        hosts: the hosts that a cluster's engine has assigned, this one included; without it this one alone.
        commands: runs the probes of commands; ``runner`` too if absent.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - built in one place
        self,
        device: DeviceInfo,
        runner: WorkloadRunner,
        new_process: Callable[[Path], TrainingProcess] | None = None,
        data_roots: DataRoots = ANY_FILE,
        check_command: Callable[[CommandSpec], None] = lambda _spec: None,
        hosts: Hosts | None = None,
        commands: ProbeRunner | None = None,
    ) -> None:
        super().__init__(device, runner, commands)
        self._check_command = check_command
        self._hosts = hosts
        self._new_process = new_process or partial(TrainingProcess, restarts=_RESTARTS, data_roots=data_roots)

    @override
    def lost_device(self) -> str | None:
        return inventory.device_failure(self.device)

    @override
    def memory_in_use(self) -> MemoryInUse | None:
        return memory_in_use(self.device)

    @override
    def train(self, run: TrainingRun, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
        if not _await_folder(run.directory, grace_seconds):
            return TrainingResult(outcome=RunOutcome.STOPPED, message="stopped before it began", updates=0)
        if (command := run.recommendation.request.command) is not None:
            self._check_command(command)
            with CommandJob(run.directory) as job:
                job.start(run.recommendation, run.request.updates, run.devices)
                return _follow(CommandRun(job), on_progress, grace_seconds)
        process = self._new_process(run.directory)
        process.start(run.recommendation, run.request, run.reported, run.devices, self._hosts)
        return _follow(process, on_progress, grace_seconds)


def _await_folder(directory: Path, grace_seconds: GraceSeconds) -> bool:
    """Wait until no process trains in ``directory``; false when a stop is requested first.

    The previous worker may be suspended while its processes continue in a folder that both hosts share. They are ended
    when it wakes, or end by themselves.
    """
    while True:
        with lock_directory(directory, timeout_seconds=0.0) as alone:
            if alone:
                return True
        if grace_seconds() is not None:
            return False
        time.sleep(_POLL_SECONDS)


def _follow(process: RunProcess, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
    """Return the result of the process, and report its progress; no process outlives an error."""
    try:
        result = _watch(process, on_progress, grace_seconds)
        on_progress(process.new_progress())
    except BaseException:
        process.stop(grace_seconds=0.0)
        raise
    return result


def _watch(process: RunProcess, on_progress: OnProgress, grace_seconds: GraceSeconds) -> TrainingResult:
    """Return the result of the process; stop it when ``grace_seconds`` says so, and kill it at the end of the grace.

    ``grace_seconds`` is polled while the process ends: a more pressing reason leaves less time.
    """
    deadline = math.inf
    while (result := process.poll()) is None:
        on_progress(process.new_progress())
        if (grace := grace_seconds()) is not None:
            if deadline == math.inf:
                process.request_stop()
            deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() >= deadline:
                process.stop(grace_seconds=0.0)
                continue
        time.sleep(_POLL_SECONDS)
    return result


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
