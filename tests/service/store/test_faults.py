"""Faults of the database: their errors, which show no password, and the recovery of the next call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text

from batchwright.client.documents.api_keys import Scope
from batchwright.client.documents.fleet import FleetReport
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.webhooks import WebhookSubmission
from batchwright_service.domain.key_texts import make_key
from batchwright_service.errors import ConfigurationError, StaleLeaseError, StoreUnavailableError
from batchwright_service.store.database.transactions import open_engine, read_transaction, write_transaction
from batchwright_service.store.models import (
    AuditFilter,
    Beat,
    Claim,
    Ending,
    Idempotency,
    Lease,
    RecommendationFilter,
    WorkFilter,
)
from batchwright_service.store.outbox.deliveries import LeasedDelivery
from batchwright_service.store.scheduling import WRITE_CHECK_TTL_SECONDS, QueueStore
from batchwright_service.store.store import Store, open_store
from tests.support.factories import probe_result, recommendation, residual
from tests.support.service.postgres import Databases
from tests.support.service.scripted import SERVED, new_work, progress
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed, every_due

SECRET = "s3cr3t"  # noqa: S105 - what the errors are searched for


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://user:{SECRET}@host/database",
        f"postgresql+asyncpg://user:{SECRET}@host/database",
        f"postgresql://user:{SECRET}@host:port/database",
        f"postgresql://user:{SECRET}@{SECRET}@host/database",
        f"postgresql://user:x@{SECRET}:{SECRET}/y@host/database",
        f"user:{SECRET}@host/database",
        f"//user:{SECRET}@host",
    ],
)
def test_no_error_shows_the_password_of_a_url(url: str) -> None:
    """Whatever is wrong with it; nor does any error that led to it."""
    with pytest.raises(ConfigurationError, match="database_url") as caught:
        open_engine(url)
    assert SECRET not in f"{caught.value} {caught.getrepr(chain=True, showlocals=False).reprcrash}"
    assert caught.value.__cause__ is None


def test_no_error_of_a_connection_shows_the_password(tmp_path: Path) -> None:
    """The error of an unreachable server names its address, and not the password."""
    with pytest.raises(StoreUnavailableError) as caught:
        open_store(f"postgresql://user:{SECRET}@/database?host={tmp_path}")
    assert str(tmp_path) in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.fixture
def postgresql_store(postgresql: Databases) -> Iterator[Store]:
    """A store on PostgreSQL."""
    opened = Store(open_engine(postgresql.migrated()))
    yield opened
    opened.close()


@contextmanager
def losing_its_connection(engine: Engine) -> Iterator[list[int]]:
    """The server ends the connection of the first transaction within, just before its first statement."""
    admin = create_engine(engine.url, isolation_level="AUTOCOMMIT")
    ended: list[int] = []

    def end(connection: Connection, *_given: object) -> None:
        if not ended:
            driver: Any = connection.connection.driver_connection
            pid = driver.info.backend_pid
            ended.append(pid)
            with admin.connect() as other:
                assert other.execute(text(f"SELECT pg_terminate_backend({pid}, 5000)")).scalar_one()

    event.listen(engine, "before_cursor_execute", end)
    yield ended
    event.remove(engine, "before_cursor_execute", end)
    admin.dispose()


HOOK = WebhookSubmission(url="https://hooks.example.org/told")
LEASED = LeasedDelivery("msg_1", "whk_1", str(HOOK.url), (SECRET,), "{}", 1, 0.0, 0.0)
READS_AND_WRITES: dict[str, Callable[[Store, Lease], Any]] = {
    "submissions.add": lambda store, _: store.submissions.add(new_work("tun_new")),
    "submissions.add_succeeded": lambda store, _: store.submissions.add_succeeded(
        new_work("tun_new"), recommendation(id="rec_new")
    ),
    "submissions.store_request": lambda store, _: store.submissions.store_request(Idempotency("", "k", "d"), "tun"),
    "submissions.find_request": lambda store, _: store.submissions.find_request("", "k"),
    "retention.delete": lambda store, _: store.retention.delete("tun_done"),
    "retention.delete_all": lambda store, _: store.retention.delete_all(["tun_done"]),
    "retention.prune": lambda store, _: store.retention.prune(0.0),
    "retention.prunable": lambda store, _: store.retention.prunable(0.0),
    "queue.waiting": lambda store, _: store.queue.waiting(5),
    "queue.depths": lambda store, _: store.queue.depths(),
    "work.get": lambda store, lease: store.work.get(lease.work_id),
    "work.heads": lambda store, lease: store.work.heads([lease.work_id]),
    "work.newest": lambda store, _: store.work.newest(WorkKind.TUNING, 5),
    "work.count": lambda store, _: store.work.count(WorkKind.TUNING, WorkFilter()),
    "submissions.cancel": lambda store, lease: store.submissions.cancel(lease.work_id),
    "submissions.set_priority": lambda store, lease: store.submissions.set_priority(lease.work_id, 1),
    "submissions.cancel_all": lambda store, lease: store.submissions.cancel_all([lease.work_id]),
    "submissions.resume": lambda store, _: store.submissions.resume("job_over"),
    "evidence.probes": lambda store, lease: store.evidence.probes(lease.work_id),
    "evidence.is_measured_elsewhere": lambda store, lease: store.evidence.is_measured_elsewhere(lease.work_id, "f"),
    "evidence.events": lambda store, lease: store.evidence.events(lease.work_id),
    "evidence.event_counts": lambda store, lease: store.evidence.event_counts([lease.work_id]),
    "recommendations.get": lambda store, _: store.recommendations.get("rec_done"),
    "recommendations.texts": lambda store, _: store.recommendations.texts(["rec_done"]),
    "recommendations.tuning_with": lambda store, _: store.recommendations.tuning_with("f"),
    "recommendations.with_fingerprint": lambda store, _: store.recommendations.with_fingerprint("f"),
    "recommendations.for_request": lambda store, _: store.recommendations.for_request("q", 5),
    "recommendations.newest": lambda store, _: store.recommendations.newest(RecommendationFilter(), 5),
    "recommendations.count": lambda store, _: store.recommendations.count(RecommendationFilter()),
    "recommendations.row": lambda store, _: store.recommendations.row("rec_done"),
    "recommendations.conditions": lambda store, _: store.recommendations.conditions(),
    "recommendations.newest_of_requests": lambda store, _: store.recommendations.newest_of_requests(["q"], ["c"]),
    "residuals.add": lambda store, _: store.residuals.add("tun_1", residual()),
    "residuals.newest": lambda store, _: store.residuals.newest("card", "gpt", 5),
    "statistics.totals": lambda store, _: store.statistics.totals(3600.0),
    "statistics.occupancy": lambda store, _: store.statistics.occupancy(48, 1800),
    "statistics.trend": lambda store, _: store.statistics.trend(48, 1800),
    "statistics.count_hits": lambda store, _: store.statistics.count_hits(1, 2),
    "leases.claim": lambda store, _: store.leases.claim(SERVED.model_copy(update={"slot": "other"}), LEASE_SECONDS),
    "leases.claim_together": lambda store, _: store.leases.claim_together(
        [(SERVED.model_copy(update={"slot": "other"}), LEASE_SECONDS)]
    ),
    "evidence.record_probe": lambda store, lease: store.evidence.record_probe(lease, 1, probe_result(4)),
    "evidence.record_activity": lambda store, lease: store.evidence.record_activity(lease, "opening the data"),
    "evidence.record_progress": lambda store, lease: store.evidence.record_progress(lease, [progress(1)]),
    "leases.claim_work": lambda store, _: store.leases.claim_work(
        "tun_2", SERVED.model_copy(update={"slot": "other"}), LEASE_SECONDS
    ),
    "leases.finish": lambda store, lease: store.leases.finish(lease, Ending(State.FAILED)),
    "leases.hand_back": lambda store, lease: store.leases.hand_back(lease),
    "leases.release_slot": lambda store, _: store.leases.release_slot("other", "host:"),
    "devices.announce": lambda store, _: store.devices.announce(SERVED),
    "devices.beat": lambda store, lease: store.devices.beat(Beat(LEASE_SECONDS, (lease,), (SERVED,))),
    "devices.await_work": lambda store, _: store.devices.await_work(SERVED),
    "devices.withdraw": lambda store, _: store.devices.withdraw(SERVED),
    "devices.holder": lambda store, _: store.devices.holder("other"),
    "devices.list": lambda store, _: store.devices.list(),
    "queue.check": lambda store, _: store.queue.check(),
    "fleet.work": lambda store, _: store.fleet.work(5, []),
    "fleet.report": lambda store, _: store.fleet.report(FleetReport(engine="ray", address="there")),
    "fleet.reports": lambda store, _: store.fleet.reports(),
    "audit.newest": lambda store, _: store.audit.newest(AuditFilter(), 5),
    "audit.count": lambda store, _: store.audit.count(AuditFilter()),
    "audit.prune": lambda store, _: store.audit.prune(0.0),
    "keys.add": lambda store, _: store.keys.add(make_key("ci", (Scope.ADMIN,))[0]),
    "keys.find": lambda store, _: store.keys.find("0" * 16),
    "keys.list": lambda store, _: store.keys.list(),
    "keys.revoke": lambda store, _: store.keys.revoke(store.keys.list()[0].id),
    "keys.touch": lambda store, _: store.keys.touch("0" * 16, 1.0),
    "keys.exist": lambda store, _: store.keys.exist(),
    "sessions.open": lambda store, _: store.sessions.open("e" * 64, store.keys.list()[0].id, 60.0),
    "sessions.find": lambda store, _: store.sessions.find("e" * 64),
    "sessions.close": lambda store, _: store.sessions.close("e" * 64),
    "webhooks.add": lambda store, _: store.webhooks.add("whk_new", HOOK, SECRET, 5),
    "webhooks.list": lambda store, _: store.webhooks.list(),
    "webhooks.rotate": lambda store, _: store.webhooks.rotate("whk_1", SECRET, 60.0),
    "webhooks.delete": lambda store, _: store.webhooks.delete("whk_1"),
    "deliveries.add_test": lambda store, _: store.deliveries.add_test("whk_1", "msg_new"),
    "deliveries.lease": lambda store, _: store.deliveries.lease(LEASE_SECONDS, every_due),
    "deliveries.delivered": lambda store, _: store.deliveries.delivered(LEASED, 200),
    "deliveries.failed": lambda store, _: store.deliveries.failed(LEASED, "refused", 500, None),
    "deliveries.newest": lambda store, _: store.deliveries.newest("whk_1", 5),
    "deliveries.send_again": lambda store, _: store.deliveries.send_again("whk_1", "msg_1"),
    "deliveries.backlog": lambda store, _: store.deliveries.backlog(),
    "deliveries.prune": lambda store, _: store.deliveries.prune(60.0, 60.0),
}
"""Every method that uses the database."""


def test_no_method_is_left_out(store: Store) -> None:
    """A method of an interface that is not in the table above fails here."""
    parts = {attribute: part for attribute, part in vars(store).items() if attribute != "engine"}
    methods = {f"{attribute}.{name}" for attribute, part in parts.items() for name in dir(part) if name[0] != "_"}
    assert methods == set(READS_AND_WRITES)


FIRST = {name.partition(".")[0]: name for name in reversed(READS_AND_WRITES)}.values()
"""The first method of each interface. The others share its transactions, and are thorough cases."""
CASES = [pytest.param(name, marks=() if name in FIRST else pytest.mark.thorough) for name in READS_AND_WRITES]


@pytest.mark.parametrize("name", CASES)
def test_a_call_whose_connection_is_lost_fails_and_can_be_repeated(postgresql_store: Store, name: str) -> None:
    """The call fails as a whole, with our error; the same call, made again, is done."""
    store, call = postgresql_store, READS_AND_WRITES[name]
    store.keys.add(make_key("first", (Scope.ADMIN,))[0])
    store.submissions.add_succeeded(new_work("tun_done"), recommendation(id="rec_done"))
    store.submissions.add(new_work("job_over", WorkKind.JOB))
    store.submissions.cancel("job_over")
    store.submissions.add(new_work("tun_1"))
    lease = claimed(store).lease
    store.submissions.add(new_work("tun_2"))
    store.webhooks.add("whk_1", HOOK, SECRET, 5)
    store.deliveries.add_test("whk_1", "msg_1")
    with losing_its_connection(store.engine) as ended:
        with pytest.raises(StoreUnavailableError, match="database"):
            call(store, lease)
        assert ended
        call(store, lease)


def test_a_server_that_became_a_standby_is_left(postgresql: Databases) -> None:
    """A write that it refuses is no fault of ours; the next call connects anew, and finds a server that writes."""
    store = Store(open_engine(postgresql.migrated()))
    with store.engine.connect() as pooled, pooled.begin():
        pooled.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
    with pytest.raises(StoreUnavailableError, match="read-only"):
        store.submissions.add(new_work("tun_1"))
    assert store.submissions.add(new_work("tun_1")).state is State.QUEUED
    store.close()


def test_a_broken_file_is_a_database_that_cannot_be_used(tmp_path: Path) -> None:
    """SQLite's own kind of error for it is translated too."""
    (tmp_path / "store.db").write_bytes(b"no database at all, but long enough" * 100)
    with pytest.raises(StoreUnavailableError, match="not a database"):
        open_store(f"sqlite:///{tmp_path / 'store.db'}")


