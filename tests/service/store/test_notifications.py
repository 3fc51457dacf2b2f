"""Notifications of PostgreSQL: to one waiting worker, within the transaction, and again after a broken connection."""

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from batchwright.client.documents.workers import ServedDevice
from batchwright_service.errors import QuotaExceededError
from batchwright_service.store.database import notifications
from batchwright_service.store.database.notifications import Listener, channel_of
from batchwright_service.store.database.transactions import write_transaction
from batchwright_service.store.models import Beat, Quota
from batchwright_service.store.store import Store
from tests.support.service.scripted import SERVED, new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed, on_device

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
PATIENCE_SECONDS = 60.0
RESUMED, CANCELLED, LOST = "resumed", "cancelled", "lost"


class Inbox:
    """Notes what a listener receives."""

    def __init__(self) -> None:
        self._received: queue.SimpleQueue[str] = queue.SimpleQueue()

    def work_queued(self, slot: str) -> None:
        """Note the slot."""
        self._received.put(slot)

    def work_cancelled(self) -> None:
        """Note it."""
        self._received.put(CANCELLED)

    def notifications_resumed(self) -> None:
        """Note it."""
        self._received.put(RESUMED)

    def notifications_lost(self, error: Exception) -> None:
        """Note it; a listener may fail several times in a row."""
        assert str(error)
        self._received.put(LOST)

    def next(self) -> str:
        """Wait for what comes next."""
        return self._received.get(timeout=PATIENCE_SECONDS)

    def until(self, wanted: str) -> None:
        """Wait until this comes."""
        while self.next() != wanted:
            pass


Listen = Callable[[str], Inbox]


@pytest.fixture
def listen(store: Store) -> Iterator[Listen]:
    """Starts a listener of a process, and waits until notifications arrive."""
    started: list[Listener] = []

    def start(owner: str) -> Inbox:
        inbox = Inbox()
        listener = store.new_listener(owner, inbox)
        assert listener is not None
        listener.start()
        started.append(listener)
        assert inbox.next() == RESUMED
        assert listener.is_live
        return inbox

    yield start
    for listener in started:
        listener.stop()


def wait_for_work(store: Store, *devices: ServedDevice) -> None:
    """Announce devices whose workers wait for work."""
    for served in devices:
        store.devices.beat(Beat(LEASE_SECONDS, devices=(served,), changed=frozenset({served.slot})))
        store.devices.await_work(served)


def card(host: str, device: str = "cuda:0", name: str = "test card") -> ServedDevice:
    """A device of a host."""
    made = on_device(device, name)
    return made.model_copy(update={"slot": f"{host}/{device}", "owner": f"{host}:scope:1"})


def test_queued_work_wakes_one_waiting_worker(store: Store, listen: Listen, new_id: NewId) -> None:
    """Of two hosts one is notified; the next piece notifies the other one, and a third nobody."""
    devices = {host: card(host) for host in ("one", "two")}
    inboxes = {host: listen(served.owner) for host, served in devices.items()}
    wait_for_work(store, *devices.values())
    for _ in range(3):
        store.submissions.add(new_work(new_id("tun"), device="cuda:0"))
    for host, served in devices.items():
        store.submissions.cancel(claimed(store, served).item.id)
        assert [inboxes[host].next() for _ in range(2)] == [served.slot, CANCELLED]


def test_a_worker_of_other_hardware_is_not_woken(store: Store, listen: Listen, new_id: NewId) -> None:
    """Nor is one of another device, one that does not wait, one that is busy, or one without a heartbeat."""
    right, other, elsewhere, busy = card("a"), card("b", name="other"), card("c", "cuda:1"), card("d")
    inbox = listen(right.owner)
    for name in (other, elsewhere, busy):
        listen(name.owner)
    store.submissions.add(new_work(new_id("tun"), device="cuda:0"))
    claimed(store, busy)
    gone = card("e")
    wait_for_work(store, gone)
    with write_transaction(store.engine) as connection:
        connection.execute(text("UPDATE workers SET heartbeat_at = heartbeat_at - 2 * lease_ms"))
    wait_for_work(store, other, elsewhere, busy, right)
    store.devices.beat(Beat(LEASE_SECONDS, devices=(card("f"),), changed=frozenset({card("f").slot})))
    store.submissions.add(new_work(new_id("tun"), device="cuda:0", hardware=right.hardware))
    assert inbox.next() == right.slot
    with write_transaction(store.engine) as connection:
        waiting = connection.execute(text("SELECT slot FROM workers WHERE waits ORDER BY slot")).scalars().all()
    assert waiting == [other.slot, elsewhere.slot, busy.slot, gone.slot]


