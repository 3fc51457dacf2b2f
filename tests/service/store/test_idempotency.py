"""Idempotency keys in the store: the same key never creates twice, on every backend."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import func, select, update

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import WorkKind
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import ConflictError, NotFoundError, QuotaExceededError
from batchwright_service.store.database.schema import idempotency_keys
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import (
    UNLIMITED,
    DuplicateRequestError,
    Idempotency,
    Quota,
    StoredRequest,
)
from batchwright_service.store.store import Store
from batchwright_service.store.submissions import IDEMPOTENCY_KEY_TTL_SECONDS
from tests.support.factories import recommendation
from tests.support.service.scripted import new_work
from tests.support.service.stores import NewId, engine_at

REQUEST = Idempotency(owner="", key="k-1", digest="d" * 64)


def grow_older(url: str, seconds: float) -> None:
    """Make every stored request older by ``seconds``."""
    with engine_at(url) as engine, write_transaction(engine) as connection:
        older = idempotency_keys.c.created_at - int(seconds * 1000)
        connection.execute(update(idempotency_keys).values(created_at=older))


def test_a_request_is_stored_with_its_work(store: Store, new_id: NewId) -> None:
    """It is found only under its owner and key."""
    item = store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)
    assert store.submissions.find_request("", "k-1") == StoredRequest(REQUEST.digest, item.id, 202)
    assert store.submissions.find_request("a" * 16, "k-1") is None
    assert store.submissions.find_request("", "k-2") is None


def test_the_same_key_adds_nothing(store: Store, new_id: NewId) -> None:
    """The second request gets the work of the first, whatever its own content; nothing of it is stored."""
    item = store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)
    other = new_work(new_id("tun"))
    with pytest.raises(DuplicateRequestError) as caught:
        store.submissions.add(other, idempotency=replace(REQUEST, digest="e" * 64))
    assert caught.value.first == StoredRequest(REQUEST.digest, item.id, 202)
    with pytest.raises(NotFoundError):
        store.work.get(other.id)


def test_owners_do_not_share_keys(store: Store, new_id: NewId) -> None:
    """Equal keys of two owners are two keys."""
    for owner in ("", "a" * 16, "b" * 16):
        store.submissions.add(new_work(new_id("tun")), idempotency=replace(REQUEST, owner=owner))
    assert len(store.work.newest(WorkKind.TUNING, 10)) == 3


def test_requests_that_a_stored_tuning_serves_are_stored_too(store: Store, new_id: NewId) -> None:
    """Those that add a succeeded tuning, and those that add nothing."""
    answer = recommendation(id=new_id("rec"))
    item = store.submissions.add_succeeded(new_work(new_id("tun")), answer, REQUEST)
    assert store.submissions.find_request("", "k-1") == StoredRequest(REQUEST.digest, item.id, 200)
    again = replace(REQUEST, key="k-2")
    store.submissions.store_request(again, item.id)
    for call in (
        lambda: store.submissions.store_request(again, "other"),
        lambda: store.submissions.add(new_work(new_id("tun")), idempotency=again),
        lambda: store.submissions.add_succeeded(new_work(new_id("tun")), recommendation(id=new_id("rec")), again),
    ):
        with pytest.raises(DuplicateRequestError) as caught:
            call()
        assert caught.value.first == StoredRequest(again.digest, item.id, 200)


def test_a_failed_request_leaves_its_key_free(store: Store, new_id: NewId) -> None:
    """A conflict and a used quota store nothing."""
    work = new_work(new_id("tun"))
    store.submissions.add(work)
    with pytest.raises(ConflictError):
        store.submissions.add(work, idempotency=REQUEST)
    key, _ = make_key("ci", (Scope.ADMIN,))
    store.keys.add(key)
    with pytest.raises(QuotaExceededError):
        store.submissions.add(new_work(new_id("tun"), key_id=key.id), Quota(queued=0), REQUEST)
    assert store.submissions.find_request("", "k-1") is None
    store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)


def test_a_stored_request_is_found_when_the_quota_is_used(store: Store, new_id: NewId) -> None:
    """A retry adds no work, so that no quota refuses it."""
    key, _ = make_key("ci", (Scope.ADMIN,))
    store.keys.add(key)
    request, one = replace(REQUEST, owner=key.id), Quota(queued=1)
    store.submissions.add(new_work(new_id("tun"), key_id=key.id), one, request)
    with pytest.raises(DuplicateRequestError):
        store.submissions.add(new_work(new_id("tun"), key_id=key.id), one, request)


def test_the_request_outlives_the_work(store: Store, new_id: NewId) -> None:
    """Deleting the work does not let the same request create it again."""
    item = store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)
    store.submissions.cancel(item.id)
    store.retention.delete(item.id)
    with pytest.raises(DuplicateRequestError):
        store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)


def test_a_key_expires(store: Store, database_url: str, new_id: NewId) -> None:
    """Shortly before its expiry the key is known; afterwards it is new, and creates work."""
    first = store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)
    grow_older(database_url, IDEMPOTENCY_KEY_TTL_SECONDS - 60)
    with pytest.raises(DuplicateRequestError):
        store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)
    grow_older(database_url, 61)
    assert store.submissions.find_request("", "k-1") is None
    second = store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)
    found = store.submissions.find_request("", "k-1")
    assert found is not None
    assert found.work_id == second.id != first.id


def test_expired_keys_are_deleted_as_new_ones_come(store: Store, database_url: str, new_id: NewId) -> None:
    """Each new key deletes many expired keys."""
    for number in range(20):
        store.submissions.store_request(replace(REQUEST, key=f"old-{number}"), "tun")
    grow_older(database_url, IDEMPOTENCY_KEY_TTL_SECONDS + 1)
    store.submissions.add(new_work(new_id("tun")), idempotency=REQUEST)
    with engine_at(database_url) as engine, read_transaction(engine) as connection:
        assert connection.execute(select(func.count()).select_from(idempotency_keys)).scalar_one() == 1


@pytest.mark.parametrize("quota", [UNLIMITED, Quota(queued=1)], ids=["unlimited", "one"])
def test_of_concurrent_requests_one_creates(store: Store, new_id: NewId, quota: Quota) -> None:
    """The losing requests get the work of the winner."""
    key, _ = make_key("ci", (Scope.ADMIN,))
    store.keys.add(key)
    request = replace(REQUEST, owner=key.id)
    barrier = threading.Barrier(8)

    def submit(_: int) -> str:
        barrier.wait()
        try:
            store.submissions.add(new_work(new_id("tun"), key_id=key.id), quota, request)
        except DuplicateRequestError as error:
            return error.first.work_id
        return "created"

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(submit, range(8)))
    (item,) = store.work.newest(WorkKind.TUNING, 10)
    assert sorted(responses) == sorted(["created", *[item.id] * 7])
