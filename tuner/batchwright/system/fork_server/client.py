"""Run tasks in a fork server, and report how each one ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import TypeVar

from batchwright.system.fork_server import messages
from batchwright.system.fork_server.spawn import ChildProcess
from batchwright.system.process_exit import ExitKind, ProcessExit, classify_exit
from batchwright.system.processes import kernel_oom_kills, kill_group

_POLL_SECONDS = 0.05
_KILL_SECONDS = 30.0
_Event = TypeVar("_Event", messages.Ready, messages.Ended)


class ServerLostError(Exception):
    """The fork server ended, and its task with it.

    Attributes:
        exit: how the server ended.
        output: the end of the server's output.
    """

    def __init__(self, exit_: ProcessExit, output: str) -> None:
        super().__init__(f"the fork server ended with {exit_.cause}\n{output}".strip())
        self.exit = exit_
        self.output = output

    @property
    def was_killed(self) -> bool:
        """True when a signal ended the server."""
        return self.exit.kind is not ExitKind.EXITED


class DeadlineError(Exception):
    """The fork server was not ready in time, or its task exceeded its deadline and was killed."""


class ImportFailedError(Exception):
    """The server cannot import a module that a task needs."""


class StoppedError(Exception):
    """A task was ended on request; its process is gone."""


class ForkServer:
    """A fork server, started on demand and restarted after it was lost. Not thread-safe.

    Args:
        start_child: starts a process that calls ``batchwright.system.fork_server.server.serve``.
    """

    def __init__(self, start_child: Callable[[], ChildProcess]) -> None:
        self._start_child = start_child
        self._child: ChildProcess | None = None
        self._is_ready = False
        self._group: int | None = None
        """The process group of the running task."""

    def start(self) -> ChildProcess:
        """Start the server unless it runs, without waiting for it.

        Raises:
            OSError: when it cannot be started.
        """
        if self._child is None or self._child.process.poll() is not None:
            self.close()
            self._child = self._start_child()
        return self._child

    def import_modules(self, modules: tuple[str, ...]) -> None:
        """Import modules that later tasks need, without waiting for the server."""
        _send(self.start(), messages.ImportModules(modules=modules))

    def await_ready(self, deadline: float, should_stop: Callable[[], bool]) -> None:
        """Wait until the server has imported its modules. A server that misses the deadline continues to import.

        Args:
            deadline: on the monotonic clock.
            should_stop: polled many times a second.

        Raises:
            StoppedError: when ``should_stop`` returned true.
            DeadlineError: when the deadline passed.
            ServerLostError: when the server ended.
        """
        child = self.start()
        if not self._is_ready:
            self._await(child, messages.Ready, deadline, should_stop)
            self._is_ready = True

    def run(self, task: messages.RunTask, deadline: float, should_stop: Callable[[], bool]) -> ProcessExit:
        """Run a task to its end. At the deadline, or on request, it is killed with all processes it has started.

        Returns:
            The end of the task's process.

        Raises:
            StoppedError: when ``should_stop`` returned true.
            DeadlineError: when the deadline passed; the task's stacks are in its output.
            ImportFailedError: when a module of the task cannot be imported.
            ServerLostError: when the server ended.
        """
        child, kills_before = self.start(), kernel_oom_kills()
        _send(child, task)
        try:
            ended = self._await(child, messages.Ended, deadline, should_stop)
        except (StoppedError, DeadlineError) as error:
            self._kill_task(child, dumps_stacks=isinstance(error, DeadlineError))
            raise
        return classify_exit(ended.exit_code, kernel_oom_kills() - kills_before)

    def _kill_task(self, child: ChildProcess, *, dumps_stacks: bool) -> None:
        """Kill the running task, and wait until its process is gone. A server that does not respond is closed."""
        _send(child, messages.KillTask(dumps_stacks=dumps_stacks))
        try:
            with suppress(ServerLostError, ImportFailedError):
                self._await(child, messages.Ended, time.monotonic() + _KILL_SECONDS)
        except DeadlineError:
            self.close()

    def _await(
        self, child: ChildProcess, kind: type[_Event], deadline: float, should_stop: Callable[[], bool] = lambda: False
    ) -> _Event:
        """Return the next event of a kind."""
        while time.monotonic() < deadline:
            if should_stop():
                raise StoppedError
            try:
                event = self._receive(child, _POLL_SECONDS)
            except EOFError:
                raise self._lost_error(child) from None
            if isinstance(event, messages.ImportFailed):
                raise ImportFailedError(event.error)
            if isinstance(event, kind):
                return event
        raise DeadlineError

    def _receive(self, child: ChildProcess, timeout: float) -> messages.Event | None:
        """Return the next event, if there is one, and track the process group of the running task."""
        event = messages.receive(child.connection, messages.EVENTS, timeout)
        if event is not None:
            self._group = event.pid if isinstance(event, messages.Started) else None
        return event

    def _lost_error(self, child: ChildProcess) -> ServerLostError:
        """Close a server that has ended, and return the error."""
        with suppress(TimeoutExpired):
            child.process.wait(_KILL_SECONDS)
        output = child.output_tail()
        self.close()
        return ServerLostError(classify_exit(child.process.returncode, 0), output)

    def close(self) -> None:
        """End the server, its task, and all processes they have started. Idempotent."""
        child, self._child, self._is_ready = self._child, None, False
        if child is None:
            return
        child.end()
        with suppress(EOFError):
            while self._receive(child, 0.0) is not None:  # it may have started a task meanwhile
                pass
        if self._group is not None:  # a server that was killed could not end its task's processes
            kill_group(self._group)
            self._group = None
        child.close()


def _send(child: ChildProcess, message: messages.Message) -> None:
    with suppress(OSError):  # the server is gone: the next event is the end of the connection
        messages.send(child.connection, message)
