"""Run tasks in a fork server, and report how each one ended."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from subprocess import TimeoutExpired

from batchwright.system.fork_server.spawn import ChildProcess
from batchwright.system.fork_server.tasks import RunTask
from batchwright.system.kept_process import KeptProcess
from batchwright.system.process_exit import ExitKind, ProcessExit, classify_exit
from batchwright.system.processes import kernel_oom_kills, kill_group

_POLL_SECONDS = 0.05
_EXIT_SECONDS = 30.0


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
        self._awaited = 0
        """Reports of imports that are still to come: one after the start, and one for each request for modules."""

    def start(self) -> ChildProcess:
        """Start the server unless it runs, without waiting for it.

        Raises:
            OSError: when it cannot be started.
        """
        if self._child is None or self._child.process.poll() is not None:
            self.close()
            self._child, self._awaited = self._start_child(), 1
        return self._child

    def import_modules(self, modules: tuple[str, ...]) -> None:
        """Import modules that later tasks need, without waiting. A task that needs one reports its failure."""
        self.start().channel.send(modules=modules)
        self._awaited += 1

    def await_ready(self, deadline: float, should_stop: Callable[[], bool]) -> None:
        """Wait until the server has imported its modules, with those asked for.

        A server that misses the deadline continues to import.

        Args:
            deadline: on the monotonic clock.
            should_stop: polled many times a second.

        Raises:
            StoppedError: when ``should_stop`` returned true.
            DeadlineError: when the deadline passed.
            ServerLostError: when the server ended.
        """
        child = self.start()
        while self._awaited:
            _check(deadline, should_stop)
            try:
                self._awaited -= child.channel.receive(_POLL_SECONDS) is not None
            except EOFError:
                raise self._lost_error(child) from None

    def run(self, task: RunTask, deadline: float, should_stop: Callable[[], bool]) -> ProcessExit:
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
        kept, is_late = KeptProcess(child.channel.request(**asdict(task)), self.close), False
        try:
            while not kept.wait(_POLL_SECONDS):
                _check(deadline, should_stop)
        except DeadlineError:
            is_late = True
            raise
        finally:
            kept.end(dumps_stacks=is_late)
        if kept.error is not None:
            raise ImportFailedError(kept.error)
        if kept.was_abandoned and kept.pid is not None:
            # The kernel ends the task with its subreaper, but not the processes that the task has started.
            kill_group(kept.pid)
            return classify_exit(-signal.SIGKILL, kernel_oom_kills() - kills_before)
        if kept.status is None:
            raise self._lost_error(child)
        return classify_exit(kept.status, kernel_oom_kills() - kills_before)

    def _lost_error(self, child: ChildProcess) -> ServerLostError:
        """Close a server that has ended, and return the error."""
        with suppress(TimeoutExpired):
            child.process.wait(_EXIT_SECONDS)
        output = child.output_tail()
        self.close()
        return ServerLostError(classify_exit(child.process.returncode, 0), output)

    def close(self) -> None:
        """End the server, its task, and all processes they have started. Idempotent."""
        child, self._child, self._awaited = self._child, None, 0
        if child is not None:
            child.close()


def _check(deadline: float, should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise StoppedError
    if time.monotonic() >= deadline:
        raise DeadlineError
