"""Start Python child processes connected by a socket pair; prestarting overlaps their imports.

Only the standard library is imported here: a prestarted process imports its modules while its parent still does so.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TypeAlias

from tuner.system.processes import die_with_parent, kill_group


@dataclass(frozen=True)
class Start:
    """How a child process is started.

    Attributes:
        module: its function ``main(connection, parent, arguments)`` is called with the connection to the parent
            process, and that process's id.
        arguments: passed to that function.
        environment: variables on top of this process's own.
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class ChildProcess:
    """A running child process. It leads a session of its own, and ends with the thread that starts it.

    Args:
        start: how to start it.

    Raises:
        OSError: when it cannot be started.

    Attributes:
        start: how it was started.
        connection: to the process; it should end when this is closed.
        process: its handle.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rest
        self.connection, theirs = Pipe()
        with theirs:
            try:
                self.process = subprocess.Popen(  # noqa: S603 - our own module, in the interpreter that runs this
                    [sys.executable, "-P", "-m", __name__, start.module, str(os.getpid()), *start.arguments],
                    stdin=theirs.fileno(),
                    stdout=self._output,
                    stderr=self._output,
                    env={**os.environ, **start.environment},
                    start_new_session=True,
                )
            except OSError:
                self._close_files()
                raise

    def output_tail(self, length_bytes: int = 4000) -> str:
        """Read the end of its output."""
        descriptor = self._output.fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, length_bytes, max(0, size - length_bytes)).decode(errors="replace").strip()

    def end(self) -> None:
        """Kill the process and those in its group, such as a compiler; the connection stays readable. Idempotent."""
        if self.process.returncode is None:  # until it is waited for, the group's id is its own
            kill_group(self.process.pid)
        self.process.wait()

    def close(self) -> None:
        """End the process, and close the connection and the output. Idempotent."""
        self.end()
        self._close_files()

    def _close_files(self) -> None:
        self.connection.close()
        self._output.close()


StartChild: TypeAlias = Callable[[Start], ChildProcess]
"""Starts a child process: ``ChildProcess``, or ``Prestarted.take``."""


class Prestarted:
    """Child processes started before they are needed, at most one per module; closing ends those not taken."""

    def __init__(self) -> None:
        self._waiting: dict[str, ChildProcess] = {}

    def prestart(self, start: Start) -> None:
        """Start a process that is needed later. Where that fails nothing happens: ``take`` reports it."""
        with suppress(OSError):
            self._waiting[start.module] = ChildProcess(start)

    def take(self, start: Start) -> ChildProcess:
        """Return the process that was prestarted in just this way, if it still runs, else a new one.

        Raises:
            OSError: when it cannot be started.
        """
        child = self._waiting.pop(start.module, None)
        if child is not None and child.start == start and child.process.poll() is None:
            return child
        if child is not None:
            child.close()
        return ChildProcess(start)

    def close(self) -> None:
        """End the processes that were not taken. Idempotent."""
        while self._waiting:
            self._waiting.popitem()[1].close()


def main(arguments: Sequence[str]) -> None:
    """Connect to the parent process, and run ``main`` of a module.

    Args:
        arguments: the module, the id of the parent process, and the arguments of the module's ``main``.
    """
    module, parent, *rest = arguments
    die_with_parent(int(parent))
    connection = Connection(os.dup(0))
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.close(silence)
    importlib.import_module(module).main(connection, int(parent), rest)


if __name__ == "__main__":
    main(sys.argv[1:])
