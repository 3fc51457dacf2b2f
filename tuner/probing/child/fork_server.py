"""A process that has torch imported and forks one probe at a time from that state.

Importing torch takes seconds; forking takes milliseconds. The server never runs an operation of torch and never touches
CUDA (for cards it imports no model's module, which might), so a child starts with no threads and no context, as a fresh
process does. It speaks JSON lines over the socket it inherits, and ends when the other side closes it: a supervisor
that dies takes its server and its probe with it. The kernel kills a server without a child together with its parent.
One that has a child reads of it, for only it can end what the child has started.

Started as ``tuner.probing.fork_server_start`` tells.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tuner.probing.protocol import ProbePaths
from tuner.system.json_channel import Channel
from tuner.system.processes import die_with_parent, kill_group, outlive_parent
from tuner.workloads.preload import import_early, late_imports

_POLL_SECONDS = 0.005


class ForkServer:
    """Serves one supervisor: forks its tasks, one at a time, and tells how each ended.

    Args:
        channel: to the supervisor.
        parent: its process.
    """

    def __init__(self, channel: Channel, parent: int) -> None:
        self.channel = channel
        self.parent = parent
        self.child: int | None = None

    def serve(self) -> None:
        """Answer until the supervisor goes away."""
        try:
            while True:
                message = self.channel.receive(None if self.child is None else _POLL_SECONDS)
                if message is not None:
                    self._obey(message)
                self._reap()
        except (EOFError, BrokenPipeError):
            if self.child is not None:
                kill_group(self.child)

    def _obey(self, message: dict[str, Any]) -> None:
        if message["do"] == "run":
            self._run(message)
        elif message["do"] == "prepare":
            with suppress(Exception):  # a package that is missing or broken is told when a task needs it
                import_early(tuple(message["preload"]))
        elif self.child is not None and message["do"] == "dump":
            os.kill(self.child, signal.SIGUSR1)
        elif self.child is not None:
            kill_group(self.child)

    def _run(self, message: dict[str, Any]) -> None:
        try:
            import_early(tuple(message["preload"]))
        except Exception as error:  # noqa: BLE001 - a package that is missing or broken: the supervisor must hear which
            self.channel.send({"event": "failed", "error": f"{type(error).__name__}: {error}"})
            return
        self.child = self._fork(message)
        self.channel.send({"event": "started", "pid": self.child})

    def _fork(self, message: dict[str, Any]) -> int:
        outlive_parent()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.channel.connection.close()
            os.environ.update(message["environment"])
            _become_task(message["task"], message["directory"], parent)
        os.setpgid(pid, pid)
        return pid

    def _reap(self) -> None:
        """Report a child that has ended. Its group is killed while its id still stands for it."""
        if self.child is None:
            return
        ended = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        kill_group(self.child)
        _, status = os.waitpid(self.child, 0)
        self.child = None
        die_with_parent(self.parent)
        self.channel.send({"event": "ended", "status": status})


def _become_task(task: str, directory: str, parent: int) -> NoReturn:
    """The rest of a child's life: in a group of its own, its output in a file, ending without clean-up."""
    status = 1
    try:
        die_with_parent(parent)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        _redirect_output(ProbePaths(Path(directory)))
        from tuner.probing.child.worker import run_task  # noqa: PLC0415 - was imported before the fork; torch is in it

        run_task(task, directory)
        status = 0
    except BaseException:  # noqa: BLE001 - the last line of defence: what is printed here becomes the evidence
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect_output(paths: ProbePaths) -> None:
    output = os.open(paths.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def main(connection: socket.socket, parent: int, _arguments: Sequence[str]) -> None:
    """Import what probes need, say so, and serve. Ends with the thread that started it, also while it imports.

    While it has a child it ends with the process at the other end of the socket instead.

    Args:
        connection: to the process that started this one.
        parent: that process.
    """
    channel = Channel(connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
    began = time.monotonic()
    import_early(("tuner.probing.child.worker", *late_imports()))
    channel.send({"event": "ready", "seconds": time.monotonic() - began})
    ForkServer(channel, parent).serve()
    os._exit(0)  # without the clean-up of thousands of modules: the supervisor waits for the end
