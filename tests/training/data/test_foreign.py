"""Parsers in processes of their own: what ends one of them, and threads that hold locks."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from batchwright.errors import HostFailureError
from batchwright.training.data.foreign import ForeignFailure, end_parsers, foreign_errors, in_child, start_parsers

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def _own_parsers() -> Iterator[None]:
    """Start a process of the test's own, and end it."""
    end_parsers()
    start_parsers()
    yield
    end_parsers()


def count(to: int) -> Iterator[int]:
    """Yield numbers."""
    yield from range(to)


def ended_by(number: signal.Signals) -> Iterator[int]:
    """Yield a number, and end this process."""
    yield 1
    os.kill(os.getpid(), number)


def endless() -> Iterator[int]:
    """Yield a number, and never another one."""
    yield 1
    while True:
        time.sleep(1.0)


def failing(error: Exception) -> Iterator[int]:
    """Raise an error."""
    yield 1
    raise error


def locked() -> Iterator[bool]:
    """Take the lock that a thread of the first process holds."""
    with LOCK:
        yield True


def test_elements_arrive_in_order_also_within_another_iteration() -> None:
    """A second parent is started for the iteration within, and both are used again."""
    outer = in_child(partial(count, 3), 30.0)
    assert next(outer) == 0
    assert list(in_child(partial(count, 4), 30.0)) == [0, 1, 2, 3]
    assert list(outer) == [1, 2]
    assert list(in_child(partial(count, 2), 30.0)) == [0, 1]


@pytest.mark.parametrize(
    ("produce", "message"),
    [
        (partial(ended_by, signal.SIGSEGV), "crashed its parser"),
        (partial(ended_by, signal.SIGKILL), "Killed"),
        (endless, r"took more than 0\.2 s"),
        (partial(failing, RuntimeError("of another package")), "RuntimeError: of another package"),
    ],
)
def test_what_ends_a_parser_is_named_and_the_next_one_runs(produce: partial[Iterator[int]], message: str) -> None:
    """A crash, a kill, an endless loop and any error."""
    with pytest.raises(ForeignFailure, match=message):
        list(in_child(produce, 0.2 if produce is endless else 30.0))
    assert list(in_child(partial(count, 2), 30.0)) == [0, 1]


def test_a_crash_is_told_by_a_parent_that_is_started_for_it() -> None:
    """Such a parent would keep the pipe of its child open, if it were forked after the pipe was made."""
    end_parsers()
    with pytest.raises(ForeignFailure, match="crashed its parser"):
        list(in_child(partial(ended_by, signal.SIGSEGV), 5.0))


def test_a_lock_that_a_thread_holds_is_free_in_a_parser() -> None:
    """The parsers' parent was forked before the thread took the lock."""
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            taken.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        taken.wait()
        assert list(in_child(locked, 30.0)) == [True]
    finally:
        release.set()
        holder.join()


def test_a_parent_that_was_killed_is_replaced() -> None:
    """It may have ended with the thread that started it."""
    end_parsers()
    starter = threading.Thread(target=start_parsers)
    starter.start()
    starter.join()
    assert list(in_child(partial(count, 2), 30.0)) == [0, 1]


def test_a_disk_that_fails_is_no_fault_of_the_data() -> None:
    """The error of the host passes both doors, with its cause."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache")
    with pytest.raises(HostFailureError) as found:
        list(in_child(partial(failing, full), 30.0))
    assert found.value.cause == "disk-full"
    with pytest.raises(HostFailureError), foreign_errors("data.paths", lambda: "rows.jsonl"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
