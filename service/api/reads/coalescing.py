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
_LANES = 2
_MOST_IN_A_HOP = 8
"""Reads that are made one after the other before any of them is answered."""


class Gathered(Generic[KeyT, ValueT]):
    """Gathers reads. Belongs to one event loop.

    Args:
        read: what is stored under each of some keys, all different; may block. Keys without a value are left out.
        most: keys that are read together.
    """

    def __init__(self, read: Callable[[Sequence[KeyT]], Mapping[KeyT, ValueT]], most: int = MOST_AT_ONCE) -> None:
        self._read = read
        self._most = most
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
                keys = list(self._asked)[: self._most]
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
    """The same for reads that cost more or may fail: equal ones are made once, different ones a few in a hop.

    Two threads make them: Python runs one of them at a time, so that more would only wait for each other.

    Args:
        read: what a read gives; may block.
    """

    def __init__(self, read: Callable[[KeyT], ValueT]) -> None:
        self._read = read
        self._lanes = [Gathered[KeyT, ValueT | Exception](self._read_each, _MOST_IN_A_HOP) for _ in range(_LANES)]

    async def get(self, key: KeyT) -> ValueT:
        """What ``read`` gives for ``key`` now.

        Raises:
            Exception: what it raised.
        """
        found = await self._lanes[hash(key) % _LANES].get(key)
        if found is None:
            raise LookupError(f"nothing was read for {key!r}")
        if isinstance(found, Exception):
            raise found
        return found

    def _read_each(self, keys: Sequence[KeyT]) -> dict[KeyT, ValueT | Exception]:
        return {key: self._outcome(key) for key in keys}

    def _outcome(self, key: KeyT) -> ValueT | Exception:
        try:
            return self._read(key)
        except Exception as error:  # noqa: BLE001 - whoever waits for this one is told
            return error