def test_work_that_is_handed_back_or_resumed_wakes_too(store: Store, listen: Listen, new_id: NewId) -> None:
    """Every way into the queue notifies."""
    inbox = listen(SERVED.owner)
    store.submissions.add(new_work(new_id("tun")))
    lease = claimed(store, SERVED.model_copy(update={"slot": "other/cpu", "owner": "other:scope:1"})).lease
    wait_for_work(store, SERVED)
    store.leases.hand_back(lease)
    assert inbox.next() == SERVED.slot


def test_a_transaction_that_is_rolled_back_wakes_nobody(store: Store, listen: Listen, new_id: NewId) -> None:
    """The worker waits on, for the next work."""
    inbox = listen(SERVED.owner)
    wait_for_work(store, SERVED)
    key = "a" * 16
    with pytest.raises(QuotaExceededError):
        store.submissions.add(new_work(new_id("tun"), key_id=key), Quota(queued=0))
    store.submissions.add(new_work(new_id("tun")))
    store.submissions.cancel(claimed(store).item.id)
    assert [inbox.next() for _ in range(2)] == [SERVED.slot, CANCELLED]


def test_a_cancellation_reaches_the_owner_alone(store: Store, listen: Listen, new_id: NewId) -> None:
    """Queued work that is cancelled notifies nobody."""
    store.submissions.add(new_work(new_id("tun")))
    item = claimed(store).item
    owner, other = listen(SERVED.owner), listen("other:scope:1")
    store.submissions.cancel(store.submissions.add(new_work(new_id("tun"))).id)
    store.submissions.cancel(item.id)
    assert owner.next() == CANCELLED
    with write_transaction(store.engine) as connection:
        notifications.notify_owner(connection, "other:scope:1", "marker")
    assert other.next() == CANCELLED
    with pytest.raises(queue.Empty):
        other._received.get_nowait()


def listening_pids(store: Store) -> list[int]:
    """The server's processes of listening connections."""
    with write_transaction(store.engine) as connection:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"
        return list(connection.execute(text(query)).scalars())


def test_a_terminated_connection_is_opened_again(store: Store, listen: Listen, new_id: NewId) -> None:
    """The process learns that notifications may have been lost, and of later ones."""
    inbox = listen(SERVED.owner)
    for _ in range(2):
        (pid,) = listening_pids(store)
        with write_transaction(store.engine) as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
        assert inbox.next() == LOST
        inbox.until(RESUMED)
    wait_for_work(store, SERVED)
    store.submissions.add(new_work(new_id("tun")))
    assert inbox.next() == SERVED.slot


def test_a_connection_on_which_nothing_arrives_is_no_live_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooler that shares connections accepts LISTEN and loses what comes: the first notification proves it."""
    monkeypatch.setattr(notifications, "_HELLO_SECONDS", 0.05)
    silent = text("SELECT CAST(:channel AS TEXT), CAST(:message AS TEXT)")
    monkeypatch.setattr(notifications, "_NOTIFY", silent)
    inbox = Inbox()
    listener = store.new_listener("some:scope:1", inbox)
    assert listener is not None
    listener.start()
    assert inbox.next() == LOST
    assert not listener.is_live
    listener.stop()


def test_channels_are_names_of_the_server(store: Store) -> None:
    """The name that is listened to is the one that the server makes of an owner's."""
    long_name = "host-ä" * 60
    query: Any = text("SELECT 'batchwright_' || left(encode(sha256(convert_to(:owner, 'UTF8')), 'hex'), 32)")
    with write_transaction(store.engine) as connection:
        assert connection.execute(query, {"owner": long_name}).scalar_one() == channel_of(long_name)
    assert len(channel_of(long_name)) < 63
