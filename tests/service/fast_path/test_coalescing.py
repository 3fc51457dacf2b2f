"""Concurrent reads are made together, and see all that was written before they were requested."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from batchwright_service.api.events.change_feed import ChangeFeed
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.fast_path.coalescing import MAX_BATCH, BatchedReads, CoalescedReads

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of the service."""
    return "asyncio"


class Source:
    """A readable value, which the test changes; each read waits until it is released."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.read_keys: list[list[str]] = []
        self.go_on = threading.Event()
        self.error: Exception | None = None

    def read(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the values at the start of the read."""
        found = {key: self.values[key] for key in keys if key in self.values}
        self.read_keys.append(sorted(keys))
        assert self.go_on.wait(240)
        if self.error is not None:
            raise self.error
        return found

    def read_one(self, key: str) -> int | None:
        """Return the value of one key."""
        return self.read([key]).get(key)


async def until_read(source: Source, reads: int) -> None:
    """Wait until that many reads have begun."""
    while len(source.read_keys) < reads:  # noqa: ASYNC110 - what is waited for happens in a thread
        await asyncio.sleep(0.001)


async def test_later_reads_wait_for_the_next_read() -> None:
    """Reads requested during a read are made after it, together, and see what was written meanwhile."""
    source = Source()
    source.values = {"a": 1, "b": 2}
    reads = BatchedReads(source.read)
    first = asyncio.create_task(reads.get("a"))
    await until_read(source, 1)
    source.values["a"] = 10
    later = [asyncio.create_task(reads.get(key)) for key in ("a", "a", "b", "c")]
    await asyncio.sleep(0)
    source.go_on.set()
    assert await first == 1
    assert await asyncio.gather(*later) == [10, 10, 2, None]
    assert source.read_keys == [["a"], ["a", "b", "c"]]
    assert reads.idle


async def test_many_keys_are_read_in_parts() -> None:
    """A read has no more keys than a statement may have."""
    source = Source()
    source.go_on.set()
    reads = BatchedReads(source.read)
    await asyncio.gather(*(reads.get(str(number)) for number in range(MAX_BATCH + 5)))
    assert [len(keys) for keys in source.read_keys] == [MAX_BATCH, 5]


async def test_an_error_reaches_the_waiting_callers_only() -> None:
    """The next read is made again."""
    source = Source()
    source.values, source.error = {"a": 1}, StoreUnavailableError("gone")
    source.go_on.set()
    reads = BatchedReads(source.read)
    told = await asyncio.gather(reads.get("a"), reads.get("b"), return_exceptions=True)
    assert [type(error) for error in told] == [StoreUnavailableError] * 2
    source.error = None
    assert await reads.get("a") == 1


async def test_a_cancelled_caller_does_not_affect_others() -> None:
    """The other callers get their results."""
    source = Source()
    source.values = {"a": 1}
    reads = BatchedReads(source.read)
    gone, stays = (asyncio.create_task(reads.get("a")) for _ in range(2))
    await until_read(source, 1)
    gone.cancel()
    source.go_on.set()
    assert await stays == 1


async def test_equal_reads_are_made_once() -> None:
    """One read serves all concurrent callers with the same key, and each other key has a read of its own."""
    source = Source()
    source.values = {"a": 1, "b": 2}
    reads = CoalescedReads(source.read_one)
    asked = [asyncio.create_task(reads.get(key)) for key in ("a", "a", "b", "a")]
    await until_read(source, 1)
    source.go_on.set()
    assert await asyncio.gather(*asked) == [1, 1, 2, 1]
    assert sorted(source.read_keys) == [["a"], ["b"]]
    again = [asyncio.create_task(reads.get("a")) for _ in range(3)]
    assert await asyncio.gather(*again) == [1, 1, 1]
    assert len(source.read_keys) == 3


@pytest.mark.parametrize("error", [StoreUnavailableError("gone"), ValueError("a bug")])
async def test_a_feed_continues_after_an_error(error: Exception) -> None:
    """Followers are notified of the next change after any error of a read."""
    errors = [error]

    def counts(ids: Sequence[str]) -> dict[str, int]:
        if errors:
            raise errors.pop()
        return dict.fromkeys(ids, 1)

    feed = ChangeFeed(counts, tick_seconds=0.01)
    assert await feed.wait("a", 0, 20)
    assert not errors


async def test_a_feed_releases_followers_of_deleted_work() -> None:
    """No event of deleted work can follow."""
    feed = ChangeFeed(lambda _: {}, tick_seconds=0.01)
    assert await feed.wait("a", 5, 20)
