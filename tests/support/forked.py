"""Processes of ours that start at once: forked from a server that has torch imported, which takes seconds to import.

They are the real ones in all but their start: training processes, and the fork servers of probes and of estimates. The
server from which they are forked has what a CPU's recommendation sets for the allocator, which is read when a process
starts. Tracing processes have a server of their own, because the stand-in for CUDA is loaded before torch.
"""

import functools
import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import patch

from batchwright.device_traits import CPU_ENVIRONMENT
from batchwright.system.fork_server import spawn
from batchwright.system.subreaper import Channel
from batchwright.training.launching import rank_processes
from batchwright.workloads.preload import late_imports

_PRELOADED = [
    "batchwright.training.worker",
    "batchwright.training.launching.launcher",
    "batchwright.probing.child.fork_server",
    "batchwright.probing.child.worker",
]
_RUNNING = forkserver._forkserver
_TRACING = forkserver.ForkServer()
_STARTING = threading.Lock()
"""Held while a process is started: which server forks it is a global of ``multiprocessing``."""


@contextmanager
def forked_starts(fsync_seconds: float = 0.0) -> Iterator[None]:
    """Within the block a ``TrainingProcess`` and a ``ProbeSupervisor`` start their processes by forks of a server.

    Args:
        fsync_seconds: how much longer ``fsync`` takes a training process than the disk, as on a slow one.
    """

    class Trainer(_ForkedProcess):
        """One rank of a run."""

        def __init__(self, command: list[str], *, env: Mapping[str, str], stdout: BinaryIO, **_: Any) -> None:
            super().__init__(_RUNNING, dict(env), stdout.fileno(), _train, command[-2], fsync_seconds)

    await_server()
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
    await_server()
    variables = {**os.environ, "WORLD_SIZE": "2", "BATCHWRIGHT_RENDEZVOUS": str(folder / "rendezvous")}
    with (folder / "log").open("ab") as log:
        processes = [
            _ForkedProcess(
                _RUNNING, {**variables, "RANK": rank, "LOCAL_RANK": rank}, log.fileno(), main, folder, *arguments
            )
            for rank in ("0", "1")
        ]
    try:
        for process in processes:
            assert process.wait(seconds) == 0, (folder / "log").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _module_with(popen: Callable[..., Any]) -> SimpleNamespace:
    """What is used of ``subprocess``, with another ``Popen``."""
    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)


def _ensure_running(server: forkserver.ForkServer) -> None:
    """Start a server, with all that its processes need imported, unless it runs."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if server is _TRACING else {}
    imported = ["tests.support.tracing_preload"] if server is _TRACING else [*_PRELOADED, *late_imports()]
    with patch.dict(os.environ, CPU_ENVIRONMENT | hidden):
        server.set_forkserver_preload(imported)
        server.ensure_running()


class _ForkedProcess:
    """What is used of ``subprocess.Popen``: a process that leads a session of its own."""

    def __init__(
        self,
        server: forkserver.ForkServer,
        environment: dict[str, str],
        log: int,
        main: Callable[..., object],
        *arguments: Any,
    ) -> None:
        with (
            _STARTING,
            patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
            Connection(os.dup(log)) as told,  # of all that stands for a descriptor, this can be handed on
        ):
            _ensure_running(server)
            self._process = multiprocessing.get_context("forkserver").Process(
                target=_become, args=(Path.cwd(), environment, told, main, *arguments)
            )
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


def _child(command: list[str], *, env: Mapping[str, str], stdin: int, stdout: BinaryIO, **options: Any) -> Any:
    """Fork a fork server of probes or of estimates; start any other child process with `subprocess`."""
    with Connection(os.dup(stdin)) as connection:
        if "batchwright.probing.child.fork_server" in command:
            return _ForkedProcess(_RUNNING, dict(env), stdout.fileno(), _serve, connection)
        if "batchwright.estimation.tracing.worker" in command:
            return _ForkedProcess(_TRACING, dict(env), stdout.fileno(), _serve_estimates, connection, command[-1])
    return subprocess.Popen(command, env=env, stdin=stdin, stdout=stdout, **options)


@functools.cache
def await_server(*, traces: bool = False) -> None:
    """Start the server of tracing processes, or that of others, and wait until it has imported torch.

    A fixture calls it, so that no test pays for the imports.
    """
    _run_to_end(_TRACING if traces else _RUNNING, os._exit, 0)


def run_where_traced(main: Callable[..., None], *arguments: Any) -> None:
    """Run a function to its end in a process that has loaded the stand-in for CUDA and torch, and traced nothing."""
    _run_to_end(_TRACING, main, *arguments)


def _run_to_end(server: forkserver.ForkServer, main: Callable[..., None], *arguments: Any) -> None:
    with tempfile.TemporaryFile() as log:
        environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if server is _TRACING else {})
        status = _ForkedProcess(server, environment, log.fileno(), main, *arguments).wait(600)
        log.seek(0)
        assert status == 0, log.read().decode(errors="replace")[-3000:]


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
    import torch

    from batchwright.training import worker

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # what it reads of the environment when imported
    sys.exit(worker.main([directory, str(os.getppid())]))


def _channel(connection: Connection) -> Channel:
    """The channel of a process whose descriptor was handed on."""
    with connection:
        return Channel(socket.socket(fileno=os.dup(connection.fileno())))


def _serve(connection: Connection) -> None:
    """A fork server: its own ``main``."""
    from batchwright.probing.child import fork_server

    fork_server.main(_channel(connection), [])


def _serve_estimates(connection: Connection, idle_seconds: str) -> None:
    """A fork server of estimates: its own ``main``, but the stand-in for CUDA may be loaded, as torch is."""
    from batchwright.estimation import cuda_shim
    from batchwright.estimation.tracing import worker

    vars(worker)["load_shim"] = lambda: cuda_shim.Shim(cuda_shim._load(cuda_shim.cache_folder()))
    worker.main(_channel(connection), [idle_seconds])
