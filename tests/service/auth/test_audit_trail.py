"""The audit log: what it records, in which transaction, who reads it, and what never is in it."""

from datetime import timedelta

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from batchwright.client import Client
from batchwright.client.documents.api_keys import KeySubmission, Scope
from batchwright.client.documents.audit import AuditAction, AuditEntry
from batchwright.client.errors import NotAllowedError
from batchwright.schemas.requests import Named
from batchwright_service.application.api_keys import KeyCases
from batchwright_service.auth.audit_trail import AuditRetention, AuditTrail
from batchwright_service.domain.callers import Caller
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import InvalidCursorError, NotEndedError, QuotaExceededError
from batchwright_service.store.database.transactions import write_transaction
from batchwright_service.store.models import AuditFilter, Quota
from batchwright_service.store.store import Store
from tests.support.factories import tuning_request
from tests.support.service.processes import PATIENCE_SECONDS, wait_until
from tests.support.service.running import StartService
from tests.support.service.scripted import ScriptedRunner, new_work
from tests.support.service.stores import NewId

EVERY = AuditFilter()
AT = Caller("a" * 16, address="192.0.2.7")


def entries(store: Store, wanted: AuditFilter = EVERY) -> list[AuditEntry]:
    """All matching entries, oldest first."""
    return list(reversed(store.audit.newest(wanted, 200)))


def acts(store: Store, wanted: AuditFilter = EVERY) -> list[tuple[AuditAction, str | None, str | None]]:
    """The acts with their objects and addresses, oldest first."""
    return [(entry.action, entry.object_id, entry.address) for entry in entries(store, wanted)]


def test_acts_on_work_are_recorded_with_caller_and_address(store: Store, new_id: NewId) -> None:
    """Submitting, cancelling and deleting; an act that changed nothing is no act."""
    work_id = new_id("tun")
    store.submissions.add(new_work(work_id, address=AT.address, names=Named(name="nightly")))
    assert store.submissions.set_priority(work_id, 7, AT).priority == 7
    store.submissions.cancel(work_id, AT)
    store.submissions.cancel(work_id, AT)
    assert store.submissions.set_priority(work_id, 8, AT).priority == 7
    assert [entry.object_name for entry in entries(store)] == ["nightly"] * 3
    store.retention.delete(work_id, AT)
    done = [AuditAction.SUBMITTED, AuditAction.PRIORITIZED, AuditAction.CANCELLED, AuditAction.DELETED]
    assert acts(store) == [(action, work_id, AT.address) for action in done]
    assert [entry.object_name for entry in entries(store)] == [None] * 4
    assert [entry.key_id for entry in entries(store)] == [None, *[AT.key_id] * 3]
    assert [entry.id for entry in entries(store)] == sorted(entry.id for entry in entries(store))


def test_every_object_of_a_bulk_act_has_its_entry(store: Store, new_id: NewId) -> None:
    """Cancelled and deleted together, each work is recorded once; what was not changed is not."""
    new, _ = make_key("ci", (Scope.TUNINGS_WRITE,))
    store.keys.add(new)
    actor = Caller(new.id, address=AT.address)
    ids = [store.submissions.add(new_work(new_id("tun"))).id for _ in range(3)]
    for _ in range(2):
        store.submissions.cancel_all([*ids[:2], "tun_none"], actor)
        store.retention.delete_all([*ids[1:], "tun_none"], actor)
    found = [(entry.action, entry.object_id, entry.key_name, entry.address) for entry in entries(store)[4:]]
    expected = [(AuditAction.CANCELLED, ids[0]), (AuditAction.CANCELLED, ids[1]), (AuditAction.DELETED, ids[1])]
    assert sorted(found) == sorted((action, work_id, "ci", AT.address) for action, work_id in expected)


def test_an_act_that_fails_leaves_no_entry(store: Store, new_id: NewId) -> None:
    """The entry is part of the transaction: a used quota and refused deletions leave none."""
    new, _ = make_key("ci", (Scope.TUNINGS_WRITE,))
    store.keys.add(new)
    waiting = store.submissions.add(new_work(new_id("tun"), key_id=new.id)).id
    before = entries(store)
    with pytest.raises(QuotaExceededError):
        store.submissions.add(new_work(new_id("tun"), key_id=new.id), Quota(queued=1))
    with pytest.raises(NotEndedError):
        store.retention.delete(waiting, AT)
    assert entries(store) == before


def test_keys_and_sessions_are_recorded_without_secrets(store: Store) -> None:
    """An entry has the name and the scopes of a key; neither its text nor a digest is anywhere in the table."""
    new, text_of_key = make_key("ci", (Scope.TUNINGS_READ, Scope.JOBS_READ))
    store.keys.add(new, AT)
    store.sessions.open("d" * 64, new.id, 60.0, "192.0.2.8")
    store.sessions.close("d" * 64, "192.0.2.8")
    store.sessions.close("d" * 64, "192.0.2.8")
    store.keys.revoke(new.id, AT)
    store.keys.revoke(new.id, AT)
    assert acts(store) == [
        (AuditAction.KEY_CREATED, new.id, AT.address),
        (AuditAction.SIGNED_IN, None, "192.0.2.8"),
        (AuditAction.SIGNED_OUT, None, "192.0.2.8"),
        (AuditAction.KEY_REVOKED, new.id, AT.address),
    ]
    assert [entry.key_name for entry in entries(store)] == [None, "ci", "ci", None]
    without_sessions = AuditFilter(exclude=(AuditAction.SIGNED_IN, AuditAction.SIGNED_OUT))
    assert acts(store, without_sessions) == [acts(store)[0], acts(store)[-1]]
    assert AuditTrail(store.audit).page(without_sessions, 1, total=True).total == 2
    assert [entry.detail for entry in entries(store)] == ["ci: tunings:read, jobs:read", None, None, "ci"]
    stored = "".join(entry.model_dump_json() for entry in entries(store))
    assert not [secret for secret in (text_of_key, new.digest, "d" * 64) if secret in stored]


