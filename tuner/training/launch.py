"""Starts, watches and stops the process of a training run. Never imports torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from tuner.errors import CheckpointError, TrainingError
from tuner.files import holding, tail, write_atomically
from tuner.memory.environment import job_environment
from tuner.memory.failures import classify_exit
from tuner.processes import kernel_oom_kills, kill_group
from tuner.requests import TrainingRequest
from tuner.results import Recommendation
from tuner.training.runs import ProgressLog, RunOutcome, RunPaths, TrainingProgress, TrainingResult

_LOG_TAIL_BYTES = 4000
_HELD_SECONDS = 10.0
"""How long a process of this run that is just being killed may take to be gone."""


def training_command(directory: Path) -> list[str]:
    """The command that makes, or goes on with, the run in ``directory``."""
    return [sys.executable, "-P", "-m", "tuner.training.worker", str(directory)]


class TrainingProcess:
    """One operating-system process that makes, or goes on with, the run in ``directory``.

    It runs with the recommendation's environment, in a process group of its own, and dies with the *thread* that
    started it (the kernel ties the two): start it from one that lives as long as the run.
    """

    def __init__(self, directory: Path) -> None:
        self.paths = RunPaths(directory)
        self._process: subprocess.Popen[bytes] | None = None
        self._result: TrainingResult | None = None
        self._log = ProgressLog(self.paths.progress)
        self._oom_kills = 0

    def start(self, recommendation: Recommendation, request: TrainingRequest) -> None:
        """Write the run's files and start; it resumes from the newest checkpoint, if there is one.

        Raises:
            TrainingError: when it was started before, or another process trains in the folder.
            CheckpointError: when the folder holds checkpoints of another run. Its files stay as they are.
        """
        if self._process is not None:
            raise TrainingError(f"the run in {self.paths.directory} was already started by this object")
        with holding(self.paths.directory, _HELD_SECONDS) as alone:
            if not alone:
                raise TrainingError(
                    f"another process trains in {self.paths.directory}: stop it, or name another folder"
                )
            self._refuse_another_run(recommendation, request)
            self._write_files(recommendation, request)
        self._oom_kills = kernel_oom_kills()
        with self.paths.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*training_command(self.paths.directory), str(os.getpid())],
                env=job_environment(recommendation.environment, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _refuse_another_run(self, recommendation: Recommendation, request: TrainingRequest) -> None:
        if self.paths.checkpointed_update() is None:
            return
        try:
            there = Recommendation.model_validate_json(self.paths.recommendation.read_bytes())
            asked = TrainingRequest.model_validate_json(self.paths.request.read_bytes())
        except (OSError, ValidationError):
            return  # the process compares the checkpoint itself
        before, now = _decisive(there, asked), _decisive(recommendation, request)
        differing = [name for name in before if before[name] != now[name]]
        if differing:
            raise CheckpointError(
                f"{self.paths.directory} holds checkpoints of another run (another {', another '.join(differing)}): "
                "train into an empty folder, or remove its checkpoints"
            )

    def _write_files(self, recommendation: Recommendation, request: TrainingRequest) -> None:
        for path, document in ((self.paths.recommendation, recommendation), (self.paths.request, request)):
            write_atomically(path, document.model_dump_json(indent=2))
        self.paths.result.unlink(missing_ok=True)
        self._log.forget_after(self.paths.checkpointed_update() or 0)
        self._log.skip_to_end()

    def new_progress(self) -> list[TrainingProgress]:
        """Updates this process has made since the last call."""
        return self._log.new_lines()

    def poll(self) -> TrainingResult | None:
        """The result once the process has ended (a crash without one is FAILED, with the log's tail), else none."""
        if self._result is None and self._process is not None and self._process.poll() is not None:
            kill_group(self._process.pid)
            self._result = self._read_result(self._process.returncode)
        return self._result

    def stop(self, grace_seconds: float = 10.0) -> TrainingResult:
        """SIGTERM, so that it writes a checkpoint; SIGKILL to its whole group after ``grace_seconds``. Idempotent.

        Raises:
            TrainingError: when it was never started.
        """
        if self._process is None:
            raise TrainingError(f"the run in {self.paths.directory} was not started by this object")
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                kill_group(self._process.pid)
                self._process.wait()
        result = self.poll()
        if result is None:  # the process has been waited for: there is a result
            raise TrainingError(f"the run in {self.paths.directory} ended without a status")
        return result

    def _read_result(self, return_code: int) -> TrainingResult:
        try:
            return TrainingResult.model_validate_json(self.paths.result.read_bytes())
        except (OSError, ValidationError):
            return self._stopped_early() if return_code == -signal.SIGTERM else self._crashed(return_code)

    def _stopped_early(self) -> TrainingResult:
        """SIGTERM ends a process by itself only while it starts: later it answers with a checkpoint and a result."""
        update = self.paths.checkpointed_update() or 0
        message = f"stopped while starting, {update} updates made"
        return TrainingResult(outcome=RunOutcome.STOPPED, message=message, updates=update)

    def _crashed(self, return_code: int) -> TrainingResult:
        status = -return_code if return_code < 0 else return_code << 8
        ended = classify_exit(status, kernel_oom_kills() - self._oom_kills)
        progress = self._log.last_update()
        return TrainingResult(
            outcome=RunOutcome.FAILED,
            message=f"the training process was {ended.kind.value} ({ended.cause}) after update {progress}",
            error_type=ended.cause,
            traceback=tail(self.paths.log, _LOG_TAIL_BYTES) or None,
            updates=progress,
        )


def _decisive(recommendation: Recommendation, request: TrainingRequest) -> dict[str, object]:
    """What must be the same for a run to go on, as far as it is known before the data is read."""
    spec = recommendation.request.spec
    return {
        "spec": spec.model_dump(mode="json"),
        "effective batch size": recommendation.effective_batch_size.achieved,
        "seed": request.seed,
        "number of updates under a schedule": request.updates if spec.schedule.name != "constant" else None,
    }
