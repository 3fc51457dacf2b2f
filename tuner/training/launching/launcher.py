"""Starts, watches and stops the processes of a training run. Never imports torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from tuner.errors import CheckpointError, PeerError, TrainingError
from tuner.hardware.allocator_env import job_environment
from tuner.hardware.failures import ExitKind, ProcessExit, classify_exit
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.requests import TrainingRequest
from tuner.schemas.training import RunOutcome, SystemTrouble, TrainingProgress, TrainingResult
from tuner.system.data_roots import ANYWHERE, DataRoots
from tuner.system.disk_space import free_bytes
from tuner.system.files import holding, tail, write_atomically
from tuner.system.host_failures import Cause
from tuner.system.processes import handed_on, kernel_oom_kills
from tuner.training.launching.rank_processes import RankProcesses
from tuner.training.launching.run_directory import ProgressLog, RunPaths, decisive
from tuner.units import format_bytes

_LOG_TAIL_BYTES = 4000
_ROOM_FOR_A_RESULT = 64 * 1024
"""Bytes that a process needs to say how it ended, generously."""
_HELD_SECONDS = 10.0
"""How long a process of this run that is just being killed may take to be gone."""
_LINGER_SECONDS = 20.0
"""How long processes may take to end after they have left the run's result: freeing memory takes a second or two."""
PEER_ERROR = f"{PeerError.__module__}.{PeerError.__qualname__}"


_UNWRITTEN = SystemTrouble(cause=Cause.INPUT_OUTPUT, message="a training process could not write its result")