def test_entries_cannot_be_changed(store: Store, new_id: NewId) -> None:
    """The database itself refuses it."""
    store.submissions.add(new_work(new_id("tun")))
    before = entries(store)
    with pytest.raises(DBAPIError, match="never changed"), write_transaction(store.engine) as connection:
        connection.execute(text("UPDATE audit_log SET key_id = NULL, action = 'pruned'"))
    assert entries(store) == before


def test_pages_follow_each_other_and_filters_restrict(store: Store, new_id: NewId) -> None:
    """Each entry is on one page, also where newer ones come meanwhile; a cursor of another list is refused."""
    ids = [store.submissions.add(new_work(new_id("tun"))).id for _ in range(5)]
    trail = AuditTrail(store.audit)
    page = trail.page(EVERY, 2)
    store.submissions.add(new_work(new_id("tun")))
    seen = list(page.items)
    while page.next_cursor is not None:
        page = trail.page(EVERY, 2, page.next_cursor)
        seen += page.items
    assert [entry.object_id for entry in seen] == ids[::-1]
    store.submissions.cancel(ids[0], AT)
    assert acts(store, AuditFilter(key_id=AT.key_id)) == [(AuditAction.CANCELLED, ids[0], AT.address)]
    assert acts(store, AuditFilter(AuditAction.CANCELLED)) == acts(store, AuditFilter(key_id=AT.key_id))
    assert len(acts(store, AuditFilter(object_id=ids[0]))) == 2
    (last,) = entries(store, AuditFilter(AuditAction.CANCELLED))
    second = timedelta(seconds=1)
    assert acts(store, AuditFilter(AuditAction.CANCELLED, after=last.at - second, until=last.at + second))
    assert not acts(store, AuditFilter(AuditAction.CANCELLED, after=last.at + second))
    assert not acts(store, AuditFilter(AuditAction.CANCELLED, until=last.at - second))
    for cursor in ("t" + "0" * 32, "a0", "a", "a-1", "a" + "9" * 30):
        with pytest.raises(InvalidCursorError):
            trail.page(EVERY, 2, cursor)


def test_entries_are_deleted_after_their_retention(store: Store, new_id: NewId) -> None:
    """Older ones go in a thread, newer ones stay; pruned work is recorded by its count."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    store.submissions.cancel(work_id)
    assert store.audit.prune(3600.0) == 0
    store.retention.prune(-1.0)
    assert [(entry.action, entry.detail) for entry in entries(store)][-1] == (AuditAction.PRUNED, "1 tunings, 0 jobs")
    retention = AuditRetention(store.audit, -1.0 / 86_400)
    retention.start()
    wait_until(lambda: not entries(store))
    retention.stop()
    retention.stop()


def test_administrators_read_the_log_over_http(start_service: StartService) -> None:
    """Who made the key, submitted, signed in and out: with names and addresses; other scopes are refused."""
    service = start_service(ScriptedRunner(37))
    keys = KeyCases(service.system.store.keys)
    admin = keys.create(KeySubmission(name="operator", scopes=(Scope.ADMIN,)))
    with Client(service.url, api_key=admin.key) as client:
        reader = client.keys.create("reader", [Scope.TUNINGS_READ])
        tuning = client.tunings.wait(client.tunings.submit(tuning_request()).id)
        client.tunings.submit(tuning_request())
        with httpx.Client(base_url=service.url, timeout=PATIENCE_SECONDS) as browser:
            signed_in = browser.post("/sign-in", data={"key": admin.key}, headers={"origin": service.url})
            assert signed_in.status_code == 303
        found = list(client.audit.list(page_size=2))
        assert [(entry.action, entry.object_id) for entry in reversed(found)] == [
            (AuditAction.KEY_CREATED, admin.id),
            (AuditAction.KEY_CREATED, reader.id),
            (AuditAction.SUBMITTED, tuning.id),
            (AuditAction.SIGNED_IN, None),
        ]
        assert {(entry.key_name, entry.address) for entry in found} == {(None, None), ("operator", "127.0.0.1")}
        assert [entry.object_id for entry in client.audit.list(action="submitted")] == [tuning.id]
        assert list(client.audit.list(exclude=["signed-in"])) == found[1:]
        assert list(client.audit.list(after=found[0].at + timedelta(days=1))) == []
        assert admin.key not in str(found)
    with Client(service.url, api_key=reader.key) as client, pytest.raises(NotAllowedError):
        list(client.audit.list())
