"""Processes of the service that start at once: forked from the process of the tests, whose imports they have.

Apart from their start they are real: each has its own arguments, environment, signals and descriptors. The process of
a service forks those of its workers before it opens a database, because SQLite cannot be used across a fork. Until one
is hired, it waits, and ``processes.children_of`` leaves it out.
"""

import ctypes
import gc
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import IO, Any, NoReturn
from unittest.mock import patch

import batchwright_service.entrypoints.hosted_worker
import batchwright_service.entrypoints.work  # noqa: F401 - imported here, since the processes would take seconds for it
from batchwright.system.fork_server import spawn
from batchwright.system.subreaper import die_with_parent
from batchwright_service.entrypoints import serve
from tests.support.service import processes, running

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # <linux/prctl.h>
_STANDBYS = 2
"""Processes of workers that a service can start: the first, and one after that was killed."""


@contextmanager
def forked_processes() -> Iterator[None]:
    """Within the block, ``spoken`` forks its processes, and these have forked those of their workers."""
    forking = SimpleNamespace(Popen=_started, PIPE=subprocess.PIPE)
    with patch.object(processes, "subprocess", forking):
        yield


class _Process:
    """The part of ``subprocess.Popen`` that ``Spoken`` and ``WorkerProcess`` use."""

    def __init__(self, main: Callable[[], None]) -> None:
        self.returncode: int | None = None
        self.stderr: IO[str] | None = None
        self._waiting = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            _run_to_end(main)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        with self._waiting:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


def _started(
    command: Sequence[str], *, env: Mapping[str, str], stdout: IO[str], stderr: int, text: bool = True
) -> _Process:
    """Start a process as ``Popen`` does."""
    assert (stderr, text) == (subprocess.PIPE, True)
    reading, writing = os.pipe()

    def main() -> None:
        _become({0: os.open(os.devnull, os.O_RDONLY), 1: stdout.fileno(), 2: writing})
        os.environ.clear()
        os.environ.update(env)
        standbys = [_Standby() for _ in range(_STANDBYS)]

        def popen(command: list[str], **named: Any) -> Any:
            is_of_workers = "hosted" in " ".join(command) or "slow_worker" in " ".join(command)
            return standbys.pop(0).hired(command, **named) if is_of_workers else subprocess.Popen(command, **named)

        vars(spawn)["subprocess"] = SimpleNamespace(Popen=popen)
        vars(serve)["app_of"] = running.application
        _run(list(command[1:]))

    process = _Process(main)
    os.close(writing)
    process.stderr = os.fdopen(reading)
    return process


class _Standby(_Process):
    """A process that waits until it is hired for a command."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        service_id = os.getpid()

        def main() -> None:
            die_with_parent(service_id)
            _name(b"standby")
            message, (channel, *_), *_ = socket.recv_fds(theirs, 65_536, 1)
            command, environment = json.loads(message)
            os.environ.clear()
            os.environ.update(environment)
            os.setsid()
            _become({0: channel})
            _name(b"python")
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)  # from here on it is the program's own task
            _run(command[1:])

        with theirs:
            super().__init__(main)

    def hired(self, command: list[str], *, stdin: int, env: Mapping[str, str], **_: Any) -> _Process:
        """Run a command, with a descriptor of this process as its standard input, in a session of its own."""
        with self._ours:
            socket.send_fds(self._ours, [json.dumps([command, dict(env)]).encode()], [stdin])
        return self


def _name(name: bytes) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _run_to_end(main: Callable[[], None]) -> NoReturn:
    """Run a forked process to its end, as an interpreter does."""
    status = 1
    try:
        main()
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - an interpreter would print it, too
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)


def _become(streams: Mapping[int, int], *kept: int) -> None:
    """Set the standard streams, close every other descriptor that is not kept, and forget what the tests have set."""
    gc.freeze()  # no collection closes a file of the tests, whose number may be another file's by then
    for number, source in streams.items():
        os.dup2(source, number)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - their numbers
        if number > 2 and number not in kept:
            with suppress(OSError):
                os.close(number)
    logging.getLogger().handlers.clear()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - descriptors
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - a descriptor
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy warns of a module that was imported before


def _run(arguments: list[str]) -> None:
    """Run a module, a script or a text as ``python`` does."""
    while arguments[0] in {"-P", "-W"}:
        if arguments.pop(0) == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
    kind = arguments[0]
    sys.argv = arguments[kind == "-m" :]
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        program = sys.argv.pop(1)
        exec(program, {"__name__": "__main__"})  # noqa: S102 - of the tests
    else:
        runpy.run_path(kind, run_name="__main__")