def test_a_commit_whose_reply_was_lost_can_be_repeated(store: Store, new_id: NewId) -> None:
    """An equal result under a recorded ordinal is accepted, within a valid lease only."""
    store.submissions.add(new_work(new_id("tun")))
    lease = claimed(store).lease
    store.evidence.record_probe(lease, 1, probe_result(4))
    store.evidence.record_probe(lease, 1, probe_result(4))
    assert len(store.evidence.probes(lease.work_id)) == 1
    assert store.work.get(lease.work_id).events == 3
    store.leases.finish(lease, Ending(State.FAILED))
    with pytest.raises(StaleLeaseError):
        store.evidence.record_probe(lease, 1, probe_result(4))


def test_repeated_progress_is_recorded_once(store: Store, new_id: NewId) -> None:
    """A run that resumes from an earlier checkpoint records its updates again."""
    store.submissions.add(new_work(new_id("job"), WorkKind.JOB))
    lease = claimed(store).lease
    for updates in ((1, 2), (1, 2), (3,), (3,)):
        store.evidence.record_progress(lease, [progress(update) for update in updates])
    recorded = [event.progress.update for event in store.evidence.events(lease.work_id) if event.progress is not None]
    assert recorded == [1, 2, 3]
    assert store.work.get(lease.work_id).progress == progress(3)
    store.evidence.record_progress(lease, [progress(2)])
    assert store.work.get(lease.work_id).progress == progress(2)


