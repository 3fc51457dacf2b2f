"""The place in the queue of each tuning and job that waits, read once for all callers who poll."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from service.domain.states import State
from service.domain.work import QueuePosition
from service.domain.workers import Queue
from service.store.interface import WorkItem

KEPT_SECONDS = 1.0
"""How long a look at the queue answers further callers."""
_PAUSE = 4
"""A look is not repeated for so many times as long as it took, for work that was queued since: a look at thousands of
entries takes tenths of a second."""
MOST_PLACES = 5000
"""Places that are reported; work behind them has none yet."""


class QueuePlaces:
    """The places of what waits. Safe to share between threads.

    Args:
        look: reads at most that many entries of the queue.
        clock: seconds that only rise.
    """

    def __init__(self, look: Callable[[int], Queue], clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._lock = threading.Lock()
        self._places: Mapping[str, QueuePosition] = {}
        self._seen_at = -KEPT_SECONDS
        self._look_seconds = 0.0

    def of(self, item: WorkItem) -> QueuePosition | None:
        """The place of a tuning or job.

        None where it does not wait, waits behind ``MOST_PLACES`` others, or was queued after the newest look at a long
        queue.
        """
        if item.state is not State.QUEUED:
            return None
        with self._lock:
            if not self._is_fresh(item.id):
                self._refresh()
            return self._places.get(item.id)

    def _refresh(self) -> None:
        began = self._clock()
        entries = self._look(MOST_PLACES).items
        self._places = {entry.id: _place(entry.position, entry.expected_wait_seconds) for entry in entries}
        self._seen_at = self._clock()
        self._look_seconds = self._seen_at - began

    def _is_fresh(self, work_id: str) -> bool:
        """Tell whether the last look answers for this work; what was queued since is looked up soon."""
        is_told = work_id in self._places or len(self._places) >= MOST_PLACES
        kept = KEPT_SECONDS if is_told else min(KEPT_SECONDS, _PAUSE * self._look_seconds)
        return self._clock() - self._seen_at < kept


def _place(position: int, seconds: float | None) -> QueuePosition:
    return QueuePosition(position=position, expected_wait_seconds=None if seconds is None else float(round(seconds)))
