"""What SIGTERM and SIGINT do while a service or a worker runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def exiting_at_signals() -> Iterator[None]:
    """Raise ``SystemExit`` in the main thread at SIGTERM or SIGINT, so that what has been started is ended.

    For the start of a process. The signals end it at once after the block.
    """

    def leave(*_: object) -> None:
        sys.exit(0)

    with _handled(leave):
        yield


@contextmanager
def handling_signals(stop: Callable[[], None], force: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGTERM or SIGINT, and ``force`` at each one after it.

    They are called in a thread of their own: a signal's handler runs between two instructions of the main thread, which
    may hold the very lock that they wait for.
    """
    heard, rung = os.pipe()
    obeying = threading.Thread(target=_obey, args=(heard, stop, force), name="signals", daemon=True)
    obeying.start()
    try:
        with _handled(lambda *_: os.write(rung, b"!")):
            yield
    finally:
        os.close(rung)
        obeying.join()
        os.close(heard)


@contextmanager
def _handled(handler: Callable[..., object]) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _obey(heard: int, stop: Callable[[], None], force: Callable[[], None]) -> None:
    obey = stop
    while os.read(heard, 1):
        obey()
        obey = force
