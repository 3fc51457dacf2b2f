"""The fork server: a process that has imported torch, and forks a process for each task.

Importing torch takes seconds; forking takes milliseconds. The server never runs an operation of torch and never touches
CUDA, so a task starts without threads and without a CUDA context, as a fresh process does. The kernel kills the server
together with its parent. Each task is below a subreaper of its own, which ends the task's processes when the server or
its parent has ended, and removes the task's directory if the parent can no longer do that.
"""

import faulthandler
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from batchwright.system import subreaper
from batchwright.system.fork_server.tasks import RunTask, TaskPaths
from batchwright.system.processes import exit_after, tighten_limit
from batchwright.system.subreaper import Channel

_POLL_SECONDS = 0.05
"""Interval at which ended subreapers are reaped."""


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


def serve(channel: Channel, application: Application) -> NoReturn:
    """Prepare, report that, and run tasks until the parent closes the channel or ``idle_seconds`` pass without one.

    A message names modules to import, after which the server reports again; their errors are those of the task that
    needs them. Or it is a task, with the channel of its subreaper.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # A parent that ignores SIGCHLD passes that on, and the kernel would then discard the exit codes of tasks.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    application.prepare()
    channel.send(ready=True)
    with suppress(EOFError):
        while True:
            is_busy = subreaper.has_children()
            message = channel.receive(_POLL_SECONDS if is_busy else application.idle_seconds)
            subreaper.reap()
            if message is None and not is_busy:
                break
            if message is not None and "descriptor" in message:
                own = Channel(socket.socket(fileno=message.pop("descriptor")))
                _begin(channel, own, RunTask(**message), application)
                own.close()
            elif message is not None:
                with suppress(Exception):
                    application.import_modules(tuple(message["modules"]))
                channel.send(ready=True)
    os._exit(0)  # without the clean-up of thousands of modules


def _begin(channel: Channel, own: Channel, task: RunTask, application: Application) -> None:
    """Fork the subreaper of a task, or report on the task's own channel why it cannot run."""
    try:
        application.import_modules(tuple(task.modules))
    except Exception as error:  # noqa: BLE001 - a package may be missing or broken: the client names it
        own.send(error=f"{type(error).__name__}: {error}")
        return
    if subreaper.fork() == 0:
        channel.close()
        exit_after(lambda: _run(own, task, application))


def _run(own: Channel, task: RunTask, application: Application) -> None:
    """Become the subreaper of a task. In the task's process, run it within its limits, with its output in a file."""
    output = os.open(TaskPaths(Path(task.directory)).output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    subreaper.keep(own, Path(task.directory), output)
    own.close()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(task.environment)
    if task.data_bytes is not None:
        tighten_limit(resource.RLIMIT_DATA, task.data_bytes)
    if task.file_bytes is not None:
        tighten_limit(resource.RLIMIT_FSIZE, task.file_bytes)
    try:
        application.run_task(task.task, Path(task.directory))
    finally:
        sys.stdout.flush()
