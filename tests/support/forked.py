"""Processes of ours that start at once: forked from a server that has torch imported, which takes seconds to import.

They are the real ones in all but their start: training processes, and the fork servers of probes. The server from which
they are forked has what a CPU's recommendation sets for the allocator, which is read when a process starts.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import patch

from tuner.hardware.allocator_env import CPU_ENVIRONMENT
from tuner.system.fork_server import spawn
from tuner.training.launching import rank_processes
from tuner.workloads.preload import late_imports

_PRELOADED = [
    "tuner.training.worker",
    "tuner.training.launching.launcher",
    "tuner.probing.child.fork_server",
    "tuner.probing.child.worker",
]


@contextmanager
def forked_starts(fsync_seconds: float = 0.0) -> Iterator[None]:
    """Within the block a ``TrainingProcess`` and a ``ProbeSupervisor`` start their processes by forks of a server.

    Args:
        fsync_seconds: how much longer ``fsync`` takes a training process than the disk, as on a slow one.
    """

    class Trainer(_ForkedProcess):
        """One rank of a run."""

        def __init__(self, command: list[str], *, env: Mapping[str, str], stdout: BinaryIO, **_: Any) -> None:
            super().__init__(dict(env), stdout.fileno(), _train, command[-2], fsync_seconds)

    start_server()
    with (
        patch.object(rank_processes, "subprocess", _module_with(Trainer)),
        patch.object(spawn, "subprocess", _module_with(_child)),
    ):
        yield


@contextmanager
def real_starts() -> Iterator[None]:
    """Within the block, which is in one of ``forked_starts``, interpreters are started as ever."""
    with patch.object(rank_processes, "subprocess", subprocess), patch.object(spawn, "subprocess", subprocess):
        yield


def run_two_ranks(folder: Path, main: Callable[..., None], *arguments: Any, seconds: float = 600.0) -> None:
    """Call a module's function in two processes, the ranks of one group, with ``folder`` and the arguments."""
    start_server()
    variables = {**os.environ, "WORLD_SIZE": "2", "BATCHWRIGHT_RENDEZVOUS": str(folder / "rendezvous")}
    with (folder / "log").open("ab") as log:
        processes = [
            _ForkedProcess({**variables, "RANK": rank, "LOCAL_RANK": rank}, log.fileno(), main, folder, *arguments)
            for rank in ("0", "1")
        ]
    try:
        for process in processes:
            assert process.wait(seconds) == 0, (folder / "log").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()


@functools.cache
def start_server() -> None:
    """Start the server, and wait until all is imported there: fixtures pay for that, and not the first test."""
    process = _context().Process(target=int)
    process.start()
    process.join()


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, *late_imports()])
    with patch.dict(os.environ, CPU_ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _module_with(popen: Callable[..., Any]) -> SimpleNamespace:
    """What is used of ``subprocess``, with another ``Popen``."""
    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)


class _ForkedProcess:
    """What is used of ``subprocess.Popen``: a process that leads a session of its own."""

    def __init__(self, environment: dict[str, str], log: int, main: Callable[..., object], *arguments: Any) -> None:
        with Connection(os.dup(log)) as told:  # of all that stands for a descriptor, this can be handed on
            self._process = _context().Process(target=_become, args=(Path.cwd(), environment, told, main, *arguments))
            self._process.start()
        self.pid = int(self._process.pid or 0)
        while self.poll() is None and os.getsid(self.pid) != self.pid:  # ``Popen`` returns later than that
            time.sleep(0.001)

    @property
    def returncode(self) -> int | None:
        """The exit status, once it has ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status, once it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, waited for."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """As ``Popen`` does."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As ``Popen`` does."""
        self._process.kill()


class _ForkedServer(_ForkedProcess):
    """The fork server of a supervisor."""

    def __init__(self, *, env: Mapping[str, str], stdin: int, stdout: BinaryIO) -> None:
        with Connection(os.dup(stdin)) as connection:
            super().__init__(dict(env), stdout.fileno(), _serve, connection)


def _child(command: list[str], **options: Any) -> Any:
    """A fork server of probes by a fork, any other child process as ever."""
    if "tuner.probing.child.fork_server" not in command:
        return subprocess.Popen(command, **options)
    return _ForkedServer(**{name: options[name] for name in ("env", "stdin", "stdout")})


def _become(
    folder: Path, environment: dict[str, str], log: Connection, main: Callable[..., object], *arguments: Any
) -> None:
    """In the forked process: what ``Popen`` and the interpreter's start would do, and the rest of its life."""
    os.setsid()
    os.chdir(folder)
    with log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [it for it in environment.get("PYTHONPATH", "").split(os.pathsep) if it and it not in sys.path]
    gc.freeze()  # what the server has imported: to look through it would copy it all into this process
    main(*arguments)


def _train(directory: str, fsync_seconds: float) -> None:
    """A training process: the worker's own ``main``."""
    real = os.fsync

    def slow_fsync(fd: Any) -> None:
        time.sleep(fsync_seconds)
        real(fd)

    os.fsync = slow_fsync
    import torch  # noqa: PLC0415 - only where it is imported already

    from tuner.training import worker  # noqa: PLC0415 - likewise

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # what it reads of the environment when imported
    sys.exit(worker.main([directory, str(os.getppid())]))


def _serve(connection: Connection) -> None:
    """A fork server: its own ``main``."""
    from tuner.probing.child import fork_server  # noqa: PLC0415 - only where torch is imported already

    fork_server.main(connection, os.getppid(), [])
