"""Handling of SIGTERM and SIGINT while a service or a worker runs."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def exiting_at_signals() -> Iterator[None]:
    """Raise ``SystemExit`` in the main thread at SIGTERM or SIGINT, so that the block can clean up.

    For the start of a process. After the block, the earlier handlers are restored.
    """

    def leave(*_: object) -> None:
        sys.exit(0)

    with _handled(leave):
        yield


@contextmanager
def handling_signals(stop: Callable[[], None], force: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGTERM or SIGINT, and ``force`` at each one after it.

    Both run in another thread: a signal handler interrupts the main thread, which may hold a lock that they need.
    """
    read_end, write_end = os.pipe()
    thread = threading.Thread(target=_call, args=(read_end, stop, force), name="signals", daemon=True)
    thread.start()
    try:
        with _handled(lambda *_: os.write(write_end, b"!")):
            yield
    finally:
        os.close(write_end)
        thread.join()
        os.close(read_end)


@contextmanager
def _handled(handler: Callable[..., object]) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _call(read_end: int, stop: Callable[[], None], force: Callable[[], None]) -> None:
    action = stop
    while os.read(read_end, 1):
        action()
        action = force
