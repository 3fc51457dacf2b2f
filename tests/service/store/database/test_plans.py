"""The plans of PostgreSQL for the statements of a fleet: a few rows by indexes, however many there are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, text, update

from batchwright.client.documents.states import State
from batchwright.client.documents.workers import ServedDevice
from batchwright.schemas.results import DeviceInfo
from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed
from batchwright_service.store.database.claim_statements import CLAIM_AT_ONCE, Claimer, lock_claims
from batchwright_service.store.database.lanes import lanes_of
from batchwright_service.store.database.migrate import upgrade
from batchwright_service.store.database.schema import now_ms, work_items, workers
from batchwright_service.store.database.transactions import open_engine, read_transaction, write_transaction
from batchwright_service.store.models import Beat, Lease
from batchwright_service.store.store import Store
from tests.support.service.postgres import Databases
from tests.support.service.scripted import SERVED, new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed, fill

HOSTS, DEVICES, KEYS = 250, 8, ("", "a" * 16, "b" * 16)
QUEUED_PER_DEVICE = 500
HELD_FROM = 100
"""The first host whose devices are busy."""
MOST_ROWS = 120
"""Rows of one table that one statement may visit. There are 4,000 queued ones, and 1,200 that are held."""
TABLES = {"work_items", "workers", "events", "held_slots"}


def card(host: int, index: int) -> ServedDevice:
    """A device of a host."""
    device = DeviceInfo(id=f"cuda:{index}", kind="cuda", name="card", total_bytes=80 * 1024**3)
    return SERVED.model_copy(
        update={"slot": f"host{host}/cuda:{index}", "owner": f"host{host}:scope:1", "device": device}
    )


@pytest.fixture
def store(postgresql: Databases) -> Iterator[Store]:
    """A store with the rows of a fleet, in a database that earlier tests may have collected statistics in."""
    with filled(Store(open_engine(postgresql.migrated()))) as opened:
        yield opened


@pytest.fixture
def store_without_statistics(postgresql: Databases) -> Iterator[Store]:
    """A store with the rows of a fleet, in tables that were just made."""
    engine = open_engine(postgresql.empty())
    upgrade(engine)
    with filled(Store(engine)) as opened:
        yield opened


@contextmanager
def filled(opened: Store) -> Iterator[Store]:
    """A store on PostgreSQL with a long queue, most devices busy, the others idle."""
    hardware = card(0, 0).hardware
    for index in range(DEVICES):
        fill(opened.engine, QUEUED_PER_DEVICE, KEYS, device=f"cuda:{index}", hardware=hardware)
    served = [card(host, index) for host in range(HOSTS) for index in range(DEVICES)]
    with write_transaction(opened.engine) as connection:
        connection.execute(insert(work_items).values(created_at=now_ms(), updated_at=1), _held_rows(hardware))
        set_expiry(connection, "TRUE", 3_600_000)
        row = {"document": "{}", "hardware": hardware, "lease_ms": 3_600_000}
        own = [
            row | {"slot": one.slot, "owner": one.owner, "device": one.device.id, "waits": int(host) < HELD_FROM}
            for one in served
            for host in [one.host.removeprefix("host")]
        ]
        connection.execute(insert(workers).values(heartbeat_at=now_ms()), own)
    yield opened
    opened.close()


def _held_rows(hardware: str) -> list[dict[str, Any]]:
    names = ("kind", "model", "effective_batch_size", "fingerprint", "payload")
    common = {name: getattr(new_work(""), name) for name in names}
    return [
        common
        | {"id": f"tun_{host}_{index}", "state": State.RUNNING, "device": f"cuda:{index}", "hardware": hardware}
        | {"slot": card(host, index).slot, "owner": card(host, index).owner, "token": 1}
        for host in range(HELD_FROM, HOSTS)
        for index in range(DEVICES)
    ]


def set_expiry(connection: Connection, condition: str, milliseconds: int) -> None:
    """Let the held leases under a condition expire so much later than now."""
    later = now_ms() + milliseconds
    held = work_items.c.owner.is_not(None)
    expiry = {"lease_expires_at": later, "expiry_check_at": later}
    connection.execute(update(work_items).where(held, text(condition)).values(**expiry))


@dataclass(frozen=True)
class Statement:
    """A statement that the store has executed, in a transaction of claims or not."""

    text: str
    parameters: Any
    claims: bool


def statements_of(store: Store, call: Callable[[], object]) -> list[Statement]:
    """The statements that a call executes on the tables."""
    seen: list[Statement] = []
    locked = False

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_more: object) -> None:
        nonlocal locked
        locked = locked or statement.startswith("LOCK TABLE")
        if any(name in statement for name in TABLES) and not statement.startswith("INSERT"):
            seen.append(Statement(statement, parameters, locked))

    event.listen(store.engine, "before_cursor_execute", note)
    call()
    event.remove(store.engine, "before_cursor_execute", note)
    assert seen
    return seen


def check_plans(store: Store, call: Callable[[], object]) -> set[str]:
    """Check that every statement of a call visits few rows, by indexes; return the names of the indexes."""
    return explain(store, statements_of(store, call))


def check_claim_plan(store: Store, served: ServedDevice) -> set[str]:
    """Check the plan of the claim's statement, which goes to the driver itself; return the names of the indexes."""
    with read_transaction(store.engine) as connection:
        claimer = Claimer(served, lanes_of(connection, [served])[served.slot], LEASE_SECONDS)
    compiled = CLAIM_AT_ONCE.compile(dialect=store.engine.dialect)
    statement = Statement(str(compiled), compiled.construct_params(claimer.parameters), claims=True)
    return explain(store, [statement])


