"""Start Python child processes connected by a socket pair."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TypeAlias

from batchwright.system.processes import die_with_parent, kill_group


@dataclass(frozen=True)
class Start:
    """Parameters of the start of a child process.

    Attributes:
        module: the module whose ``main(connection, parent, arguments)`` is called, with the connection to the parent
            process and the parent's id.
        arguments: passed to ``main``.
        environment: variables in addition to this process's own.
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class ChildProcess:
    """A running child process. It leads its own session, and ends with the thread that started it.

    Args:
        start: the parameters of its start.

    Raises:
        OSError: when the process cannot be started.

    Attributes:
        connection: to the process, which should end when the connection is closed.
        process: the handle of the process.
    """

    def __init__(self, start: Start) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _close_files
        self.connection, child_end = Pipe()
        with child_end:
            try:
                self.process = subprocess.Popen(  # noqa: S603 - this module, in this interpreter
                    [sys.executable, "-P", "-m", __name__, start.module, str(os.getpid()), *start.arguments],
                    stdin=child_end.fileno(),
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
        """Kill the process and its group, such as a compiler. The connection stays readable. Idempotent."""
        if self.process.returncode is None:  # until the process is reaped, its group id cannot be reused
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
"""Starts a child process: ``ChildProcess``, or a function with other variables or threads around it."""


def main(arguments: Sequence[str]) -> None:
    """Connect to the parent process, and run ``main`` of a module.

    Args:
        arguments: the module, the id of the parent process, and the arguments of the module's ``main``.
    """
    module, parent, *rest = arguments
    die_with_parent(int(parent))
    connection = Connection(os.dup(0))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    importlib.import_module(module).main(connection, int(parent), rest)


if __name__ == "__main__":
    main(sys.argv[1:])
