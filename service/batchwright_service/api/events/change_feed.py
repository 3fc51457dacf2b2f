"""Notify all waiting requests about changes, with one short read per tick."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from starlette.concurrency import run_in_threadpool

from batchwright_service.errors import ServiceError

_log = logging.getLogger(__name__)

_CHUNK = 500
"""Identifiers per read: databases bound the parameters of a statement."""

ReadLatestEventIds = Callable[[Sequence[str]], dict[str, int]]


class ChangeFeed:
    """Wait for events of tunings and jobs. An instance belongs to one event loop.

    Args:
        read_latest_ids: returns the id of the newest event of each tuning or job; may block.
        tick_seconds: time between reads while a request waits, which bounds the delay of a notification.
    """

    def __init__(self, read_latest_ids: ReadLatestEventIds, tick_seconds: float = 0.2) -> None:
        self._read_latest_ids = read_latest_ids
        self._tick_seconds = tick_seconds
        self._waiting: dict[str, set[tuple[int, asyncio.Future[None]]]] = defaultdict(set)
        self._poller: asyncio.Task[None] | None = None
        self.closed = False
        """True if the service is stopping, so that followers should end."""
        self.has_capacity: Callable[[], bool] = lambda: True
        """Returns whether another request may wait. Set by the server, which counts its connections."""

    async def wait(self, work_id: str, seen: int, timeout: float) -> bool:  # noqa: ASYNC109 - a bounded wait is the purpose
        """Wait for events after the id ``seen``. Return true when there are some, and false after ``timeout`` seconds.

        Also return true when the work does not exist or is deleted. Return at once when the service stops.
        """
        if self.closed:
            return False
        waiter = seen, asyncio.get_running_loop().create_future()
        self._waiting[work_id].add(waiter)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        try:
            done, _ = await asyncio.wait([waiter[1]], timeout=timeout)
            return bool(done)
        finally:
            self._waiting[work_id].discard(waiter)
            if not self._waiting[work_id]:
                del self._waiting[work_id]

    def close(self) -> None:
        """Release every waiter, and let no request wait from now on."""
        self.closed = True
        for waiters in self._waiting.values():
            for _, future in waiters:
                _release(future)

    async def _poll(self) -> None:
        """Read and notify until no request waits. A failure is logged, and the next tick retries."""
        try:
            while self._waiting and not self.closed:
                try:
                    await self._tick(list(self._waiting))
                except ServiceError as error:
                    _log.warning("reading new events failed, followers keep waiting: %s", error)
                except Exception:  # noqa: BLE001 - ending here would leave every follower waiting
                    _log.exception("reading new events failed, followers keep waiting")
                await asyncio.sleep(self._tick_seconds)
        finally:
            self._poller = None

    async def _tick(self, work_ids: list[str]) -> None:
        for start in range(0, len(work_ids), _CHUNK):
            chunk = work_ids[start : start + _CHUNK]
            read_latest_ids = await run_in_threadpool(self._read_latest_ids, chunk)
            for work_id in chunk:
                count = read_latest_ids.get(work_id)
                for seen, future in self._waiting.get(work_id, ()):
                    if count is None or count > seen:  # with new events, or deleted
                        _release(future)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
