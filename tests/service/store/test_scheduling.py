"""The order and the listing of the queue, on every backend."""

import random
from typing import Any

import pytest
from sqlalchemy import update

from batchwright.client.documents.states import State
from batchwright_service.store.database.schema import submitters
from batchwright_service.store.database.transactions import write_transaction
from batchwright_service.store.models import Ending
from batchwright_service.store.store import Store
from tests.support.service.scripted import SERVED, new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed, elsewhere, engine_at, fill, on_device, set_work

A, B = "a" * 16, "b" * 16


def taken(store: Store) -> list[str]:
    """Everything that one device takes, in its order."""
    order = []
    while (claim := store.leases.claim(SERVED, LEASE_SECONDS)) is not None:
        order.append(claim.item.id)
        store.leases.finish(claim.lease, Ending(State.FAILED))
    return order


def queue_up(store: Store, new_id: NewId, *keys: str | None, **changes: Any) -> list[str]:
    """Queue one piece of work of each key, in this order."""
    return [store.submissions.add(new_work(new_id("tun"), key_id=key, **changes)).id for key in keys]


def test_keys_take_turns(store: Store, new_id: NewId) -> None:
    """A submitter with much queued work does not block others; callers without a key count as one."""
    a1, a2, a3, b1, n1, n2, b2 = queue_up(store, new_id, A, A, A, B, None, None, B)
    assert taken(store) == [a1, b1, n1, a2, b2, n2, a3]


def test_a_turn_counts_on_whatever_device(store: Store, new_id: NewId) -> None:
    """A key whose work was just started on a card waits on the processor for the others."""
    queue_up(store, new_id, A, device="cuda:0")
    claimed(store, on_device("cuda:0"))
    a1, b1 = queue_up(store, new_id, A, B)
    assert taken(store) == [b1, a1]


def test_a_turn_is_remembered_when_the_work_is_gone(store: Store, new_id: NewId) -> None:
    """Deleting what one has had gives no turn back."""
    (first,) = queue_up(store, new_id, A)
    taken(store)
    store.retention.delete(first)
    a1, b1 = queue_up(store, new_id, A, B)
    assert taken(store) == [b1, a1]


def test_priority_goes_before_turns(store: Store, new_id: NewId) -> None:
    """A higher priority goes first, also for the key of the last start; within a priority, keys alternate."""
    a1, b1 = queue_up(store, new_id, A, B)
    urgent = queue_up(store, new_id, A, A, priority=5)
    low = queue_up(store, new_id, B, priority=-1)
    assert taken(store) == [*urgent, b1, a1, *low]


def test_the_order_counts_tunings_and_jobs_alike(store: Store, new_id: NewId) -> None:
    """The older goes first, whatever it is."""
    tuning = store.submissions.add(new_work(new_id("tun"))).id
    job = store.submissions.add(new_work(new_id("job"))).id
    assert taken(store) == [tuning, job]


def test_what_is_handed_back_keeps_its_age(store: Store, new_id: NewId) -> None:
    """Work that was handed back goes before later work."""
    first, second = queue_up(store, new_id, None, None)
    store.leases.hand_back(claimed(store).lease)
    assert taken(store) == [first, second]


def test_work_goes_to_the_hardware_it_names(store: Store, new_id: NewId) -> None:
    """An unlike card with the same id takes it neither from the queue nor from a worker that vanished."""
    mine, unlike = on_device("cuda:0", "card one"), on_device("cuda:0", "card two")
    named = store.submissions.add(new_work(new_id("tun"), device="cuda:0", hardware=mine.hardware)).id
    assert store.leases.claim(unlike, LEASE_SECONDS) is None
    assert claimed(store, mine, lease_seconds=0.0).item.id == named
    assert store.leases.claim(unlike, LEASE_SECONDS) is None
    assert claimed(store, mine).item.id == named
    anywhere = store.submissions.add(new_work(new_id("tun"), device="cuda:0")).id
    assert claimed(store, unlike).item.id == anywhere


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_work_left_on_hardware_that_changed_blocks_no_place(
    store: Store, new_id: NewId, *, cancelled: bool, more: bool
) -> None:
    """A host comes back with another card: what ran there waits for its own kind, or ends, and the place is free."""
    before, after = on_device("cuda:0", "old card"), on_device("cuda:0", "new card")
    after = after.model_copy(update={"slot": before.slot})
    left = store.submissions.add(new_work(new_id("tun"), device="cuda:0", hardware=before.hardware)).id
    claimed(store, before, lease_seconds=0.0)
    if cancelled:
        store.submissions.cancel(left)
    if more:
        other = store.submissions.add(new_work(new_id("tun"), device="cuda:0", hardware=after.hardware)).id
        assert claimed(store, after).item.id == other
    else:
        assert store.leases.claim(after, LEASE_SECONDS) is None
    item = store.work.get(left)
    assert (item.state, item.slot) == (State.CANCELLED if cancelled else State.QUEUED, None)
    assert (item.ended_at is not None) == cancelled
    assert store.evidence.events(left)[-1].state is item.state
    if not cancelled:
        elsewhere_now = before.model_copy(update={"slot": "another/cuda:0"})
        claim = claimed(store, elsewhere_now)
        assert (claim.item.id, claim.lost_leases) == (left, 1)


