"""Start, monitor and stop the processes of a training run, without importing torch."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from batchwright.device_traits import job_environment, visible_devices
from batchwright.errors import CheckpointError, PeerError, TrainingError
from batchwright.schemas.recommendation import Recommendation
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, SystemTrouble, TrainingProgress, TrainingResult
from batchwright.system.data_roots import ANY_FILE, DataRoots
from batchwright.system.disk_space import free_bytes
from batchwright.system.files import lock_directory, tail, write_atomically
from batchwright.system.host_failures import Cause
from batchwright.system.process_exit import ExitKind, ProcessExit, classify_exit
from batchwright.system.processes import kernel_oom_kills, propagated_environment
from batchwright.training.launching.host_agents import HostAgents, Hosts
from batchwright.training.launching.rank_processes import RankProcesses
from batchwright.training.launching.run_directory import ProgressLog, RunPaths, run_identity
from batchwright.units import counted, format_bytes

_LOG_TAIL_BYTES = 4000
_RESULT_BYTES = 64 * 1024
"""Upper bound on the bytes that a process needs to write its result."""
_LOCK_WAIT_SECONDS = 10.0
"""Longest wait for the lock of the folder, which a process that is being killed may still hold."""
_LINGER_SECONDS = 20.0
"""Longest time for processes to end after the run's result is written: freeing memory takes a second or two."""
PEER_ERROR = f"{PeerError.__module__}.{PeerError.__qualname__}"
_RESULT_NOT_WRITTEN = SystemTrouble(cause=Cause.INPUT_OUTPUT, message="a training process could not write its result")


