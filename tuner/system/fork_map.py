"""Tasks in forked processes, side by side. No torch."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, NoReturn, TypeVar

from tuner.system.processes import die_with_parent

_T = TypeVar("_T")
_SEVERAL = 4
"""Processes at once. More than there are processors: tasks are few, and one for each would leave some idle at the end.
No more than these: each may take as much memory as the one that forks it."""


def worthwhile_processes() -> int:
    """How many processes a few tasks are worth on this host."""
    return _SEVERAL if len(os.sched_getaffinity(0)) > 1 else 1


def side_by_side(tasks: Sequence[Callable[[], _T]], processes: int) -> list[_T | None]:
    """What each task returns, in order; none for one that failed, or whose process ended before it had told.

    Call it where no other thread runs: a forked process has but the thread that forked, and locks that others held stay
    locked. It dies with this one.

    Args:
        tasks: what to run; their results are pickled, and are never none.
        processes: how many processes share the tasks.
    """
    count = min(processes, len(tasks))
    found: list[_T | None] = [None] * len(tasks)
    started = [_started(tasks[first::count]) for first in range(count)]
    for first, process in enumerate(started):
        if process is not None:
            found[first::count] = process.results(len(tasks[first::count]))
    return found


@dataclass(frozen=True)
class _Process:
    """A forked process, and where it tells what its tasks returned."""

    pid: int
    stream: IO[bytes]

    def results(self, count: int) -> list[Any]:
        """One per task, as soon as all are done."""
        results: list[Any] = [None] * count
        with self.stream, suppress(EOFError, pickle.UnpicklingError):  # it has died, while it told or before
            results = pickle.load(self.stream)  # noqa: S301 - written by our own fork
        with suppress(ChildProcessError):  # where SIGCHLD is ignored, nobody has to wait
            os.waitpid(self.pid, 0)
        return results


def _started(tasks: Sequence[Callable[[], Any]]) -> _Process | None:
    """A process that runs ``tasks`` one after the other; none where none can be started."""
    parent = os.getpid()
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        return None
    if pid == 0:
        _become_task(tasks, theirs, parent)
    os.close(theirs)
    return _Process(pid, os.fdopen(ours, "rb"))


def _become_task(tasks: Sequence[Callable[[], Any]], told: int, parent: int) -> NoReturn:
    """The rest of a forked process's life, which ends without clean-up."""
    try:
        die_with_parent(parent)
        results = [_result(task) for task in tasks]
        with os.fdopen(told, "wb") as stream:
            pickle.dump(results, stream, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        os._exit(0)


def _result(task: Callable[[], _T]) -> _T | None:
    try:
        return task()
    except BaseException:  # noqa: BLE001 - user code runs here and may raise anything; who asked runs it again, and is told
        return None