class TrainingProcess:
    """The operating-system processes, one per rank, that make, or go on with, the run in ``directory``.

    They run with the recommendation's environment, each in a process group of its own, and die with the *thread* that
    started them (the kernel ties the two): start them from one that lives as long as the run.

    Args:
        directory: the run's folder.
        restarts: how often in a row, without a new checkpoint in between, they are started again when one of them was
            killed from outside, other than for memory.
        data_roots: the folders that the run may read its data from.
    """

    def __init__(self, directory: Path, restarts: int = 0, data_roots: DataRoots = ANYWHERE) -> None:
        self.paths = RunPaths(directory)
        self._restarts = restarts
        self._data_roots = data_roots
        self._losses = 0
        self._lost_after = 0
        self._ranks: RankProcesses | None = None
        self._starts: Callable[[], RankProcesses] | None = None
        self._result: TrainingResult | None = None
        self._stopping = False
        self._log = ProgressLog(self.paths.progress)
        self._oom_kills = 0
        self._result_since: float | None = None
        """When the result of the processes that run was first seen."""

    def start(self, recommendation: Recommendation, request: TrainingRequest, told: int | None = None) -> None:
        """Write the run's files and start; it resumes from the newest checkpoint, if there is one.

        Args:
            recommendation: what to train, and how.
            request: for how long.
            told: the newest update that the caller has heard of, if ``new_progress`` shall begin after it: with what
                an earlier process has made that nobody heard of. Else it begins with what is made from now on.

        Raises:
            TrainingError: when it was started before, or another process trains in the folder.
            CheckpointError: when the folder holds checkpoints of another run. Its files stay as they are.
        """
        if self._ranks is not None:
            raise TrainingError(f"the run in {self.paths.directory} was already started by this object")
        with holding(self.paths.directory, _HELD_SECONDS) as alone:
            if not alone:
                raise TrainingError(
                    f"another process trains in {self.paths.directory}: stop it, or name another folder"
                )
            self._refuse_another_run(recommendation, request)
            for path, document in ((self.paths.recommendation, recommendation), (self.paths.request, request)):
                write_atomically(path, document.model_dump_json(indent=2))
            self.paths.lowered.unlink(missing_ok=True)
        self._oom_kills = kernel_oom_kills()
        environment = job_environment(recommendation.environment, os.environ) | handed_on()
        environment |= self._data_roots.variables()
        count = request.processes_per_node or recommendation.request.spec.parallelism.world_size
        self._starts = lambda: RankProcesses(self.paths, count, environment)
        self._log.skip_to_end()
        self._begin()
        if told is not None:
            self._log.skip_past(told)

    @property
    def pids(self) -> list[int]:
        """The processes' ids, in the order of ranks; none before the start."""
        return self._ranks.pids if self._ranks is not None else []

    def _begin(self) -> None:
        """Start the processes, where the newest checkpoint is."""
        self.paths.result.unlink(missing_ok=True)
        self._result_since = None
        for path in [*self.paths.failures, *self.paths.directory.glob(".rendezvous-*")]:
            path.unlink(missing_ok=True)
        self._log.forget_after(self.paths.checkpointed_update() or 0)
        self._ranks = self._starts() if self._starts else None

    def _refuse_another_run(self, recommendation: Recommendation, request: TrainingRequest) -> None:
        if self.paths.checkpointed_update() is None:
            return
        try:
            there = Recommendation.model_validate_json(self.paths.recommendation.read_bytes())
            asked = TrainingRequest.model_validate_json(self.paths.request.read_bytes())
        except (OSError, ValidationError):
            return  # the process compares the checkpoint itself
        before, now = decisive(there, asked), decisive(recommendation, request)
        differing = [name for name in before if before[name] != now[name]]
        if differing:
            raise CheckpointError(
                f"{self.paths.directory} holds checkpoints of another run (another {', another '.join(differing)}): "
                "train into an empty folder, or remove its checkpoints"
            )

    def new_progress(self) -> list[TrainingProgress]:
        """Updates the processes have made since the last call; those that are made again are told again."""
        return self._log.new_lines()

    def poll(self) -> TrainingResult | None:
        """The result once all processes have ended (a crash without one is FAILED, with the log's tail), else none.

        Ranks that share one model cannot divide a micro-batch on the spot: they are started anew here, from the newest
        checkpoint, with the smaller one that the failed rank has left word of.
        """
        if self._result is None and self._ranks is not None:
            self._end_what_lingers(self._ranks)
        if self._result is None and self._ranks is not None and self._ranks.ended():
            result = self._read_result(self._ranks)
            if not self._stopping and (result.smaller_micro_batch is not None or self._was_lost(result, self._ranks)):
                self._begin()
            else:
                self._result = result
        return self._result

    def _end_what_lingers(self, ranks: RankProcesses) -> None:
        """Kill processes that are there long after the run's result: at their end they wait for something for ever."""
        if not self.paths.result.exists():
            self._result_since = None
        elif self._result_since is None:
            self._result_since = time.monotonic()
        elif time.monotonic() - self._result_since > _LINGER_SECONDS:
            ranks.kill()

    def ask_to_stop(self) -> None:
        """SIGTERM, so that it writes a checkpoint and ends: ``poll`` tells when it has. Does not wait."""
        self._stopping = True
        if self._ranks is not None:
            self._ranks.terminate()

    def stop(self, grace_seconds: float = 10.0) -> TrainingResult:
        """SIGTERM, so that it writes a checkpoint; SIGKILL to all of it after ``grace_seconds``. Idempotent.

        Raises:
            TrainingError: when it was never started.
        """
        if self._ranks is None:
            raise TrainingError(f"the run in {self.paths.directory} was not started by this object")
        self._stopping = True
        self._ranks.stop(grace_seconds)
        result = self.poll()
        if result is None:  # the processes have been waited for: there is a result
            raise TrainingError(f"the run in {self.paths.directory} ended without a status")
        return result

    def _read_result(self, ranks: RankProcesses) -> TrainingResult:
        """What the run left: its result; but a crash, or the failure of a single rank, explains it better."""
        result = _read(self.paths.result)
        if result is not None and result.outcome is not RunOutcome.FAILED:
            return result
        failures = [it for it in (result, *map(_read, self.paths.failures)) if it is not None]
        resumable = [it for it in failures if it.smaller_micro_batch is not None]
        if resumable:
            return resumable[0]
        crashed = ranks.crashed()
        if crashed is not None:
            return self._crashed(*crashed)
        own = [it for it in failures if it.error_type != PEER_ERROR]
        if failures:
            return (own or failures)[0]
        return self._stopped_early() if ranks.terminated() else self._crashed(*ranks.first_failed())

    def _was_lost(self, result: TrainingResult, ranks: RankProcesses) -> bool:
        """Whether someone killed a process of a run that can go on, and it may be tried again."""
        crashed = ranks.crashed() if result.outcome is RunOutcome.FAILED else None
        if crashed is None or self._exit_of(crashed[1]).kind is not ExitKind.KILLED:
            return False
        update = self.paths.checkpointed_update() or 0
        self._losses = 1 if update > self._lost_after else self._losses + 1
        self._lost_after = update
        return self._losses <= self._restarts

    def _exit_of(self, return_code: int) -> ProcessExit:
        status = -return_code if return_code < 0 else return_code << 8
        return classify_exit(status, kernel_oom_kills() - self._oom_kills)

    def _stopped_early(self) -> TrainingResult:
        """SIGTERM ends a process by itself only while it starts: later it answers with a checkpoint and a result."""
        update = self.paths.checkpointed_update() or 0
        message = f"stopped while starting, {update} updates made"
        return TrainingResult(outcome=RunOutcome.STOPPED, message=message, updates=update)

    def _full_disk(self) -> str:
        """Name a full disk, on which the process could leave neither result nor log."""
        free = free_bytes(self.paths.directory)
        if free is None or free >= _ROOM_FOR_A_RESULT:
            return ""
        return f"; the disk of {self.paths.directory} is full ({format_bytes(free)} free): make room, and go on"

    def _crashed(self, rank: int, return_code: int) -> TrainingResult:
        ended = self._exit_of(return_code)
        progress = self._log.last_update()
        name = f"process of rank {rank}" if len(self.pids) > 1 else "process"
        message = f"the training {name} was {ended.kind.value} ({ended.cause}) after update {progress}"
        return TrainingResult(
            outcome=RunOutcome.FAILED,
            message=message + self._full_disk(),
            error_type=ended.cause,
            trouble=_UNWRITTEN if return_code == os.EX_IOERR else None,
            traceback=tail(self.paths.log, _LOG_TAIL_BYTES) or None,
            updates=progress,
        )


def _read(path: Path) -> TrainingResult | None:
    """A result; none where no process has left one.

    Raises:
        OSError: when it is there and cannot be read now.
    """
    try:
        return TrainingResult.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
