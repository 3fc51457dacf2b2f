"""Tasks of a fork server that imports no torch: their ends, and the processes left over."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import BaseModel

from batchwright.system.fork_server.client import (
    DeadlineError,
    ForkServer,
    ImportFailedError,
    ServerLostError,
    StoppedError,
)
from batchwright.system.fork_server.spawn import ChildProcess
from batchwright.system.fork_server.tasks import RunTask, TaskPaths
from batchwright.system.process_exit import ExitKind, ProcessExit


class Nothing(BaseModel):
    """A request."""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """A ready server, closed at the end."""
    with closing(ForkServer(lambda: ChildProcess("tests.support.sleeping_tasks"))) as found:
        found.await_ready(time.monotonic() + 120, _never)
        yield found


@pytest.fixture
def paths() -> Iterator[TaskPaths]:
    """The files of a task."""
    with TaskPaths.temporary(Nothing()) as found:
        yield found


def _never() -> bool:
    return False


def _run(
    server: ForkServer, paths: TaskPaths, task: str, should_stop: Callable[[], bool] = _never, seconds: float = 120.0
) -> ProcessExit:
    return server.run(RunTask(task=task, directory=str(paths.directory)), time.monotonic() + seconds, should_stop)


def _gone(process: int) -> bool:
    """Return whether a process ends within a minute; a zombie has ended."""
    stat, deadline = Path(f"/proc/{process}/stat"), time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_task_that_exceeds_its_deadline_is_killed_with_its_stacks(server: ForkServer, paths: TaskPaths) -> None:
    """The output has the stacks, and the server runs the next task."""
    with pytest.raises(DeadlineError):
        _run(server, paths, "sleep", seconds=1.0)
    assert "_run_task" in paths.output_tail()
    assert _run(server, paths, "end").cause == "exit status 0"


def test_a_task_that_is_stopped_is_gone(server: ForkServer, paths: TaskPaths) -> None:
    """The task and its child are gone, while the server stays."""
    with pytest.raises(StoppedError):
        _run(server, paths, "leave a child", paths.result.exists)
    assert _gone(int(paths.result.read_text()))
    assert _run(server, paths, "end").kind is ExitKind.EXITED


def test_a_lost_server_ends_its_task(server: ForkServer, paths: TaskPaths) -> None:
    """The processes that the task has started end too."""
    process = server.start().process

    def kill() -> bool:
        if paths.result.exists():
            os.kill(process.pid, signal.SIGKILL)
        return False

    with pytest.raises(ServerLostError, match="SIGKILL") as raised:
        _run(server, paths, "leave a child", kill)
    assert raised.value.was_killed
    assert _gone(int(paths.result.read_text()))
    assert _run(server, paths, "end").cause == "exit status 0", "another server runs the next task"


def test_a_server_closed_during_a_task_leaves_no_process(server: ForkServer, paths: TaskPaths) -> None:
    """Closing during a task, as on Ctrl-C, ends the task."""

    def interrupt() -> bool:
        if paths.result.exists():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        _run(server, paths, "leave a child", interrupt)
    server.close()
    assert _gone(int(paths.result.read_text()))


def test_a_module_that_is_missing_is_named(server: ForkServer, paths: TaskPaths) -> None:
    """The error is raised by the task that needs the module, not by the import or by one that may need it."""
    server.import_modules(("missing",))
    server.await_ready(time.monotonic() + 120, _never)
    command = RunTask(task="end", directory=str(paths.directory), modules=("missing",))
    with pytest.raises(ImportFailedError, match="no module named missing"):
        server.run(command, time.monotonic() + 120, _never)
    assert _run(server, paths, "end").kind is ExitKind.EXITED
