"""Start Python child processes connected by a channel."""

import importlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from batchwright.system.processes import kill_group
from batchwright.system.subreaper import Channel, die_with_parent


class ChildProcess:
    """A running child process. It leads its own session, and ends with the thread that started it.

    Args:
        module: the module whose ``main(channel, arguments)`` is called, with the channel to this process.
        arguments: passed to ``main``.
        environment: variables in addition to this process's own.
        keeps_output: whether the output goes to a file for ``output_tail``, and not to that of this process.
        longest_bytes: length of the longest message of the child process.

    Raises:
        OSError: when the process cannot be started.

    Attributes:
        channel: to the process, which should end when the channel is closed.
        process: the handle of the process.
    """

    def __init__(
        self,
        module: str,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        keeps_output: bool = True,
        longest_bytes: int = 65536,
    ) -> None:
        self._output = tempfile.TemporaryFile() if keeps_output else None  # noqa: SIM115 - closed in _close_files
        self.channel, theirs = Channel.pair(longest_bytes)
        with theirs:
            try:
                self.process = subprocess.Popen(  # noqa: S603 - this module, in this interpreter
                    [sys.executable, "-P", "-m", __name__, module, str(os.getpid()), *arguments],
                    stdin=theirs.fileno(),
                    stdout=self._output,
                    stderr=self._output,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
            except OSError:
                self._close_files()
                raise

    def output_tail(self, length_bytes: int = 4000) -> str:
        """Read the end of its output, if that is kept."""
        if self._output is None:
            return ""
        descriptor = self._output.fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, length_bytes, max(0, size - length_bytes)).decode(errors="replace").strip()

    def close(self) -> None:
        """Kill the process and its group, such as a compiler, and close the channel and the output. Idempotent."""
        if self.process.returncode is None:  # until the process is reaped, its group id cannot be reused
            kill_group(self.process.pid)
        self.process.wait()
        self._close_files()

    def _close_files(self) -> None:
        self.channel.close()
        if self._output is not None:
            self._output.close()


StartChild: TypeAlias = Callable[[str, tuple[str, ...], Mapping[str, str]], ChildProcess]
"""Starts a child process: ``ChildProcess``, or a function with other variables or threads around it."""


def main(arguments: Sequence[str]) -> None:
    """Connect to the parent process, and run ``main`` of a module.

    Args:
        arguments: the module, the id of the parent process, and the arguments of the module's ``main``.
    """
    module, parent, *rest = arguments
    die_with_parent(int(parent))
    channel = Channel(socket.socket(fileno=os.dup(0)))
    # Programs that this process starts must not inherit the channel as their standard input.
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    importlib.import_module(module).main(channel, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
