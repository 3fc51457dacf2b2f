"""Calls of many threads that one of them makes for all."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.database.batches import Batches
from batchwright_service.store.models import Claim
from batchwright_service.store.store import Store
from tests.support.service.scripted import new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, elsewhere

PATIENCE_SECONDS = 60.0


def test_those_who_come_meanwhile_share_one_call() -> None:
    """The first is alone; the others, who come while it runs, are served together, each with its own result."""
    calls: list[list[int]] = []
    first_runs, may_end = threading.Event(), threading.Event()

    def double(items: Sequence[int]) -> list[int]:
        calls.append(list(items))
        first_runs.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return [2 * item for item in items]

    batches = Batches(double)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(batches.run, 0)
        assert first_runs.wait(PATIENCE_SECONDS)
        others = [pool.submit(batches.run, item) for item in range(1, 5)]
        while len(batches._waiting) < len(others):
            threading.Event().wait(0.001)
        may_end.set()
        assert first.result(PATIENCE_SECONDS) == 0
        assert [other.result(PATIENCE_SECONDS) for other in others] == [2, 4, 6, 8]
    assert [sorted(call) for call in calls] == [[0], [1, 2, 3, 4]]


def test_an_error_reaches_every_caller_and_no_later_one() -> None:
    """The next call is made anew."""
    answers: list[Exception | int] = [StoreUnavailableError("gone"), 7]

    def answer(items: Sequence[int]) -> list[int]:
        result = answers.pop(0)
        if isinstance(result, Exception):
            raise result
        return [result for _ in items]

    batches = Batches(answer)
    with pytest.raises(StoreUnavailableError):
        batches.run(1)
    assert batches.run(1) == 7


def test_devices_of_a_process_claim_in_one_transaction(store: Store, new_id: NewId) -> None:
    """In the order of the queue, as many as there is work; a device that is named twice gets one piece."""
    ids = [store.submissions.add(new_work(new_id("tun"))).id for _ in range(3)]
    devices = [elsewhere(name) for name in ("a", "b", "b", "c", "d")]
    claims = store.leases.claim_together([(served, LEASE_SECONDS) for served in devices])
    assert [claim and (claim.item.id, claim.item.slot) for claim in claims] == [
        (ids[0], "a/cpu"),
        (ids[1], "b/cpu"),
        None,
        (ids[2], "c/cpu"),
        None,
    ]
    assert len({claim.lease for claim in claims if isinstance(claim, Claim)}) == 3
