"""Tells many waiters about changes with one short read per tick, however many there are."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from starlette.concurrency import run_in_threadpool

from service.errors import ServiceError

_log = logging.getLogger(__name__)

_CHUNK = 500
"""Identifiers per read: databases bound the parameters of a statement."""

Counts = Callable[[Sequence[str]], dict[str, int]]


class ChangeFeed:
    """Waits for events of tunings and jobs. Belongs to one event loop.

    Args:
        counts: the id of the newest event of each; may block.
        tick_seconds: time between reads while someone waits: bounds how late a change is seen.
    """

    def __init__(self, counts: Counts, tick_seconds: float = 0.2) -> None:
        self._counts = counts
        self._tick_seconds = tick_seconds
        self._waiting: dict[str, set[tuple[int, asyncio.Future[None]]]] = defaultdict(set)
        self._poller: asyncio.Task[None] | None = None
        self._closed = False
        self.has_room: Callable[[], bool] = lambda: True
        """True if another request may wait. The server, which counts its connections, sets it."""

    @property
    def closed(self) -> bool:
        """Whether the service is ending: followers should end too."""
        return self._closed

    async def wait(self, work_id: str, seen: int, timeout: float) -> bool:  # noqa: ASYNC109 - a bounded wait is its point
        """Wait for events after the id ``seen``; true when there are, false after ``timeout`` seconds.

        Also true when there is no such work, or not any more. Returns, either way, when the service ends.
        """
        if self._closed:
            return False
        waiter = seen, asyncio.get_running_loop().create_future()
        self._waiting[work_id].add(waiter)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        try:
            done, _ = await asyncio.wait([waiter[1]], timeout=timeout)
            return bool(done)
        finally:
            self._forget(work_id, waiter)

    def close(self) -> None:
        """Let every waiter go, now and from now on."""
        self._closed = True
        for waiters in self._waiting.values():
            for _, future in waiters:
                _release(future)

    def _forget(self, work_id: str, waiter: tuple[int, asyncio.Future[None]]) -> None:
        self._waiting[work_id].discard(waiter)
        if not self._waiting[work_id]:
            del self._waiting[work_id]

    async def _poll(self) -> None:
        """Read and release until nobody waits. Whatever goes wrong, the next tick is another try."""
        try:
            while self._waiting and not self._closed:
                try:
                    await self._tick(list(self._waiting))
                except ServiceError as error:
                    _log.warning("followers wait: %s", error)
                except Exception:  # noqa: BLE001 - an end here would leave every follower waiting
                    _log.exception("followers wait")
                await asyncio.sleep(self._tick_seconds)
        finally:
            self._poller = None

    async def _tick(self, work_ids: list[str]) -> None:
        for start in range(0, len(work_ids), _CHUNK):
            asked = work_ids[start : start + _CHUNK]
            counts = await run_in_threadpool(self._counts, asked)
            for work_id in asked:
                self._tell(work_id, counts.get(work_id))

    def _tell(self, work_id: str, count: int | None) -> None:
        """Release who has not seen as many events; everyone, when the work is gone: nothing more will come."""
        for seen, future in self._waiting.get(work_id, ()):
            if count is None or count > seen:
                _release(future)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
