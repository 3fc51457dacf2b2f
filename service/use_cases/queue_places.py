"""The place in the queue of each tuning and job that waits, read once for all callers who poll."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from service.domain import QueuePlace
from service.fleet import Queue, QueueEntry
from service.states import State
from service.store.base import WorkItem

KEPT_SECONDS = 1.0
"""How long a look at the queue answers further callers."""
MOST_PLACES = 5000
"""Places that are told; work behind them has none yet."""


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
        self._places: Mapping[str, QueuePlace] = {}
        self._seen_at = -KEPT_SECONDS

    def of(self, item: WorkItem) -> QueuePlace | None:
        """The place of a tuning or job; none where it does not wait, or waits behind ``MOST_PLACES`` others."""
        if item.state is not State.QUEUED:
            return None
        with self._lock:
            if not self._is_fresh(item.id):
                self._places = {it.id: _place(it.position, it.expected_wait_seconds) for it in self._entries()}
                self._seen_at = self._clock()
            return self._places.get(item.id)

    def _entries(self) -> tuple[QueueEntry, ...]:
        return self._look(MOST_PLACES).items

    def _is_fresh(self, work_id: str) -> bool:
        """Whether the last look answers for this work: what was queued since is looked up at once."""
        is_told = work_id in self._places or len(self._places) >= MOST_PLACES
        return is_told and self._clock() - self._seen_at < KEPT_SECONDS


def _place(position: int, seconds: float | None) -> QueuePlace:
    return QueuePlace(position=position, expected_wait_seconds=None if seconds is None else float(round(seconds)))