def test_lock_waits_and_idle_transactions_are_bounded(postgresql_store: Store) -> None:
    """PostgreSQL ends idle transactions, and bounds each wait for a lock."""
    with read_transaction(postgresql_store.engine) as connection:
        limits = [connection.execute(text(f"SHOW {name}")).scalar_one() for name in ("lock_timeout", IDLE)]
    assert limits == ["10s", "10s"]


IDLE = "idle_in_transaction_session_timeout"


def test_the_check_writes_once_in_a_while(database_url: str) -> None:
    """A proof counts for some seconds; then the database is written again, and found to be gone."""
    now = [100.0]
    engine = open_engine(database_url)
    open_store(database_url).close()
    queue = QueueStore(engine, clock=lambda: now[0])

    def checked_at() -> Any:
        with read_transaction(engine) as connection:
            return connection.execute(text("SELECT checked_at FROM health")).scalar_one()

    queue.check()
    with write_transaction(engine) as connection:
        connection.execute(text("UPDATE health SET checked_at = 0"))
    now[0] += WRITE_CHECK_TTL_SECONDS - 0.1
    queue.check()
    assert checked_at() == 0
    now[0] += 0.2
    queue.check()
    assert checked_at() > 0
    engine.dispose()


def test_a_failed_check_proves_nothing(tmp_path: Path) -> None:
    """Each call tries again until one succeeds."""
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    with write_transaction(store.engine) as connection:
        connection.execute(text("ALTER TABLE health RENAME TO hidden"))
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            store.queue.check()
    with write_transaction(store.engine) as connection:
        connection.execute(text("ALTER TABLE hidden RENAME TO health"))
    store.queue.check()
    store.close()


def test_a_worker_without_heartbeats_for_a_day_is_deleted(store: Store) -> None:
    """A host that is gone for good leaves the list when another worker announces itself."""
    gone = SERVED.model_copy(update={"slot": "gone/cpu"})
    store.devices.announce(gone)
    with write_transaction(store.engine) as connection:
        connection.execute(text("UPDATE workers SET heartbeat_at = heartbeat_at - 86401000"))
    store.devices.announce(SERVED)
    assert [seen.served.slot for seen in store.devices.list()] == [SERVED.slot]


def test_only_a_whole_claim_is_made(store: Store, new_id: NewId) -> None:
    """Claims are documents of what was taken: the item as it now is."""
    item = store.submissions.add(new_work(new_id("tun")))
    claim = claimed(store)
    assert claim == Claim(Lease(item.id, SERVED.owner, 1), store.work.get(item.id), 0)
