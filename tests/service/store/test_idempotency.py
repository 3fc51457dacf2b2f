"""Idempotency keys in the store: the same key never creates twice, on every backend."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import func, select, update

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import State, WorkKind
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import ConflictError, NotFoundError, QuotaExceededError
from batchwright_service.store.database.engine import read_transaction, write_transaction
from batchwright_service.store.database.schema import idempotency_keys
from batchwright_service.store.models import (
    IDEMPOTENCY_KEY_TTL_SECONDS,
    UNLIMITED,
    DuplicateRequestError,
    Idempotency,
    PendingResponse,
    Quota,
    StoredResponse,
    WorkItem,
)
from batchwright_service.store.store import Store
from tests.support.factories import recommendation
from tests.support.service.scripted import new_work
from tests.support.service.stores import NewId, engine_at

REQUEST = Idempotency(owner="", key="k-1", digest="d" * 64)


def pending_response(idempotency: Idempotency = REQUEST, status: int = 202) -> PendingResponse:
    """Return a pending response with the id and the state of the work."""
    return PendingResponse(
        idempotency, lambda item: StoredResponse(idempotency.digest, item.id, status, f"{item.id} {item.state}")
    )


def grow_older(url: str, seconds: float) -> None:
    """Make every stored response older by ``seconds``."""
    with engine_at(url) as engine, write_transaction(engine) as connection:
        older = idempotency_keys.c.created_at - int(seconds * 1000)
        connection.execute(update(idempotency_keys).values(created_at=older))


def test_a_response_is_stored_with_its_work(store: Store, new_id: NewId) -> None:
    """The response is made from the stored work, and found only under its owner and key."""
    seen: list[WorkItem] = []

    def answer(item: WorkItem) -> StoredResponse:
        seen.append(item)
        return StoredResponse(REQUEST.digest, item.id, 202, "the body")

    item = store.submissions.add(new_work(new_id("tun")), pending=PendingResponse(REQUEST, answer))
    assert seen == [item] == [store.work.get(item.id)]
    assert store.submissions.find_response("", "k-1") == StoredResponse(REQUEST.digest, item.id, 202, "the body")
    assert store.submissions.find_response("a" * 16, "k-1") is None
    assert store.submissions.find_response("", "k-2") is None


def test_the_same_key_adds_nothing(store: Store, new_id: NewId) -> None:
    """The second request gets the response to the first, whatever its own content; nothing of it is stored."""
    item = store.submissions.add(new_work(new_id("tun")), pending=pending_response())
    other = new_work(new_id("tun"))
    with pytest.raises(DuplicateRequestError) as caught:
        store.submissions.add(other, pending=pending_response(replace(REQUEST, digest="e" * 64)))
    assert caught.value.response == StoredResponse(REQUEST.digest, item.id, 202, f"{item.id} QUEUED")
    with pytest.raises(NotFoundError):
        store.work.get(other.id)


def test_owners_do_not_share_keys(store: Store, new_id: NewId) -> None:
    """Equal keys of two owners are two keys."""
    for owner in ("", "a" * 16, "b" * 16):
        store.submissions.add(new_work(new_id("tun")), pending=pending_response(replace(REQUEST, owner=owner)))
    assert len(store.work.newest(WorkKind.TUNING, 10)) == 3


def test_responses_of_stored_tunings_are_stored_too(store: Store, new_id: NewId) -> None:
    """Responses are stored for requests that add a succeeded tuning, and for those that add nothing."""
    answer = recommendation(id=new_id("rec"))
    item = store.submissions.add_succeeded(new_work(new_id("tun")), answer, pending_response(status=200))
    assert store.submissions.find_response("", "k-1") == StoredResponse(
        REQUEST.digest, item.id, 200, f"{item.id} SUCCEEDED"
    )
    again = replace(REQUEST, key="k-2")
    store.submissions.store_response(again, StoredResponse(again.digest, item.id, 200, "found"))
    for call in (
        lambda: store.submissions.store_response(again, StoredResponse(again.digest, "other", 200, "")),
        lambda: store.submissions.add(new_work(new_id("tun")), pending=pending_response(again)),
    ):
        with pytest.raises(DuplicateRequestError) as caught:
            call()
        assert caught.value.response.body == "found"


def test_a_failed_request_leaves_its_key_free(store: Store, new_id: NewId) -> None:
    """A conflict, a used quota and a failing response store nothing."""
    work = new_work(new_id("tun"))
    store.submissions.add(work)
    with pytest.raises(ConflictError):
        store.submissions.add(work, pending=pending_response())
    key, _ = make_key("ci", (Scope.ADMIN,))
    store.keys.add(key)
    with pytest.raises(QuotaExceededError):
        store.submissions.add(new_work(new_id("tun"), key_id=key.id), Quota(queued=0), pending_response())

    def fail(_item: WorkItem) -> StoredResponse:
        raise ValueError("no answer")

    unanswered = new_work(new_id("tun"))
    with pytest.raises(ValueError, match="no answer"):
        store.submissions.add(unanswered, pending=PendingResponse(REQUEST, fail))
    assert store.submissions.find_response("", "k-1") is None
    store.submissions.add(unanswered, pending=pending_response())


def test_a_stored_response_is_found_when_the_quota_is_used(store: Store, new_id: NewId) -> None:
    """A retry adds no work, so that no quota refuses it."""
    key, _ = make_key("ci", (Scope.ADMIN,))
    store.keys.add(key)
    request, one = replace(REQUEST, owner=key.id), Quota(queued=1)
    store.submissions.add(new_work(new_id("tun"), key_id=key.id), one, pending_response(request))
    with pytest.raises(DuplicateRequestError):
        store.submissions.add(new_work(new_id("tun"), key_id=key.id), one, pending_response(request))


def test_the_response_outlives_the_work(store: Store, new_id: NewId) -> None:
    """Deleting the work does not let the same request create it again."""
    item = store.submissions.add(new_work(new_id("tun")), pending=pending_response())
    store.submissions.cancel(item.id)
    store.retention.delete(item.id)
    with pytest.raises(DuplicateRequestError):
        store.submissions.add(new_work(new_id("tun")), pending=pending_response())


def test_a_key_expires(store: Store, database_url: str, new_id: NewId) -> None:
    """Shortly before its expiry the key is known; afterwards it is new, and creates work."""
    first = store.submissions.add(new_work(new_id("tun")), pending=pending_response())
    grow_older(database_url, IDEMPOTENCY_KEY_TTL_SECONDS - 60)
    with pytest.raises(DuplicateRequestError):
        store.submissions.add(new_work(new_id("tun")), pending=pending_response())
    grow_older(database_url, 61)
    assert store.submissions.find_response("", "k-1") is None
    second = store.submissions.add(new_work(new_id("tun")), pending=pending_response())
    found = store.submissions.find_response("", "k-1")
    assert found is not None
    assert found.work_id == second.id != first.id


def test_expired_keys_are_deleted_as_new_ones_come(store: Store, database_url: str, new_id: NewId) -> None:
    """Each new key deletes many expired keys."""
    for number in range(20):
        store.submissions.store_response(
            replace(REQUEST, key=f"old-{number}"), StoredResponse(REQUEST.digest, "tun", 200, "{}")
        )
    grow_older(database_url, IDEMPOTENCY_KEY_TTL_SECONDS + 1)
    store.submissions.add(new_work(new_id("tun")), pending=pending_response())
    with engine_at(database_url) as engine, read_transaction(engine) as connection:
        assert connection.execute(select(func.count()).select_from(idempotency_keys)).scalar_one() == 1


@pytest.mark.parametrize("quota", [UNLIMITED, Quota(queued=1)], ids=["unlimited", "one"])
def test_of_concurrent_requests_one_creates(store: Store, new_id: NewId, quota: Quota) -> None:
    """The losing requests get the complete response of the winner."""
    key, _ = make_key("ci", (Scope.ADMIN,))
    store.keys.add(key)
    request = replace(REQUEST, owner=key.id)
    barrier = threading.Barrier(8)

    def submit(_: int) -> str:
        barrier.wait()
        try:
            store.submissions.add(new_work(new_id("tun"), key_id=key.id), quota, pending_response(request))
        except DuplicateRequestError as error:
            return error.response.body
        return "created"

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(submit, range(8)))
    (item,) = store.work.newest(WorkKind.TUNING, 10)
    assert sorted(responses) == sorted(["created", *[f"{item.id} {State.QUEUED}"] * 7])
