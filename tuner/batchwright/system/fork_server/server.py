"""The fork server: a process that has imported torch, and forks one task at a time.

Importing torch takes seconds; forking takes milliseconds. The server never runs an operation of torch and never touches
CUDA, so a task starts without threads and without a CUDA context, as a fresh process does. The server ends when its
parent closes the connection or dies. The kernel kills an idle server together with its parent. A server with a running
task notices the closed connection itself, because it must still end the processes that the task has started, and remove
the task's directory, which its parent can no longer do.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from batchwright.system.fork_server import messages
from batchwright.system.fork_server.task_paths import TaskPaths
from batchwright.system.processes import die_with_parent, fork, kill_group, outlive_parent, tighten_limit

_POLL_SECONDS = 0.005
_DUMP_SECONDS = 0.3
"""Time for a hanging task to dump its stacks before it is killed."""


@dataclass(frozen=True)
class Application:
    """The work of a fork server.

    Attributes:
        prepare: imports the modules that every task needs.
        import_modules: imports further modules into the server.
        run_task: runs a task in a fork of the server, given its name and the directory of its files.
        idle_seconds: the server ends after this time without a command; None for no such limit.
    """

    prepare: Callable[[], None]
    import_modules: Callable[[tuple[str, ...]], None]
    run_task: Callable[[str, Path], None]
    idle_seconds: float | None = None


def serve(connection: Connection, parent: int, application: Application) -> NoReturn:
    """Prepare, report that, and run tasks until the parent closes the connection or ``idle_seconds`` pass.

    Args:
        connection: to the parent process.
        parent: the id of the parent process.
        application: the functions that prepare and run tasks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the kernel discards exit statuses
    application.prepare()
    server = _Server(connection, parent, application)
    with suppress(EOFError, ConnectionError):
        server.serve()
    server.discard_task()
    os._exit(0)  # without the clean-up of thousands of modules


class _Server:
    def __init__(self, connection: Connection, parent: int, application: Application) -> None:
        self._connection = connection
        self._parent = parent
        self._application = application
        self._task: int | None = None
        self._directory: Path | None = None
        """The directory of the task whose end the client has not been sent."""

    def serve(self) -> None:
        messages.send(self._connection, messages.Ready())
        while True:
            timeout = self._application.idle_seconds if self._task is None else _POLL_SECONDS
            command = messages.receive(self._connection, messages.COMMANDS, timeout)
            if command is not None:
                self._execute(command)
            elif self._task is None:
                return
            self._reap()

    def discard_task(self) -> None:
        """Kill the task of a client that is gone, and remove its directory."""
        self._kill_task()
        if self._task is not None:
            os.waitpid(self._task, 0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _kill_task(self) -> None:
        if self._task is not None:
            kill_group(self._task)

    def _execute(self, command: messages.Command) -> None:
        if isinstance(command, messages.RunTask):
            self._run(command)
        elif isinstance(command, messages.ImportModules):
            with suppress(Exception):
                self._application.import_modules(command.modules)
        elif self._task is not None:
            if command.dumps_stacks:
                os.kill(self._task, signal.SIGUSR1)
                time.sleep(_DUMP_SECONDS)
            self._kill_task()

    def _run(self, command: messages.RunTask) -> None:
        try:
            self._application.import_modules(command.modules)
        except Exception as error:  # noqa: BLE001 - a package may be missing or broken: the client names it
            messages.send(self._connection, messages.ImportFailed(error=f"{type(error).__name__}: {error}"))
            return
        outlive_parent()
        self._directory = command.directory
        self._task = fork(lambda: self._run_in_fork(command))
        os.setpgid(self._task, self._task)
        messages.send(self._connection, messages.Started(pid=self._task))

    def _run_in_fork(self, command: messages.RunTask) -> None:
        """Run the task in its own process group, within its limits, with its output in a file."""
        self._connection.close()
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        _redirect_output(TaskPaths(command.directory).output)
        os.environ.update(command.environment)
        if command.data_bytes is not None:
            tighten_limit(resource.RLIMIT_DATA, command.data_bytes)
        if command.file_bytes is not None:
            tighten_limit(resource.RLIMIT_FSIZE, command.file_bytes)
        try:
            self._application.run_task(command.task, command.directory)
        finally:
            sys.stdout.flush()

    def _reap(self) -> None:
        """Report a task that has ended. Its group is killed before it is reaped, while the id is still valid."""
        if self._task is None or os.waitid(os.P_PID, self._task, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self._kill_task()
        _, status = os.waitpid(self._task, 0)
        self._task = None
        die_with_parent(self._parent)
        messages.send(self._connection, messages.Ended(exit_code=os.waitstatus_to_exitcode(status)))
        self._directory = None


def _redirect_output(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
