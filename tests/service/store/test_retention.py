"""Deleting and pruning, on every backend."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Table, func, insert, select

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.states import State, WorkKind
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import NotEndedError, NotFoundError, QuotaExceededError
from batchwright_service.store.database.schema import events, idempotency_keys, probes, used_time, work_items
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import Ending, Quota
from batchwright_service.store.retention import Pruned
from batchwright_service.store.store import Store
from tests.support.factories import probe_result, recommendation
from tests.support.service.scripted import new_work
from tests.support.service.stores import NewId, answered, claimed, ended, engine_at, fill, set_work

DAY = 86_400.0


def count(url: str, *tables: Table) -> list[int]:
    """Return the number of rows of each table."""
    with engine_at(url) as engine, read_transaction(engine) as connection:
        return [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables]


def days_ago(days: float) -> int:
    """A time as the store keeps it."""
    return int((time.time() - days * DAY) * 1000)


def tuned(store: Store, new_id: NewId) -> str:
    """A tuning that has ended with a probe and an answer."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    lease = claimed(store).lease
    store.evidence.record_probe(lease, 1, probe_result(4))
    store.leases.finish(lease, Ending(State.SUCCEEDED, recommendation=recommendation(id=new_id("rec"))))
    return work_id


def test_deleted_work_is_gone_with_its_probes_and_events(store: Store, database_url: str, new_id: NewId) -> None:
    """Nothing of it is left but its answer; other work keeps what it has."""
    kept, deleted = tuned(store, new_id), tuned(store, new_id)
    answer = store.work.get(deleted).recommendation_id
    store.retention.delete(deleted)
    with pytest.raises(NotFoundError, match=deleted):
        store.work.get(deleted)
    assert (store.evidence.probes(deleted), store.evidence.events(deleted)) == ([], [])
    assert count(database_url, work_items, probes, events) == [1, 1, 4]
    assert store.recommendations.get(str(answer)).id == answer
    assert len(store.evidence.probes(kept)) == 1


def test_what_has_not_ended_is_not_deleted(store: Store, new_id: NewId) -> None:
    """Neither what waits nor what runs nor what is being cancelled; the error says what to do."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    for step in (lambda: None, lambda: claimed(store), lambda: store.submissions.cancel(work_id)):
        step()
        with pytest.raises(NotEndedError, match="cancel it first"):
            store.retention.delete(work_id)
    assert store.work.get(work_id).state is State.CANCELLING


def test_deleting_what_is_not_there_says_so(store: Store, new_id: NewId) -> None:
    """Also the second time."""
    work_id = tuned(store, new_id)
    store.retention.delete(work_id)
    with pytest.raises(NotFoundError, match=work_id):
        store.retention.delete(work_id)


def test_a_deleted_tuning_is_served_no_more(store: Store, new_id: NewId) -> None:
    """Its recommendation can be read, but no submission is answered with it."""
    answer = answered(store, new_id, request_fingerprint="a" * 64)
    store.retention.delete(str(store.recommendations.tuning_with(answer.fingerprint)))
    assert store.recommendations.tuning_with(answer.fingerprint) is None
    assert store.recommendations.for_request("a" * 64, 9) == []


def test_deleting_gives_a_key_no_device_time_back(store: Store, database_url: str, new_id: NewId) -> None:
    """Device time of deleted work counts until it leaves the window, and is then deleted."""
    key, _ = make_key("ci", (Scope.ADMIN,))
    store.keys.add(key)
    quota = Quota(device_seconds=30.0, window_seconds=1000.0)
    work = new_work(new_id("tun"), key_id=key.id)
    ended(store, work)
    set_work(database_url, work.id, device_ms=31_000, ended_at=days_ago(0) - 700_000)
    store.retention.delete(work.id)
    with pytest.raises(QuotaExceededError, match="used 31 s") as caught:
        store.submissions.add(new_work(new_id("tun"), key_id=key.id), quota)
    assert caught.value.retry_after_seconds <= 301
    store.submissions.add(new_work(new_id("tun"), key_id=key.id), Quota(device_seconds=30.0, window_seconds=600.0))
    assert count(database_url, used_time) == [0]


def test_pruning_deletes_what_ended_that_long_ago(store: Store, database_url: str, new_id: NewId) -> None:
    """Younger work, and work that has not ended, stays; the report names the jobs."""
    old, young = tuned(store, new_id), tuned(store, new_id)
    job = new_work(new_id("job"), WorkKind.JOB)
    ended(store, job)
    waiting = store.submissions.add(new_work(new_id("tun"))).id
    for work_id in (old, job.id):
        set_work(database_url, work_id, ended_at=days_ago(31))
    set_work(database_url, waiting, created_at=days_ago(100), updated_at=days_ago(100))
    would = store.retention.prunable(30 * DAY)
    assert would == Pruned(tunings=1, jobs=1, recommendations=0, job_ids=(job.id,))
    assert store.retention.prune(30 * DAY) == would
    assert {row.id for kind in WorkKind for row in store.work.newest(kind, 10)} == {young, waiting}
    assert count(database_url, probes) == [1]
    assert store.retention.prune(30 * DAY) == store.retention.prunable(30 * DAY) == Pruned(0, 0, 0, ())


def test_answers_are_pruned_when_no_work_names_them(store: Store, database_url: str, new_id: NewId) -> None:
    """Not while a job was made from one, or a tuning is led by one; and only when asked to."""
    made = [answered(store, new_id) for _ in range(4)]
    led = store.submissions.add(new_work(new_id("tun"), warm_start_from=made[1].id)).id
    job = store.submissions.add(new_work(new_id("job"), WorkKind.JOB, recommendation_id=made[2].id)).id
    for row in store.work.newest(WorkKind.TUNING, 10):
        if row.id != led:
            set_work(
                database_url, row.id, ended_at=days_ago(31) if row.recommendation_id != made[3].id else days_ago(1)
            )
    expected = Pruned(tunings=3, jobs=0, recommendations=1, job_ids=())
    assert store.retention.prunable(30 * DAY).recommendations == 0
    assert store.retention.prunable(30 * DAY, recommendations=True) == expected
    assert store.retention.prune(30 * DAY, recommendations=True) == expected
    with pytest.raises(NotFoundError):
        store.recommendations.get(made[0].id)
    for kept in made[1:]:
        assert store.recommendations.get(kept.id) == kept
    assert {store.work.get(led).state, store.work.get(job).state} == {State.QUEUED}


def test_a_young_answer_stays_though_nothing_names_it(store: Store, new_id: NewId) -> None:
    """Its age counts, not its tuning's."""
    young = recommendation(id=new_id("rec"), created_at=recommendation().created_at.replace(year=2999))
    work = new_work(new_id("tun"))
    ended(store, work, young)
    store.retention.delete(work.id)
    assert store.retention.prune(0.0, recommendations=True).recommendations == 0
    assert store.recommendations.get(young.id) == young


def test_much_is_pruned_in_parts_by_two_at_a_time(store: Store, database_url: str) -> None:
    """More than one transaction takes; two operators at once delete everything once."""
    with engine_at(database_url) as engine:
        ids = fill(engine, 950, state="SUCCEEDED", ended_at=1)
        with write_transaction(engine) as connection:
            rows = [{"work_id": work_id, "id": 1, "at": 1, "kind": "state", "document": '"QUEUED"'} for work_id in ids]
            connection.execute(insert(events), rows)
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: store.retention.prune(DAY), range(2)))
    assert sum(report.tunings for report in reports) == 950
    assert count(database_url, work_items, events, idempotency_keys) == [0, 0, 0]
