"""Run tasks in forked processes, side by side. No torch."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from tuner.system.processes import fork

_T = TypeVar("_T")
_SEVERAL = 4
"""Processes at once. More than there are processors: tasks are few, and one for each would leave some idle at the end.
No more than these: each may take as much memory as the one that forks it."""


def worthwhile_processes() -> int:
    """How many processes a few tasks are worth on this host."""
    return _SEVERAL if len(os.sched_getaffinity(0)) > 1 else 1


def side_by_side(tasks: Sequence[Callable[[], _T]], processes: int) -> list[_T | None]:
    """Return the result of each task, in order; None for one that failed, or whose process ended too early.

    Call it where no other thread runs, as ``fork``.

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
    """A forked process, and the pipe of its results."""

    pid: int
    stream: IO[bytes]

    def results(self, count: int) -> list[Any]:
        """One per task, as soon as all are done."""
        results: list[Any] = [None] * count
        with self.stream, suppress(EOFError, pickle.UnpicklingError):  # the process may die at any moment
            results = pickle.load(self.stream)  # noqa: S301 - written by our own fork
        with suppress(ChildProcessError):  # where SIGCHLD is ignored, nobody has to wait
            os.waitpid(self.pid, 0)
        return results


def _started(tasks: Sequence[Callable[[], Any]]) -> _Process | None:
    """A process that runs ``tasks`` one after the other; none where none can be started."""
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "wb") as output:
        try:
            pid = fork(lambda: _run(tasks, output))
        except OSError:
            os.close(ours)
            return None
    return _Process(pid, os.fdopen(ours, "rb"))


def _run(tasks: Sequence[Callable[[], Any]], output: IO[bytes]) -> None:
    results = [_result(task) for task in tasks]
    with output:
        pickle.dump(results, output, protocol=pickle.HIGHEST_PROTOCOL)


def _result(task: Callable[[], _T]) -> _T | None:
    try:
        return task()
    except BaseException:  # noqa: BLE001 - user code runs here and may raise anything; the caller runs it again, and sees it
        return None