def explain(store: Store, statements: Sequence[Statement]) -> set[str]:
    """Check the plans of statements, which are executed again and rolled back."""
    used: set[str] = set()
    for statement in statements:
        with store.engine.connect() as connection:  # rolled back
            if statement.claims:
                lock_claims(connection)
            explained = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.text}", statement.parameters
            )
            (plan,) = explained.scalar_one()
        visited: dict[str, float] = {}
        for node in _nodes(plan["Plan"]):
            used |= {node["Index Name"]} if "Index Name" in node else set()
            if (table := node.get("Relation Name")) in TABLES and node["Node Type"] != "ModifyTable":
                removed = sum(node.get(name, 0) for name in _REMOVED)
                visited[table] = visited.get(table, 0.0) + (node["Actual Rows"] + removed) * node["Actual Loops"]
        assert all(rows <= MOST_ROWS for rows in visited.values()), f"{visited}\n{statement.text}"
    return used


_REMOVED = ("Rows Removed by Filter", "Rows Removed by Index Recheck")


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from _nodes(below)


def analyze(store: Store) -> None:
    """Collect statistics, as the server does within a minute."""
    with write_transaction(store.engine) as connection:
        connection.execute(text("ANALYZE"))


def test_a_claim_reads_by_indexes_before_there_are_statistics(store_without_statistics: Store) -> None:
    """The planner does not know of a queue that has just been filled: under the lock, the claim's settings decide."""
    used = check_claim_plan(store_without_statistics, card(0, 1))
    assert {"work_items_queued", "work_items_expiring", "one_run_per_device"} <= used


@pytest.mark.parametrize("lanes", [0, 20])
def test_a_claim_reads_by_indexes(store: Store, lanes: int, new_id: NewId) -> None:
    """Also while work for hardware waits in the queue."""
    for number in range(lanes):
        need = HardwareNeed(product=f"card{'*' * number}")
        store.submissions.add(new_work(new_id("tun"), device=ANY_DEVICE, hardware=need.lane, key_id="a" * 16))
    analyze(store)
    check_plans(store, lambda: store.leases.claim(card(0, 1), LEASE_SECONDS))
    used = check_claim_plan(store, card(0, 2))
    assert {"work_items_queued", "work_items_expiring", "one_run_per_device"} <= used


