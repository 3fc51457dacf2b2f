"""Run the parsers of other packages on data: their errors name a place, and a crash or an endless loop ends a child.

A child is forked by a process that was itself forked before this one had threads (``start_parsers``). A fork of a
process with threads keeps the locks that these held, and may wait for them for ever.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TypeVar

from batchwright.errors import BatchwrightError
from batchwright.system.host_failures import disk_failure_of
from batchwright.system.processes import fork
from batchwright.training.data.base import data_problem

_T = TypeVar("_T")


class ForeignFailure(Exception):  # noqa: N818 - translated where the place is known
    """A parser raised an error, crashed, or did not end in time. The message is the end of a sentence."""


def described(error: BaseException) -> str:
    """Describe an error of any package in one line."""
    text = " ".join(str(error.__cause__ or error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def foreign_errors(field: str, place: Callable[[], str]) -> Iterator[None]:
    """Report any error of a parser as a problem of ``field`` that names the file and the row.

    Raises:
        SpecError: for any error but those of this package and a lack of memory.
        HostFailureError: when a disk fails.
    """
    try:
        yield
    except (BatchwrightError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust
            raise
        failure = disk_failure_of(error) or data_problem(field, f"cannot be read: {described(error)}", place())
        raise failure from None


def in_child(produce: Callable[[], Iterable[_T]], seconds: float) -> Iterator[_T]:
    """Yield what ``produce`` yields in a process of its own, which ends with the iteration.

    The elements, which are not None, are pickled, and each has ``seconds``.

    Raises:
        ForeignFailure: when ``produce`` raises an error, its process is killed, or an element takes too long.
        BatchwrightError: as raised by ``produce``; a HostFailureError where a disk fails.
        MemoryError: as raised by ``produce``.
    """
    parent, receiver = _ParserParent.begin_in_idle(pickle.dumps(produce))
    status: int | None = None
    try:
        while receiver.poll(seconds):
            try:
                element, error = receiver.recv()
            except OSError as cut:  # killed while it sent a message
                raise EOFError from cut
            if error is not None:
                raise error
            if element is None:
                return
            yield element
        raise ForeignFailure(f"took more than {seconds:g} s")
    except EOFError:
        status = parent.end()
        ending = signal.strsignal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else f"status {status >> 8}"
        raise ForeignFailure(f"crashed its parser ({ending})") from None
    finally:
        receiver.close()
        if status is None:
            parent.end()


def try_in_child(work: Callable[[], object], seconds: float) -> None:
    """Do ``work`` in a process of its own, before this process does it too.

    Raises:
        ForeignFailure, BatchwrightError, MemoryError: as ``in_child``.
    """
    list(in_child(partial(_nothing_of, work), seconds))


def _nothing_of(work: Callable[[], object]) -> tuple[()]:
    work()
    return ()


def lists_in_child(
    produce: Callable[[int, int], Iterable[list[_T]]], count: int, seconds: float, seconds_of_one: float
) -> Iterator[list[_T]]:
    """Yield lists of ``count`` elements, and from the first list that fails of one, so that one element is at fault.

    ``produce`` makes the lists from the number of the first element and their length.

    Raises:
        ForeignFailure, BatchwrightError, MemoryError: as ``in_child``, once all elements before have been yielded.
    """
    done = 0
    try:
        for some in in_child(partial(produce, 0, count), seconds):
            done += len(some)
            yield some
    except ForeignFailure:
        yield from in_child(partial(produce, done, 1), seconds_of_one)


def start_parsers() -> None:
    """Start the parent of the processes of ``in_child``. Called before this process has threads, as torch starts some.

    A process that does not call it starts the parent when it first needs one.
    """
    _idle.append(_ParserParent())


def end_parsers() -> None:
    """End the idle parents."""
    while _idle:
        _idle.pop().close()


class _ParserParent:
    """A process that forks the processes of ``in_child``, one at a time, and has no thread that could hold a lock."""

    def __init__(self) -> None:
        self._connection, other = multiprocessing.Pipe()
        self._process = fork(lambda: _serve(other, self._connection))
        other.close()
        self._child = 0

    @classmethod
    def begin_in_idle(cls, job: bytes) -> tuple[_ParserParent, Connection]:
        """Begin a job in a parent that has none: an iteration may begin within another."""
        while _idle:
            parent = _idle.pop()
            with suppress(OSError, EOFError):  # it ended with the thread that started it
                return parent, parent.begin(job)
            parent.close()
        parent = cls()
        return parent, parent.begin(job)

    def begin(self, job: bytes) -> Connection:
        """Fork a child that sends what the pickled ``job`` produces, to the connection that is returned."""
        # Made after the parent's own fork: one that inherits the sender would keep it open after the child has crashed.
        receiver, sender = multiprocessing.Pipe(duplex=False)
        with sender:
            self._connection.send_bytes(job)
            send_handle(self._connection, sender.fileno(), self._process)
            self._child = self._connection.recv()
        return receiver

    def end(self) -> int:
        """Kill the child if it still runs, and return its wait status. The parent is idle then."""
        try:
            os.kill(self._child, signal.SIGKILL)  # not waited for yet, so the number is its own
            self._connection.send(None)
            status: int = self._connection.recv()
        except (OSError, EOFError):
            self.close()
            return signal.SIGKILL
        _idle.append(self)
        return status

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


_idle: list[_ParserParent] = []
os.register_at_fork(after_in_child=_idle.clear)


def _serve(connection: Connection, others: Connection) -> None:
    """Fork a child for each job until the connection is closed."""
    others.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.disable()  # the crash of a parser is told in a sentence
    with suppress(EOFError):
        while True:
            job = connection.recv_bytes()
            sender = Connection(recv_handle(connection), readable=False)
            child = fork(partial(_send_all, job, sender))
            sender.close()
            connection.send(child)
            connection.recv()
            connection.send(os.waitpid(child, 0)[1])


def _send_all(job: bytes, sender: Connection) -> None:
    """Send each element with no error, or no element with an error; and neither at the end."""
    try:
        for element in pickle.loads(job)():  # noqa: S301 - our own
            sender.send((element, None))
    except (BatchwrightError, ForeignFailure, MemoryError) as error:
        sender.send((None, error))
    except BaseException as error:  # noqa: BLE001 - the caller reports it
        sender.send((None, disk_failure_of(error) or ForeignFailure(described(error))))
    else:
        sender.send((None, None))
