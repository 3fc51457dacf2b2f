"""What SIGTERM and SIGINT do while a service or a worker runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handling_signals(stop: Callable[[], None], hurry: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGTERM or SIGINT, and ``hurry`` at each one after it.

    They are called in a thread of their own: a signal's handler runs between two instructions of the main thread, which
    may hold the very lock that they wait for.
    """
    heard, rung = os.pipe()
    obeying = threading.Thread(target=_obey, args=(heard, stop, hurry), name="signals", daemon=True)
    obeying.start()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: os.write(rung, b"!")) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(rung)
        obeying.join()
        os.close(heard)


def _obey(heard: int, stop: Callable[[], None], hurry: Callable[[], None]) -> None:
    obey = stop
    while os.read(heard, 1):
        obey()
        obey = hurry