def test_a_takeover_reads_by_indexes(store: Store) -> None:
    """Of the expired leases alone: the others' rows are not visited, nor is the queue's length of any account."""
    with write_transaction(store.engine) as connection:
        set_expiry(connection, "slot LIKE 'host12%'", -1)
    analyze(store)
    used = check_claim_plan(store, card(0, 3))
    assert claimed(store, card(0, 3)).lost_leases == 1
    assert "work_items_expiring" in used


def test_a_heartbeat_reads_by_indexes(store: Store) -> None:
    """Of a host with leases, announced devices, and idle ones that look for work."""
    analyze(store)
    leases = tuple(Lease(f"tun_200_{index}", card(200, index).owner, 1) for index in range(DEVICES))
    devices = tuple(card(200, index) for index in range(DEVICES))
    idle = tuple(card(1, index) for index in range(DEVICES))
    replies = []
    used = check_plans(
        store, lambda: replies.append(store.devices.beat(Beat(LEASE_SECONDS, leases, devices, idle=idle)))
    )
    assert len(replies[0].renewed) == DEVICES
    assert replies[0].wanted == {served.slot for served in idle}
    assert {"work_items_pkey", "workers_pkey", "work_items_queued", "work_items_expiring"} <= used


@pytest.mark.parametrize("most_ended", [False, True])
@pytest.mark.parametrize("analyzed", [False, True])
def test_a_look_for_work_reads_by_indexes(store: Store, *, analyzed: bool, most_ended: bool) -> None:
    """Neither the length of the queue nor the work that has ended is of any account, known to the planner or not."""
    lane = HardwareNeed(product="card").lane
    fill(store.engine, QUEUED_PER_DEVICE, KEYS, device=ANY_DEVICE, hardware=lane)
    if most_ended:
        with write_transaction(store.engine) as connection:
            oldest = "created_at < (SELECT max(created_at) FROM work_items WHERE state = 'QUEUED') - 10"
            connection.execute(text(f"UPDATE work_items SET state = 'SUCCEEDED' WHERE state = 'QUEUED' AND {oldest}"))  # noqa: S608
            connection.execute(
                text("UPDATE work_items SET priority = 1 WHERE state = 'QUEUED'")
            )  # behind all that ended
    if analyzed:
        analyze(store)
    idle = tuple(card(1, index) for index in range(DEVICES))
    replies = []
    used = check_plans(store, lambda: replies.append(store.devices.beat(Beat(LEASE_SECONDS, idle=idle))))
    assert replies[0].wanted == {served.slot for served in idle}
    assert "work_items_queued" in used


@pytest.mark.parametrize("hardware", [None, card(0, 0).hardware, "lane"])
def test_a_submission_finds_its_waiting_worker_by_an_index(store: Store, new_id: NewId, hardware: str | None) -> None:
    """Of 800 waiting workers, one alone has the device; work for hardware has any of them."""
    with write_transaction(store.engine) as connection:
        connection.execute(text("UPDATE workers SET waits = false WHERE device = 'cuda:4' AND slot <> 'host99/cuda:4'"))
    analyze(store)
    work = new_work(new_id("tun"), device="cuda:4", hardware=hardware)
    if hardware == "lane":
        lane = HardwareNeed(product="card").lane
        work = new_work(new_id("tun"), device=ANY_DEVICE, hardware=lane)
    statements = [one for one in statements_of(store, lambda: store.submissions.add(work)) if "pg_notify" in one.text]
    assert len(statements) == 1
    with write_transaction(store.engine) as connection:
        connection.execute(text("UPDATE workers SET waits = true WHERE slot = 'host99/cuda:4'"))
    assert "workers_waiting" in explain(store, statements)
