"""Python processes of ours at the other end of a socket, started when they are needed or ahead of that. No torch.

Only the standard library is imported here: a process that is started ahead imports what it needs while the one that
will ask it still does the same.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuner.system.processes import die_with_parent, kill_group


@dataclass(frozen=True)
class Start:
    """How a process is started.

    Attributes:
        module: its function ``main(connection, parent, arguments)`` is called, with a socket to the process that
            started it, and the id of that.
        arguments: what it is told besides.
        environment: variables on top of this process's own.
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class Partner:
    """A running process. It leads a session of its own, and ends with the thread that starts it.

    Args:
        start: how to start it.

    Raises:
        OSError: when it cannot be started.

    Attributes:
        connection: to the process; it should end when this is closed.
        process: to be waited for.
    """

    def __init__(self, start: Start) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rest
        self.connection, theirs = socket.socketpair()
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
                self.close()
                raise

    def said(self, most_bytes: int) -> str:
        """The end of what it has printed."""
        descriptor = self._output.fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, most_bytes, max(0, size - most_bytes)).decode(errors="replace").strip()

    def close(self) -> None:
        """Close the connection, and forget what the process said. Idempotent."""
        self.connection.close()
        self._output.close()


_ahead: dict[str, tuple[Start, Partner]] = {}
"""Processes that nobody has asked for yet, by module."""


def start_ahead(start: Start) -> None:
    """Start a process that this thread will ask for; of each module one. Where it cannot be started nothing happens."""
    try:
        _ahead[start.module] = start, Partner(start)
    except OSError:
        return


def started(start: Start) -> Partner:
    """The process that was started ahead in just this way, if it still runs, else a new one.

    Raises:
        OSError: when it cannot be started.
    """
    ahead, waiting = _ahead.pop(start.module, (None, None))
    if waiting is not None:
        if ahead == start and waiting.process.poll() is None:
            return waiting
        _end(waiting)
    return Partner(start)


def end_those_ahead() -> None:
    """End what was started ahead, and never asked for."""
    while _ahead:
        _end(_ahead.popitem()[1][1])


def _end(partner: Partner) -> None:
    """The process and what it has started, such as a compiler."""
    if partner.process.poll() is None:
        kill_group(partner.process.pid)
    partner.process.wait()
    partner.close()


def main(arguments: Sequence[str]) -> None:
    """In such a process: become what its module says.

    Args:
        arguments: the module, the process that started this one, and what ``main`` of the module is told.
    """
    module, parent, *rest = arguments
    die_with_parent(int(parent))
    connection = socket.socket(fileno=os.dup(0))
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.close(silence)
    importlib.import_module(module).main(connection, int(parent), rest)


if __name__ == "__main__":
    main(sys.argv[1:])