class TrainingProcess:
    """The operating-system processes, one per rank, that start or resume the run in ``directory``.

    The processes run with the recommendation's environment, each in a process group of its own. The kernel kills them
    when the *thread* that started them ends: start them from a thread that lives as long as the run.

    Args:
        directory: the run's folder.
        restarts: largest number of restarts in a row, without a new checkpoint in between, after a process was killed
            from outside for another reason than memory.
        data_roots: the folders that the run may read its data from.
    """

    def __init__(self, directory: Path, restarts: int = 0, data_roots: DataRoots = ANY_FILE) -> None:
        self.paths = RunPaths(directory)
        self._restarts = restarts
        self._data_roots = data_roots
        self._kills_in_a_row = 0
        self._update_at_last_kill = 0
        self._ranks: RankProcesses | None = None
        self._start_ranks: Callable[[], RankProcesses] | None = None
        self._result: TrainingResult | None = None
        self._stopping = False
        self._log = ProgressLog(self.paths.progress)
        self._oom_kills = 0
        self._result_since: float | None = None
        """Time at which the result of the running processes was first seen."""

    def start(
        self,
        recommendation: Recommendation,
        request: TrainingRequest,
        reported: int | None = None,
        devices: Sequence[str] = (),
        hosts: Hosts | None = None,
    ) -> None:
        """Write the run's files and start the processes, which resume from the newest checkpoint, if there is one.

        Args:
            recommendation: the workload and its plan.
            request: the number of updates, the seed and the checkpoints.
            reported: the newest update that the caller knows. ``new_progress`` then begins with the update after it,
                which an earlier process may have made. Without this argument, it begins with the updates from now on.
            devices: the GPU of each rank, where those are not the first ones of the host; several ranks see no others.
            hosts: the hosts of a run over several.

        Raises:
            TrainingError: when this object was started before, another process trains in the folder, or there are
                other hosts than ``request.nodes``.
            CheckpointError: when the folder holds checkpoints of another run. Its files are not changed.
        """
        if self._ranks is not None:
            raise TrainingError(f"the run in {self.paths.directory} was already started by this object")
        if request.nodes != (count_of_hosts := 1 if hosts is None else hosts.count):
            raise TrainingError(f"the run needs {request.nodes} hosts at once, but has {count_of_hosts}")
        with lock_directory(self.paths.directory, _LOCK_WAIT_SECONDS) as locked:
            if not locked:
                raise TrainingError(
                    f"another process trains in {self.paths.directory}: stop that process, or choose another folder"
                )
            self._refuse_another_run(recommendation, request)
            for path, document in ((self.paths.recommendation, recommendation), (self.paths.request, request)):
                write_atomically(path, document.model_dump_json(indent=2))
            self.paths.micro_batch_bound_file.unlink(missing_ok=True)
        self._oom_kills = kernel_oom_kills()
        environment = job_environment(recommendation.environment, os.environ) | propagated_environment()
        environment |= self._data_roots.to_environment()
        count = request.ranks_per_node(recommendation.request.spec.parallelism.world_size)
        if count > 1 and len(devices) > 1:
            environment |= visible_devices(devices, os.environ)
        self._start_ranks = lambda: (
            RankProcesses(self.paths, count, environment)
            if hosts is None or hosts.count == 1
            else HostAgents(self.paths, count, environment, hosts)
        )
        self._log.skip_to_end()
        self._begin()
        if reported is not None:
            self._log.skip_to_update(reported)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes, in the order of ranks; an empty list before the start."""
        return self._ranks.pids if self._ranks is not None else []

    def _begin(self) -> None:
        """Start the processes, from the newest checkpoint."""
        self.paths.result.unlink(missing_ok=True)
        self._result_since = None
        for path in [*self.paths.failures, *self.paths.directory.glob(".rendezvous-*")]:
            path.unlink(missing_ok=True)
        self._log.truncate_after(self.paths.checkpointed_update() or 0)
        self._ranks = self._start_ranks() if self._start_ranks else None

    def _refuse_another_run(self, recommendation: Recommendation, request: TrainingRequest) -> None:
        if self.paths.checkpointed_update() is None:
            return
        try:
            stored = Recommendation.model_validate_json(self.paths.recommendation.read_bytes())
            stored_request = TrainingRequest.model_validate_json(self.paths.request.read_bytes())
        except (OSError, ValidationError):
            return  # the training process compares the checkpoint
        before, now = run_identity(stored, stored_request), run_identity(recommendation, request)
        differing = [name for name in before if before[name] != now[name]]
        if differing:
            raise CheckpointError(
                f"{self.paths.directory} holds checkpoints of another run (another {', another '.join(differing)}): "
                "train into an empty folder, or remove its checkpoints"
            )

    def new_progress(self) -> list[TrainingProgress]:
        """Updates that the processes have made since the last call. A repeated update is reported again."""
        return self._log.new_lines()

    def poll(self) -> TrainingResult | None:
        """Return the result once all processes have ended, else None.

        After a crash without a result, the result is FAILED with the tail of the log. Ranks that share one model cannot
        divide a micro-batch on the spot: their processes are restarted here, from the newest checkpoint, with the
        smaller micro-batch that the failed rank has recorded.
        """
        if self._result is None and self._ranks is not None:
            # Processes that remain long after the result was written hang in their shutdown.
            if not self.paths.result.exists():
                self._result_since = None
            elif self._result_since is None:
                self._result_since = time.monotonic()
            elif time.monotonic() - self._result_since > _LINGER_SECONDS:
                self._ranks.kill()
        if self._result is None and self._ranks is not None and self._ranks.ended():
            result = self._read_result(self._ranks)
            if not self._stopping and self._should_restart(result, self._ranks):
                self._begin()
            else:
                self._result = result
        return self._result

    def request_stop(self) -> None:
        """Send SIGTERM, so that the run writes a checkpoint and ends. Does not wait: ``poll`` returns the result."""
        self._stopping = True
        if self._ranks is not None:
            self._ranks.terminate()

    def stop(self, grace_seconds: float = 10.0) -> TrainingResult:
        """Send SIGTERM, so that the run writes a checkpoint, and SIGKILL after ``grace_seconds``. Idempotent.

        Raises:
            TrainingError: when the run was never started by this object.
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
        """The run's result, unless a crash or the failure of a single rank explains the end better."""
        result = _read(self.paths.result)
        if result is not None and result.outcome is not RunOutcome.FAILED:
            return result
        failures = [failure for failure in (result, *map(_read, self.paths.failures)) if failure is not None]
        resumable = [failure for failure in failures if failure.smaller_micro_batch is not None]
        if resumable:
            return resumable[0]
        crashed = ranks.crashed()
        if crashed is not None:
            return self._crash_result(*crashed)
        if ranks.lost_host is not None:
            update = self._log.last_update()
            message = f"host {ranks.lost_host} of the run was lost after update {update}"
            trouble = SystemTrouble(cause=Cause.HOST_LOST, message=message)
            return TrainingResult(outcome=RunOutcome.FAILED, message=message, trouble=trouble, updates=update)
        own = [failure for failure in failures if failure.error_type != PEER_ERROR]
        if failures:
            return (own or failures)[0]
        return self._stopped_while_starting() if ranks.terminated() else self._crash_result(*ranks.first_failed())

    def _should_restart(self, result: TrainingResult, ranks: RankProcesses) -> bool:
        """Return whether to restart with smaller micro-batches, or after a process was killed from outside."""
        if result.smaller_micro_batch is not None:
            return True
        crashed = ranks.crashed() if result.outcome is RunOutcome.FAILED else None
        if crashed is None or self._exit_of(crashed[1]).kind is not ExitKind.KILLED:
            return False
        update = self.paths.checkpointed_update() or 0
        self._kills_in_a_row = 1 if update > self._update_at_last_kill else self._kills_in_a_row + 1
        self._update_at_last_kill = update
        return self._kills_in_a_row <= self._restarts

    def _exit_of(self, return_code: int) -> ProcessExit:
        return classify_exit(return_code, kernel_oom_kills() - self._oom_kills)

    def _stopped_while_starting(self) -> TrainingResult:
        """The result of a run that SIGTERM ended while it started, before it could write a result of its own."""
        update = self.paths.checkpointed_update() or 0
        message = f"stopped while starting, {counted(update, 'update')} made"
        return TrainingResult(outcome=RunOutcome.STOPPED, message=message, updates=update)

    def _full_disk_hint(self) -> str:
        """A hint for the message if the disk is full, so that the process could write neither result nor log."""
        free = free_bytes(self.paths.directory)
        if free is None or free >= _RESULT_BYTES:
            return ""
        return (
            f"; the disk of {self.paths.directory} is full ({format_bytes(free)} free): free space, then resume the run"
        )

    def _crash_result(self, rank: int, return_code: int) -> TrainingResult:
        ended = self._exit_of(return_code)
        progress = self._log.last_update()
        name = f"process of rank {rank}" if len(self.pids) > 1 else "process"
        message = f"the training {name} was {ended.kind.value} ({ended.cause}) after update {progress}"
        return TrainingResult(
            outcome=RunOutcome.FAILED,
            message=message + self._full_disk_hint(),
            error_type=ended.cause,
            out_of_memory=ended.kind is ExitKind.KERNEL_OOM,
            trouble=_RESULT_NOT_WRITTEN if return_code == os.EX_IOERR else None,
            traceback=tail(self.paths.log, _LOG_TAIL_BYTES) or None,
            updates=progress,
        )


def _read(path: Path) -> TrainingResult | None:
    """Read a result; None if no process has written a valid one.

    Raises:
        OSError: when the file exists and cannot be read.
    """
    try:
        return TrainingResult.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
