"""The processes of a run on one host, one per rank, started and ended together. Never imports torch."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchwright.system.processes import kill_group
from batchwright.training.launching.run_directory import RunPaths

_PEERS_GRACE_SECONDS = 10.0
"""Time for the other ranks to notice that one has failed, and to write their results, before they are killed."""
_WORKER = "batchwright.training.worker"


def training_command(directory: Path, processes: int = 1, python: str = sys.executable, *, hosts: int = 1) -> list[str]:
    """Command that starts or resumes the run in ``directory``, with ``torchrun`` for several ranks.

    Args:
        directory: the run's folder.
        processes: number of ranks of each host.
        python: the interpreter.
        hosts: number of hosts. With several, each runs the command, with a ``PET_NODE_RANK`` of its own, and with
            ``PET_MASTER_ADDR`` and ``PET_MASTER_PORT`` of the host of rank 0.
    """
    if processes * hosts == 1:
        return [python, "-P", "-m", _WORKER, str(directory)]
    meeting = ["--standalone"] if hosts == 1 else [f"--nnodes={hosts}", "--rdzv-backend=static"]
    ranks = ["-m", "torch.distributed.run", *meeting, f"--nproc-per-node={processes}"]
    return [python, "-P", *ranks, "-m", _WORKER, str(directory)]


class RankProcesses:
    """One process per rank, started by construction.

    ``torchrun`` would add three seconds to every start, leave its workers alive when it is killed, and report no exit
    status of a single rank. ``torchrun`` can start the processes too (see ``batchwright.training.worker``).

    Args:
        paths: the run's files; all ranks write to the same log.
        count: number of ranks.
        environment: environment of every process.
    """

    def __init__(self, paths: RunPaths, count: int, environment: Mapping[str, str]) -> None:
        rendezvous = paths.directory / f".rendezvous-{uuid.uuid4().hex}"
        self._rendezvous = rendezvous if count > 1 else None
        self._failed_at: float | None = None
        self._killed: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(paths, count, environment, rendezvous)
        except BaseException:
            self.kill()  # the started ones would wait for the others
            raise

    def _start(self, paths: RunPaths, count: int, environment: Mapping[str, str], rendezvous: Path) -> None:
        for rank in range(count):
            command = [*training_command(paths.directory), str(os.getpid())]
            self._launch(command, _environment(environment, rank, count, rendezvous), paths.log)

    def _launch(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start a process in a session of its own, which appends its output to the log."""
        with log.open("ab") as stream:
            process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes, in the order of ranks."""
        return [process.pid for process in self._processes]

    @property
    def return_codes(self) -> list[int]:
        """Exit statuses in the order of ranks, once all have ended; negative for signals."""
        return [int(process.wait()) for process in self._processes]

    def ended(self) -> bool:
        """Return whether all processes have ended. After one has failed, kill the others at the end of their grace."""
        statuses = [process.poll() for process in self._processes]
        if any(status not in (None, 0) for status in statuses) and None in statuses:
            self._failed_at = self._failed_at or time.monotonic()
            if time.monotonic() - self._failed_at > _PEERS_GRACE_SECONDS:
                self.kill()
        if None in statuses:
            return False
        for process in self._processes:
            kill_group(process.pid)  # descendants that it has left
        if self._rendezvous is not None:
            self._rendezvous.unlink(missing_ok=True)
        return True

    def crashed(self) -> tuple[int, int] | None:
        """The first rank that an external signal has ended, and its status; None without one."""
        signalled = [(rank, code) for rank, code in enumerate(self.return_codes) if code < 0]
        external = ((rank, code) for rank, code in signalled if code != -signal.SIGTERM and rank not in self._killed)
        return next(external, None)

    @property
    def lost_host(self) -> int | None:
        """Number of a host that is gone: none of a run on this host alone."""
        return None

    def terminated(self) -> bool:
        """Return whether SIGTERM ended a process that had not installed its handler yet."""
        return -signal.SIGTERM in self.return_codes

    def first_failed(self) -> tuple[int, int]:
        """The first rank whose exit status is not 0, and the status; rank 0 and 0 without one."""
        codes = self.return_codes
        return next(((rank, code) for rank, code in enumerate(codes) if code), (0, 0))

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM to each process, and SIGKILL to the ones that remain after ``grace_seconds``."""
        self.terminate()
        deadline = time.monotonic() + grace_seconds
        try:
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()

    def terminate(self) -> None:
        """Send SIGTERM to each process."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to each process and its descendants, and wait for them."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self._killed.add(rank)
                kill_group(process.pid)
                process.wait()


_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "BATCHWRIGHT_RENDEZVOUS")


def _environment(base: Mapping[str, str], rank: int, count: int, rendezvous: Path) -> dict[str, str]:
    """``base`` with the rank in ``torchrun``'s variables, which a single process has none of."""
    environment = {name: value for name, value in base.items() if name not in _RANK_VARIABLES}
    if count == 1:
        return environment
    values = (str(rank), str(rank), str(count), str(rendezvous.resolve()))
    return with_shared_threads(environment, count) | dict(zip(_RANK_VARIABLES, values, strict=True))


def with_shared_threads(environment: Mapping[str, str], count: int) -> dict[str, str]:
    """``environment`` with an equal share of the processor for each rank, unless a number of threads is set."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), **environment}
