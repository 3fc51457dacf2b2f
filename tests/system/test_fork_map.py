"""Tasks in forked processes: their results, processes that end early, and the end of the parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from batchwright.system.fork_map import run_in_forks
from tests.support.command import is_running

_ORPHANS = r"""
import os, sys, time
from batchwright.system.fork_map import run_in_forks

def report_and_wait():
    os.write(1, f"{os.getpid()}\n".encode())
    time.sleep(600)

run_in_forks([report_and_wait] * 2, 2)
"""


def _fail() -> str:
    raise RuntimeError("no")


def _die() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "not reached"


def _leave() -> str:
    sys.exit(0)


def _return_what_cannot_be_pickled() -> str:
    return sys.stdout  # type: ignore[return-value] # no stream can be pickled


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_results_come_in_order(processes: int) -> None:
    """Results are in the order of the tasks, and no task ran in this process."""
    tasks: list[Callable[[], tuple[int, int]]] = [
        partial(lambda number: (number, os.getpid()), number) for number in range(5)
    ]
    found = run_in_forks(tasks, processes)
    reported = [result for result in found if result is not None]
    assert [number for number, _ in reported] == [0, 1, 2, 3, 4]
    assert len({pid for _, pid in reported} - {os.getpid()}) == min(processes, 5)


@pytest.mark.parametrize("failing", [_fail, _die, _leave, _return_what_cannot_be_pickled])
def test_a_failed_task_does_not_affect_the_others(failing: Callable[[], str]) -> None:
    """An exception, a kill, an early exit and a result that cannot be pickled are not raised here."""
    assert run_in_forks([failing, lambda: "reported"], 2) == [None, "reported"]


def test_results_larger_than_a_pipe_arrive() -> None:
    """Several processes return megabytes without a deadlock."""
    assert run_in_forks([lambda: "a" * 2**22, lambda: "b" * 2**22], 2) == ["a" * 2**22, "b" * 2**22]


def test_without_processes_there_are_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no process can be started, no task is run, and no descriptor stays open."""

    def refuse() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert run_in_forks([lambda: 1, lambda: 2], 2) == [None, None]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_forked_processes_end_with_the_one_that_forked_them() -> None:
    """A parent that is killed by SIGKILL leaves no process behind."""
    parent = subprocess.Popen([sys.executable, "-c", _ORPHANS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    forked = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 120
    while any(is_running(pid) for pid in forked) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in forked)
