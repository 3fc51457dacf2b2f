"""Heartbeats of a process, on every backend: all of its leases and devices in one transaction."""

from dataclasses import replace

import pytest
from sqlalchemy import select

from batchwright.client.documents.states import State
from batchwright_service.store.database.schema import work_items, workers
from batchwright_service.store.database.transactions import open_engine, read_transaction, write_transaction
from batchwright_service.store.models import Beat, Ending
from batchwright_service.store.store import Store
from tests.support.service.postgres import Databases
from tests.support.service.scripted import SERVED, new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, beaten, claimed, elsewhere, on_device, set_work

NOTHING = Beat(LEASE_SECONDS)


def test_every_lease_of_a_process_learns_its_own_state(store: Store, new_id: NewId) -> None:
    """One is renewed, one was cancelled, one was taken over, one has ended: each holder learns of its own alone."""
    leases = []
    for index in range(4):
        store.submissions.add(new_work(new_id("tun"), device=f"cuda:{index}"))
        leases.append(claimed(store, on_device(f"cuda:{index}"), 0.0 if index == 2 else LEASE_SECONDS).lease)
    held, cancelled, taken, ended = leases
    store.submissions.cancel(cancelled.work_id)
    other = on_device("cuda:2").model_copy(update={"slot": "other/cuda:2", "owner": "other:scope:1"})
    later = claimed(store, other).lease
    store.leases.finish(ended, Ending(State.SUCCEEDED))
    reply = beaten(store, *leases)
    assert reply.renewed == {held: State.RUNNING, cancelled: State.CANCELLING}
    assert reply.lost == {taken, ended}
    assert beaten(store, later).renewed == {later: State.RUNNING}


def test_another_token_or_owner_renews_nothing(store: Store, new_id: NewId) -> None:
    """A lease is valid with its own fencing token and owner alone."""
    store.submissions.add(new_work(new_id("tun")))
    lease = claimed(store).lease
    forged = [replace(lease, token=lease.token + 1), replace(lease, owner="other:scope:1")]
    assert beaten(store, *forged).lost == set(forged)


@pytest.mark.parametrize("ended_at", ["expiry_check_at", "lease_expires_at"])
def test_a_lease_is_taken_over_when_both_of_its_times_have_passed(
    store: Store, database_url: str, new_id: NewId, ended_at: str
) -> None:
    """The indexed time is a lower bound: it hides no lease that has expired, and ends none that has not."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    claimed(store)
    set_work(database_url, work_id, **{ended_at: 0})
    assert store.leases.claim(elsewhere("other"), LEASE_SECONDS) is None
    set_work(database_url, work_id, expiry_check_at=0, lease_expires_at=0)
    assert claimed(store, elsewhere("other")).lease.token == 2


def test_renewals_keep_the_indexed_time_below_the_end_of_the_lease(
    store: Store, database_url: str, new_id: NewId
) -> None:
    """It moves when it would pass soon, and stays otherwise, so that most renewals change no index."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store).lease
    seen = []
    for check_at in (None, 1):
        if check_at is not None:
            set_work(database_url, work_id, expiry_check_at=check_at)
        beaten(store, lease)
        with read_transaction(store.engine) as connection:
            columns = (work_items.c.expiry_check_at, work_items.c.lease_expires_at)
            seen.append(connection.execute(select(*columns).where(work_items.c.id == work_id)).one())
    assert seen[0].expiry_check_at < seen[0].lease_expires_at
    assert seen[0].expiry_check_at < seen[1].expiry_check_at
    assert abs(seen[1].lease_expires_at - seen[1].expiry_check_at) < 1000


def test_a_worker_that_is_gone_for_a_day_is_listed_no_more(store: Store) -> None:
    """Also where no other worker is announced, which would delete its row."""
    store.devices.announce(SERVED)
    with write_transaction(store.engine) as connection:
        connection.execute(workers.update().values(heartbeat_at=workers.c.heartbeat_at - 86_000_000))
    assert [seen.served for seen in store.devices.list()] == [SERVED]
    with write_transaction(store.engine) as connection:
        connection.execute(workers.update().values(heartbeat_at=workers.c.heartbeat_at - 401_000))
    assert store.devices.list() == []


def test_a_locked_row_delays_no_other_lease(postgresql: Databases, new_id: NewId) -> None:
    """Its own lease is left as it is, neither renewed nor lost, until the lock is gone."""
    store = Store(open_engine(postgresql.migrated()))
    store.submissions.add(new_work(new_id("tun"), device="cuda:0"))
    store.submissions.add(new_work(new_id("tun"), device="cuda:1"))
    locked, free = (claimed(store, on_device(device)).lease for device in ("cuda:0", "cuda:1"))
    with write_transaction(store.engine) as connection:
        connection.execute(select(work_items.c.id).where(work_items.c.id == locked.work_id).with_for_update())
        reply = beaten(store, locked, free)
    assert (set(reply.renewed), reply.lost) == ({free}, frozenset())
    assert set(beaten(store, locked, free).renewed) == {locked, free}
    store.close()


def test_devices_are_announced_together(store: Store) -> None:
    """New ones are written whole, known ones get a new time, deleted ones come back."""
    devices = (on_device("cuda:0"), on_device("cuda:1"))
    store.devices.beat(replace(NOTHING, devices=devices, changed=frozenset(served.slot for served in devices)))
    assert [seen.served for seen in store.devices.list()] == list(devices)
    with write_transaction(store.engine) as connection:
        connection.execute(workers.update().values(heartbeat_at=workers.c.heartbeat_at - 9000))
    store.devices.withdraw(devices[1])
    assert [seen.age_seconds >= 9.0 for seen in store.devices.list()] == [True]
    store.devices.beat(replace(NOTHING, devices=devices))
    assert [(seen.served, seen.age_seconds < 9.0) for seen in store.devices.list()] == [(one, True) for one in devices]


def test_a_changed_device_is_written_whole(store: Store) -> None:
    """The list shows the reason why a device takes no work."""
    full = SERVED.model_copy(update={"unready": "disk-full: no space"})
    store.devices.announce(SERVED)
    store.devices.beat(replace(NOTHING, devices=(full,)))
    assert store.devices.list()[0].served == SERVED
    store.devices.beat(replace(NOTHING, devices=(full,), changed=frozenset({full.slot})))
    assert store.devices.list()[0].served == full


def test_idle_devices_learn_of_work_that_they_can_take(store: Store, new_id: NewId) -> None:
    """Queued for the device, for its hardware, abandoned, or misplaced; not that of other hardware or a busy slot."""
    idle = tuple(on_device(f"cuda:{index}") for index in range(6))
    add = store.submissions.add
    add(new_work(new_id("tun"), device="cuda:0"))
    add(new_work(new_id("tun"), device="cuda:1", hardware=idle[1].hardware))
    add(new_work(new_id("tun"), device="cuda:2", hardware="other card|1"))
    add(new_work(new_id("tun"), device="cuda:3"))
    lost = on_device("cuda:3").model_copy(update={"slot": "gone/cuda:3", "owner": "gone:scope:1"})
    claimed(store, lost, 0.0)
    add(new_work(new_id("tun"), device="cuda:4", priority=1))
    add(new_work(new_id("tun"), device="cuda:4"))
    claimed(store, idle[4])
    reply = store.devices.beat(replace(NOTHING, idle=idle))
    assert reply.wanted == {idle[0].slot, idle[1].slot, idle[3].slot}
