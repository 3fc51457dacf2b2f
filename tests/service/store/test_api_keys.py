"""The contract of the key store and of quotas: every backend keeps it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import select, update

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import State
from batchwright_service.domain.key_texts import NewKey, make_key
from batchwright_service.errors import ConflictError, NotFoundError, QuotaExceededError
from batchwright_service.store.api_keys import KeyStore
from batchwright_service.store.database.schema import api_keys, sessions, work_items
from batchwright_service.store.database.transactions import open_engine, write_transaction
from batchwright_service.store.models import UNLIMITED, Ending, Lease, Quota
from batchwright_service.store.store import Store
from tests.support.service.scripted import SERVED, new_work

READ = (Scope.TUNINGS_READ,)
NewId = Callable[[str], str]
SetTimes = Callable[..., None]


@pytest.fixture
def keys(store: Store) -> KeyStore:
    """An empty store of keys of each backend."""
    return store.keys


@pytest.fixture
def set_work(database_url: str) -> Iterator[SetTimes]:
    """Sets columns of a work item, as if time had passed."""
    engine = open_engine(database_url)

    def change(work_id: str, **values: int) -> None:
        with write_transaction(engine) as connection:
            if "lease_expires_at" in values:
                values["expiry_check_at"] = values["lease_expires_at"]
            connection.execute(update(work_items).where(work_items.c.id == work_id).values(**values))

    yield change
    engine.dispose()


def added(keys: KeyStore, name: str = "ci", scopes: tuple[Scope, ...] = READ, expires: float | None = None) -> NewKey:
    """Store a key."""
    new, _ = make_key(name, scopes, expires)
    keys.add(new)
    return new


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


def claimed(store: Store) -> Lease:
    """Claim what is next; there must be something."""
    claim = store.leases.claim(SERVED, 60.0)
    assert claim is not None
    return claim.lease


def test_a_key_is_stored_without_its_text(keys: KeyStore) -> None:
    """Name, scopes and digest come back; it has not been used, does not expire and is not revoked."""
    new, text_of_it = make_key("ci", (Scope.JOBS_RUN, Scope.TUNINGS_READ))
    key = keys.add(new)
    stored = keys.find(new.id)
    assert stored is not None
    assert (stored.key, stored.digest, stored.seconds_left) == (key, new.digest, None)
    assert (key.id, key.name, key.scopes) == (new.id, "ci", (Scope.JOBS_RUN, Scope.TUNINGS_READ))
    assert (key.expires_at, key.revoked_at, key.last_used_at) == (None, None, None)
    assert key.created_at.tzinfo is not None
    assert text_of_it.startswith(key.prefix)
    assert text_of_it[len(key.prefix) + 1 :] not in repr(stored)


def test_the_id_of_a_key_is_taken_once(keys: KeyStore) -> None:
    """A second key with the same id is a conflict and changes nothing."""
    new = added(keys)
    with pytest.raises(ConflictError, match=new.id):
        keys.add(replace(new, name="other"))
    assert [key.name for key in keys.list()] == ["ci"]


def test_an_unknown_key_is_none_or_not_found(keys: KeyStore) -> None:
    """Looking is no error, revoking is, and touching does nothing."""
    assert keys.find("0" * 16) is None
    keys.touch("0" * 16, 60.0)
    with pytest.raises(NotFoundError, match="0000"):
        keys.revoke("0" * 16)
    assert not keys.exist()


def test_keys_are_listed_oldest_first_and_are_never_gone(keys: KeyStore) -> None:
    """A revoked key stays in the list, and counts as a key."""
    first, second = added(keys, "first"), added(keys, "second")
    ended = keys.revoke(first.id)
    assert ended.revoked_at is not None
    assert keys.revoke(first.id) == ended
    keys.revoke(second.id)
    assert sorted(key.name for key in keys.list()) == ["first", "second"]
    assert keys.exist()


def test_the_time_a_key_has_left_is_the_databases(keys: KeyStore) -> None:
    """Seconds until it expires, below zero once it has."""
    lasting, over = keys.find(added(keys, expires=9000.0).id), keys.find(added(keys, expires=-1.0).id)
    assert lasting is not None
    assert over is not None
    assert lasting.seconds_left is not None
    assert over.seconds_left is not None
    assert 8000 < lasting.seconds_left <= 9000
    assert over.seconds_left <= -1


def test_use_is_noted_at_most_so_often(store: Store, database_url: str) -> None:
    """The first use is noted; one soon after is not; one a minute later is."""
    key_id = added(store.keys).id
    store.keys.touch(key_id, 60.0)
    first = store.keys.list()[0].last_used_at
    assert first is not None
    store.keys.touch(key_id, 60.0)
    assert store.keys.list()[0].last_used_at == first
    engine = open_engine(database_url)
    with write_transaction(engine) as connection:
        connection.execute(update(api_keys).values(last_used_at=api_keys.c.last_used_at - 61_000))
    engine.dispose()
    store.keys.touch(key_id, 60.0)
    later = store.keys.list()[0].last_used_at
    assert later is not None
    assert later >= first


# --- quotas ---


def test_work_names_its_key(store: Store, new_id: NewId) -> None:
    """The key that made a piece of work comes back with it; none stays none."""
    with_key, without = new_work(new_id("tun"), key_id="a" * 16), new_work(new_id("tun"))
    assert store.submissions.add(with_key).key_id == "a" * 16
    assert store.submissions.add(without).key_id is None


def test_a_key_queues_as_much_as_its_quota(store: Store, new_id: NewId) -> None:
    """One more is refused and not stored; other keys, and work without one, are not touched by it."""
    key_id, other = added(store.keys).id, added(store.keys).id
    quota = Quota(queued=2)
    for _ in range(2):
        store.submissions.add(new_work(new_id("tun"), key_id=key_id), quota)
    refused = new_work(new_id("tun"), key_id=key_id)
    with pytest.raises(QuotaExceededError, match=r"2 tunings and jobs queued \(limit 2\)") as caught:
        store.submissions.add(refused, quota)
    assert caught.value.retry_after_seconds >= 1
    with pytest.raises(NotFoundError):
        store.work.get(refused.id)
    store.submissions.add(new_work(new_id("tun"), key_id=other), quota)
    for _ in range(3):
        store.submissions.add(new_work(new_id("tun")), quota)
    store.submissions.add(refused, UNLIMITED)


def test_what_runs_is_queued_no_more(store: Store, new_id: NewId) -> None:
    """A place in the queue is free again when the work is claimed."""
    key_id = added(store.keys).id
    store.submissions.add(new_work(new_id("tun"), key_id=key_id), Quota(queued=1))
    claimed(store)
    store.submissions.add(new_work(new_id("tun"), key_id=key_id), Quota(queued=1))


def test_concurrent_submissions_do_not_pass_the_quota(store: Store, new_id: NewId) -> None:
    """However many ask at once, as many as may are queued."""
    key_id = added(store.keys).id

    def submit(_: int) -> bool:
        try:
            store.submissions.add(new_work(new_id("tun"), key_id=key_id), Quota(queued=3))
        except QuotaExceededError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(submit, range(16))) == 3


def test_time_on_devices_is_counted(store: Store, new_id: NewId, set_work: SetTimes) -> None:
    """Of what runs and what has ended, not of what waits; above the quota nothing more is taken."""
    key_id = added(store.keys).id
    quota = Quota(device_seconds=30.0, window_seconds=1000.0)
    first = store.submissions.add(new_work(new_id("tun"), key_id=key_id), quota).id
    lease = claimed(store)
    set_work(first, claimed_at=now_ms() - 20_000)
    store.submissions.add(new_work(new_id("tun"), key_id=key_id), quota)
    set_work(first, claimed_at=now_ms() - 31_000)
    with pytest.raises(QuotaExceededError, match=r"used 3\d s on devices within .* \(limit 30 s\)") as running:
        store.submissions.add(new_work(new_id("tun"), key_id=key_id), quota)
    store.leases.finish(lease, Ending(State.FAILED))
    with pytest.raises(QuotaExceededError, match=r"used 3\d s") as ended:
        store.submissions.add(new_work(new_id("tun"), key_id=key_id), quota)
    assert running.value.retry_after_seconds == 60
    assert 990 <= ended.value.retry_after_seconds <= 1001


def test_what_ended_before_the_window_counts_no_more(store: Store, new_id: NewId, set_work: SetTimes) -> None:
    """Only what ended within it, whole."""
    key_id = added(store.keys).id
    quota = Quota(device_seconds=30.0, window_seconds=1000.0)
    first = store.submissions.add(new_work(new_id("tun"), key_id=key_id), quota).id
    store.leases.finish(claimed(store), Ending(State.FAILED))
    set_work(first, device_ms=90_000, ended_at=now_ms() - 700_000)
    with pytest.raises(QuotaExceededError) as caught:
        store.submissions.add(new_work(new_id("tun"), key_id=key_id), quota)
    assert caught.value.retry_after_seconds <= 301
    set_work(first, ended_at=now_ms() - 1_001_000)
    store.submissions.add(new_work(new_id("tun"), key_id=key_id), quota)


def test_the_times_of_all_claims_are_added(store: Store, new_id: NewId, set_work: SetTimes) -> None:
    """Device time counts for work handed back, for a vanished worker until its lease ends, and for the last claim."""
    key_id = added(store.keys).id
    work_id = store.submissions.add(new_work(new_id("tun"), key_id=key_id)).id
    lease = claimed(store)
    set_work(work_id, claimed_at=now_ms() - 10_000)
    store.leases.hand_back(lease)
    claimed(store)
    set_work(work_id, claimed_at=now_ms() - 30_000, lease_expires_at=now_ms() - 10_000)
    lease = claimed(store)
    set_work(work_id, claimed_at=now_ms() - 5_000)
    store.leases.finish(lease, Ending(State.FAILED))
    with pytest.raises(QuotaExceededError, match="used 35 s"):
        store.submissions.add(new_work(new_id("tun"), key_id=key_id), Quota(device_seconds=34.0))
    store.submissions.add(new_work(new_id("tun"), key_id=key_id), Quota(device_seconds=37.0))


# --- sessions ---


def test_a_session_comes_back_with_its_key(store: Store) -> None:
    """By its digest alone, with what verifying the key takes, until it is closed; another one stays."""
    key = added(store.keys, expires=9000.0)
    store.sessions.open("d" * 64, key.id, 6000.0)
    store.sessions.open("e" * 64, key.id, 6000.0)
    found = store.sessions.find("d" * 64)
    assert found is not None
    assert (found.stored.key.id, found.stored.digest) == (key.id, key.digest)
    assert 5000 < found.seconds_left <= 6000 < (found.stored.seconds_left or 0) <= 9000
    assert store.sessions.find(key.digest) is None
    for _ in range(2):
        store.sessions.close("d" * 64)
        assert store.sessions.find("d" * 64) is None
    assert store.sessions.find("e" * 64) is not None


def test_a_session_outlives_neither_its_time_nor_its_key(store: Store) -> None:
    """An expired session is not found; a session of a revoked key is returned with the key."""
    key = added(store.keys)
    store.sessions.open("d" * 64, key.id, -1.0)
    assert store.sessions.find("d" * 64) is None
    store.sessions.open("e" * 64, key.id, 30.0)
    store.keys.revoke(key.id)
    found = store.sessions.find("e" * 64)
    assert found is not None
    assert found.stored.key.revoked_at is not None


def test_a_session_is_opened_once(store: Store) -> None:
    """A digest that is taken is a conflict, and the session stays whose it was."""
    first, second = added(store.keys), added(store.keys)
    store.sessions.open("d" * 64, first.id, 30.0)
    with pytest.raises(ConflictError):
        store.sessions.open("d" * 64, second.id, 30.0)
    found = store.sessions.find("d" * 64)
    assert found is not None
    assert found.stored.key.id == first.id


def test_sessions_that_are_over_do_not_pile_up(store: Store, database_url: str) -> None:
    """Each that begins has those deleted that are over, and no other."""
    key = added(store.keys)
    for digest in "abc":
        store.sessions.open(digest * 64, key.id, -1.0)
    store.sessions.open("d" * 64, key.id, 30.0)
    store.sessions.open("e" * 64, key.id, 30.0)
    engine = open_engine(database_url)
    with write_transaction(engine) as connection:
        left = connection.execute(select(sessions.c.digest)).scalars().all()
    engine.dispose()
    assert sorted(left) == ["d" * 64, "e" * 64]