def test_the_queue_is_told_in_the_order_it_is_taken(store: Store, database_url: str) -> None:
    """For many keys, priorities and turns, `queue` says exactly what a device then takes."""
    chosen = random.Random(1)
    with engine_at(database_url) as engine:
        for priority in (0, 3, -2, 0):
            fill(engine, chosen.randint(3, 12), tuple(chosen.sample(["", A, B, "c" * 16], 3)), priority=priority)
        with write_transaction(engine) as connection:
            connection.execute(update(submitters).where(submitters.c.id == A).values(turn=7))
    entries = store.queue.waiting(100)
    assert [entry.position for entry in entries] == list(range(1, len(entries) + 1))
    assert [entry.id for entry in store.queue.waiting(5)] == [entry.id for entry in entries[:5]]
    assert [entry.id for entry in entries] == taken(store)


def test_the_queue_tells_the_heads_of_all_devices_first(store: Store, new_id: NewId) -> None:
    """Each device has its own order; what runs or has ended is not in it."""
    cpu = queue_up(store, new_id, A, B)
    card = queue_up(store, new_id, A, device="cuda:0", priority=2)
    entries = [(entry.id, entry.device, entry.position, entry.priority) for entry in store.queue.waiting(10)]
    assert entries == [(cpu[0], "cpu", 1, 0), (card[0], "cuda:0", 1, 2), (cpu[1], "cpu", 2, 0)]
    claimed(store)
    assert {entry.id: entry.position for entry in store.queue.waiting(10)} == {card[0]: 1, cpu[1]: 1}


def test_unlike_cards_have_orders_of_their_own(store: Store, new_id: NewId) -> None:
    """Work behind another card's is not behind; work for any card has the place of the card that takes it first."""
    one, two = (on_device("cuda:0", name).hardware for name in ("one", "two"))
    for hardware in (one, one, two, None):
        store.submissions.add(new_work(new_id("tun"), device="cuda:0", hardware=hardware))
    assert [entry.position for entry in store.queue.waiting(10)] == [1, 1, 2, 2]


def test_depths_count_what_waits_and_how_long(store: Store, database_url: str, new_id: NewId) -> None:
    """By device, without what runs; the age is that of what has waited longest."""
    assert store.queue.depths() == []
    (first, *_) = queue_up(store, new_id, None, None, None)
    queue_up(store, new_id, None, device="cuda:0")
    claimed(store, on_device("cuda:0"))
    set_work(database_url, first, updated_at=1_000)
    (depth,) = store.queue.depths()
    assert (depth.device, depth.waiting) == ("cpu", 3)
    assert depth.oldest_age_seconds > 1e9
    assert max(entry.age_seconds for entry in store.queue.waiting(10)) == pytest.approx(
        depth.oldest_age_seconds, abs=60
    )


def test_what_is_handed_back_has_not_waited_since_it_was_made(store: Store, database_url: str, new_id: NewId) -> None:
    """A job that ran for days and is handed back is no sign of a queue that stands still."""
    (work_id,) = queue_up(store, new_id, None)
    set_work(database_url, work_id, created_at=1_000)
    store.leases.hand_back(claimed(store).lease)
    (depth,) = store.queue.depths()
    assert depth.oldest_age_seconds < 60


def test_a_claim_that_loses_to_a_cancellation_takes_the_next(store: Store, new_id: NewId) -> None:
    """Cancelled work is skipped."""
    first, second = queue_up(store, new_id, None, None)
    store.submissions.cancel(first)
    assert claimed(store, elsewhere("other")).item.id == second
