"""Statistics of a period: the contract of every backend."""

import pytest
from sqlalchemy import select, text

from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State, WorkKind
from batchwright_service.store import statistics
from batchwright_service.store.database.schema import held_slots, now_ms, recommendation_hits
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import Ending
from batchwright_service.store.statistics import WorkTotal
from batchwright_service.store.store import Store
from tests.support.factories import recommendation
from tests.support.service.scripted import SERVED, new_work
from tests.support.service.stores import NewId, claimed, engine_at, set_work

HOUR = 3600.0


def failed(store: Store, work_id: str, code: str, detail: str, kind: WorkKind = WorkKind.TUNING) -> str:
    """Work that ended with a problem; its id."""
    store.submissions.add(new_work(work_id, kind))
    problem = Problem(type=f"urn:batchwright:problem:{code}", title="It failed", detail=detail, code=code)
    store.leases.finish(claimed(store).lease, Ending(State.FAILED, problem=problem))
    return work_id


def counted(store: Store, seconds: float | None = None) -> dict[tuple[WorkKind, State], int]:
    """Return the counts by kind and state."""
    return {(group.kind, group.state): group.count for group in store.statistics.totals(seconds).work}


def test_an_empty_store_has_nothing(store: Store) -> None:
    """No work, no causes, no answers."""
    found = store.statistics.totals(None)
    assert (found.work, found.failures, found.hits, found.misses) == ((), (), 0, 0)


def test_a_period_has_what_ended_in_it_and_what_has_not_ended(store: Store, database_url: str, new_id: NewId) -> None:
    """Work that ended before is counted without a bound alone; what waits or runs always is, however old."""
    for work_id in ("tun_1", "tun_2"):
        store.submissions.add(new_work(work_id))
        store.leases.finish(claimed(store).lease, Ending(State.SUCCEEDED))
    set_work(database_url, "tun_1", ended_at=1000)
    running, waiting = new_id("job"), new_id("tun")
    store.submissions.add(new_work(running, WorkKind.JOB))
    assert claimed(store).item.id == running
    store.submissions.add(new_work(waiting))
    set_work(database_url, waiting, created_at=1)
    open_ones = {(WorkKind.JOB, State.RUNNING): 1, (WorkKind.TUNING, State.QUEUED): 1}
    assert counted(store, HOUR) == {(WorkKind.TUNING, State.SUCCEEDED): 1} | open_ones
    assert counted(store) == {(WorkKind.TUNING, State.SUCCEEDED): 2} | open_ones


def test_tunings_that_found_no_plan_are_counted_apart(store: Store, database_url: str, new_id: NewId) -> None:
    """Each of them, also where one recommendation answers two; those that ended before the period are not."""
    nothing = recommendation().model_copy(update={"feasible": False, "plan": None})
    for work_id, is_stored in ((new_id("tun"), False), (new_id("tun"), True), ("tun_1", True)):
        store.submissions.add(new_work(work_id))
        ending = Ending(State.SUCCEEDED, recommendation=nothing, is_stored=is_stored)
        store.leases.finish(claimed(store).lease, ending)
    store.submissions.add_succeeded(new_work(new_id("tun")), recommendation(id=new_id("rec")))
    set_work(database_url, "tun_1", ended_at=1000)
    assert [store.statistics.totals(seconds).infeasible for seconds in (None, HOUR)] == [3, 2]
    outcomes = [row.outcome for row in store.work.newest(WorkKind.TUNING, 9)]
    assert sorted(map(str, outcomes)) == ["infeasible"] * 3 + ["succeeded"]


def test_device_seconds_are_by_place_and_of_what_runs_too(store: Store, database_url: str) -> None:
    """Ended work counts for its last slot; the time of a running claim is added."""
    store.submissions.add(new_work("tun_1"))
    store.leases.finish(claimed(store).lease, Ending(State.SUCCEEDED))
    set_work(database_url, "tun_1", device_ms=5000)
    store.submissions.add(new_work("job_1", WorkKind.JOB))
    claimed(store)
    with engine_at(database_url) as engine, write_transaction(engine) as connection:
        aged = "UPDATE work_items SET claimed_at = claimed_at - 7000, device_ms = 1000 WHERE id = 'job_1'"
        connection.execute(text(aged))
    tuning, job = sorted(store.statistics.totals(HOUR).work, key=lambda it: it.kind, reverse=True)
    assert tuning == WorkTotal(WorkKind.TUNING, State.SUCCEEDED, SERVED.slot, 1, 5.0)
    assert (job.slot, job.count) == (SERVED.slot, 1)
    assert 8.0 <= job.device_seconds < 7000.0


def test_failures_are_grouped_by_cause(store: Store, database_url: str) -> None:
    """By kind and code, the most frequent first, with what most of them say and the one that failed last."""
    failed(store, "tun_1", "worker-lost", "once")
    failed(store, "tun_2", "spec", "twice")
    failed(store, "tun_3", "spec", "twice")
    failed(store, "tun_4", "spec", "another")
    failed(store, "job_1", "spec", "of a job", WorkKind.JOB)
    store.submissions.add(new_work("tun_5"))
    store.submissions.cancel("tun_5")
    for number in range(1, 5):
        set_work(database_url, f"tun_{number}", ended_at=10**13 + number)
    groups = store.statistics.totals(HOUR).failures
    assert [(group.kind, group.code, group.count) for group in groups] == [
        (WorkKind.TUNING, "spec", 3),
        (WorkKind.JOB, "spec", 1),
        (WorkKind.TUNING, "worker-lost", 1),
    ]
    assert [(group.message, group.newest_id) for group in groups] == [
        ("twice", "tun_4"),
        ("of a job", "job_1"),
        ("once", "tun_1"),
    ]
    set_work(database_url, "tun_1", ended_at=1000)
    assert [group.code for group in store.statistics.totals(HOUR).failures] == ["spec", "spec"]


