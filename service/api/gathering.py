"""Reads that come at the same time, made together: one hop to a thread and one statement for all of them.

Nothing is kept: a read that comes while another is under way is made after it, so that it sees whatever was written
before it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import Context
from typing import Generic, TypeVar

from starlette.concurrency import run_in_threadpool

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")

MOST_AT_ONCE = 200
"""Keys that are read together: databases bound the parameters of a statement."""


class Gathered(Generic[KeyT, ValueT]):
    """Gathers reads. Belongs to one event loop.

    Args:
        read: what is stored under each of some keys, all different; may block. Keys without a value are left out.
    """

    def __init__(self, read: Callable[[Sequence[KeyT]], Mapping[KeyT, ValueT]]) -> None:
        self._read = read
        self._asked: dict[KeyT, list[asyncio.Future[ValueT | None]]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def get(self, key: KeyT) -> ValueT | None:
        """What is stored under ``key`` now; none when there is nothing.

        Raises:
            Exception: what the read raised.
        """
        future: asyncio.Future[ValueT | None] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(key, []).append(future)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_all(), context=Context())
        return await future

    @property
    def idle(self) -> bool:
        """Whether nothing is being read."""
        return self._reader is None

    async def _read_all(self) -> None:
        """Read until nothing is asked for."""
        try:
            while self._asked:
                keys = list(self._asked)[:MOST_AT_ONCE]
                asked = {key: self._asked.pop(key) for key in keys}
                await self._answer(asked)
        finally:
            self._reader = None

    async def _answer(self, asked: dict[KeyT, list[asyncio.Future[ValueT | None]]]) -> None:
        try:
            found = await run_in_threadpool(self._read, list(asked))
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            for future in _waiting(asked):
                future.set_exception(error)
            return
        for key, futures in asked.items():
            for future in _waiting({key: futures}):
                future.set_result(found.get(key))


def _waiting(asked: dict[KeyT, list[asyncio.Future[ValueT]]]) -> list[asyncio.Future[ValueT]]:
    """Those who still wait: a caller may be gone."""
    return [future for futures in asked.values() for future in futures if not future.done()]


class GatheredByKey(Generic[KeyT, ValueT]):
    """The same for reads that cost more: equal ones are made once, different ones beside one another.

    Args:
        read: what a read gives; may block.
    """

    def __init__(self, read: Callable[[KeyT], ValueT]) -> None:
        self._read = read
        self._lanes: dict[KeyT, Gathered[KeyT, ValueT]] = {}

    async def get(self, key: KeyT) -> ValueT:
        """What ``read`` gives for ``key`` now.

        Raises:
            Exception: what it raised.
        """
        if (lane := self._lanes.get(key)) is None:
            lane = self._lanes[key] = Gathered(lambda keys: {it: self._read(it) for it in keys})
        try:
            found = await lane.get(key)
        finally:
            if lane.idle and self._lanes.get(key) is lane:
                del self._lanes[key]
        if found is None:
            raise LookupError(f"nothing was read for {key!r}")
        return found
