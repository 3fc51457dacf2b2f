"""What SIGTERM and SIGINT do while a service or a worker runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handling_signals(stop: Callable[[], None], hurry: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` at the first SIGTERM or SIGINT, and ``hurry`` at each one after it."""
    told = False

    def handle(_number: int, _frame: object) -> None:
        nonlocal told
        (hurry if told else stop)()
        told = True

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