def test_a_failure_without_a_problem_has_an_empty_code(store: Store) -> None:
    """The failure is counted as well."""
    store.submissions.add(new_work("tun_1"))
    store.leases.finish(claimed(store).lease, Ending(State.FAILED))
    (group,) = store.statistics.totals(None).failures
    assert (group.code, group.count, group.message, group.newest_id) == ("", 1, "", "tun_1")


def test_answers_are_added_up_by_the_hour(store: Store, database_url: str) -> None:
    """Counts add up over writers and calls; older hours belong to longer periods only."""
    store.statistics.count_hits(2, 1)
    store.statistics.count_hits(1, 0)
    with engine_at(database_url) as engine, write_transaction(engine) as connection:
        hour = connection.execute(select(now_ms())).scalar_one() // 3_600_000
        connection.execute(recommendation_hits.insert().values(hour=hour - 30, hits=10, misses=20))
    assert [(totals.hits, totals.misses) for totals in map(store.statistics.totals, (24 * HOUR, None))] == [
        (3, 1),
        (13, 21),
    ]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_indexes_have_all_that_is_counted(store: Store, database_url: str) -> None:
    """No row is read to count: a summary of many rows would take seconds otherwise."""
    del store
    statements = {"work_items_counted": statistics._counted(5), "work_items_failed": statistics._failed_since(5)}
    with engine_at(database_url) as engine, read_transaction(engine) as connection:
        for index, statement in statements.items():
            written = statement.compile(engine, compile_kwargs={"literal_binds": True})
            plan = [row[3] for row in connection.execute(text(f"EXPLAIN QUERY PLAN {written}"))]
            assert any(f"INDEX {index}" in step for step in plan), plan
            assert all("INDEX" in step for step in plan if "work_items" in step), plan


BUCKET_MS = 100_000


def busy_in(store: Store) -> tuple[int, dict[tuple[WorkKind, int], float]]:
    """The begin of ten buckets, and their occupied seconds by kind and bucket, all in one slot."""
    found = store.statistics.occupancy(10, BUCKET_MS // 1000)
    assert (found.start.timestamp() * 1000) % BUCKET_MS == 0
    assert 0 <= (found.end - found.start).total_seconds() - 900 <= 100
    assert {busy.slot for busy in found.busy} <= {SERVED.slot}
    start = round(found.start.timestamp() * 1000)
    return start, {(busy.kind, busy.bucket): busy.seconds for busy in found.busy}


def test_work_occupies_the_buckets_that_it_overlaps(store: Store, database_url: str) -> None:
    """A span is divided at the edges of buckets; what lies before the first, or was on no device, is left out."""
    spans = {"tun_1": (3, -50, 70_000), "tun_2": (2, 0, 30_000), "tun_3": (0, 40_000, 99_000), "job_1": (7, 1, 250_001)}
    start, nothing = busy_in(store)
    assert nothing == {}
    for work_id, (bucket, more, device_ms) in spans.items():
        store.submissions.add(new_work(work_id, WorkKind.JOB if work_id == "job_1" else WorkKind.TUNING))
        store.leases.finish(claimed(store).lease, Ending(State.SUCCEEDED))
        set_work(database_url, work_id, ended_at=start + bucket * BUCKET_MS + more, device_ms=device_ms)
    store.submissions.add(new_work("tun_4"))
    expected = {
        (WorkKind.TUNING, 0): 40.0,
        (WorkKind.TUNING, 1): 30.0,
        (WorkKind.TUNING, 2): 70.0,
        (WorkKind.JOB, 4): 50.0,
        (WorkKind.JOB, 5): 100.0,
        (WorkKind.JOB, 6): 100.0,
        (WorkKind.JOB, 7): 0.001,
    }
    start_now, found = busy_in(store)
    moved = (start_now - start) // BUCKET_MS  # the clock may have entered another bucket meanwhile
    assert found == {(kind, at - moved): seconds for (kind, at), seconds in expected.items() if at >= moved}


def test_held_work_occupies_its_slots_until_now(store: Store, database_url: str) -> None:
    """It counts since its claim, also in a slot that it holds beside its own."""
    store.submissions.add(new_work("job_1", WorkKind.JOB))
    claimed(store)
    beside = f"{SERVED.slot}/beside"
    with engine_at(database_url) as engine, write_transaction(engine) as connection:
        connection.execute(text("UPDATE work_items SET claimed_at = claimed_at - 250000"))
        connection.execute(held_slots.insert(), {"slot": beside, "work_id": "job_1"})
    found = store.statistics.occupancy(10, BUCKET_MS // 1000)
    for slot in (SERVED.slot, beside):
        seconds = [busy.seconds for busy in found.busy if busy.slot == slot]
        assert seconds[-2] == BUCKET_MS / 1000
        assert sum(seconds) == pytest.approx(sum(busy.seconds for busy in found.busy) / 2)
        assert 250 <= sum(seconds) < 700
