"""Run tasks in parallel forked processes. No torch."""

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, TypeVar

from batchwright.system.processes import fork

_T = TypeVar("_T")
_MAX_PROCESSES = 4
"""Parallel processes. May be more than there are processors: tasks are few, and one process per processor would leave
some idle at the end. Not more: each process may take as much memory as its parent."""


def default_process_count() -> int:
    """Return how many processes a few tasks should use on this host."""
    return _MAX_PROCESSES if len(os.sched_getaffinity(0)) > 1 else 1


def run_in_forks(tasks: Sequence[Callable[[], _T]], processes: int) -> list[_T | None]:
    """Return the result of each task, in order; None for a task that failed, or whose process ended too early.

    Call it only while no other thread runs, as with ``fork``.

    Args:
        tasks: functions to run; their results are pickled, and must not be None.
        processes: how many processes share the tasks.
    """
    count = min(processes, len(tasks))
    results: list[_T | None] = [None] * len(tasks)
    started = [_start(tasks[first::count]) for first in range(count)]
    for first, process in enumerate(started):
        if process is not None:
            pid, stream = process
            with stream, suppress(EOFError, pickle.UnpicklingError):  # the process may die at any moment
                results[first::count] = pickle.load(stream)  # noqa: S301 - written by our own fork
            with suppress(ChildProcessError):  # where SIGCHLD is ignored, the kernel reaps the process
                os.waitpid(pid, 0)
    return results


def _start(tasks: Sequence[Callable[[], Any]]) -> tuple[int, IO[bytes]] | None:
    """Fork a process that runs ``tasks`` one after the other, with the pipe of its results; None if none can start."""
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as output:
        try:
            pid = fork(lambda: _run(tasks, output))
        except OSError:
            os.close(read_end)
            return None
    return pid, os.fdopen(read_end, "rb")


def _run(tasks: Sequence[Callable[[], Any]], output: IO[bytes]) -> None:
    results = [_result(task) for task in tasks]
    with output:
        pickle.dump(results, output, protocol=pickle.HIGHEST_PROTOCOL)


def _result(task: Callable[[], _T]) -> _T | None:
    try:
        return task()
    except BaseException:  # noqa: BLE001 - user code may raise anything; the caller runs the task again, and sees the error
        return None
