"""Run the parsers of other packages on data: their errors name a place, and a crash or an endless loop ends a child."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from batchwright.errors import BatchwrightError, SpecError
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
    """
    try:
        yield
    except (BatchwrightError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust
            raise
        raise data_problem(field, f"cannot be read: {described(error)}", place()) from None


def in_child(produce: Callable[[], Iterable[_T]], seconds: float) -> Iterator[_T]:
    """Yield what ``produce`` yields in a forked process, which ends with the iteration.

    Args:
        produce: makes the elements, which are pickled and not None.
        seconds: time limit of each element.

    Raises:
        ForeignFailure: when ``produce`` raises an error, its process is killed, or an element takes too long.
        SpecError: as raised by ``produce``.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = fork(lambda: _send_all(produce, sender))
    sender.close()
    try:
        while receiver.poll(seconds):
            element, error = receiver.recv()
            if error is not None:
                raise error
            if element is None:
                return
            yield element
        raise ForeignFailure(f"took more than {seconds:g} s")
    except EOFError:
        _, status = os.waitpid(child, 0)
        child = 0
        ending = signal.strsignal(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else f"status {status >> 8}"
        raise ForeignFailure(f"crashed its parser ({ending})") from None
    finally:
        receiver.close()
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _send_all(produce: Callable[[], Iterable[object]], sender: Connection) -> None:
    """Send each element with no error, or no element with an error; and neither at the end."""
    try:
        for element in produce():
            sender.send((element, None))
    except (SpecError, ForeignFailure) as error:
        sender.send((None, error))
    except BaseException as error:  # noqa: BLE001 - the parent reports it
        sender.send((None, ForeignFailure(described(error))))
    else:
        sender.send((None, None))
