"""Workers on PostgreSQL that wait for notifications: of work, of cancellations, and without any for a while."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from batchwright.client.documents.states import State
from batchwright_service.domain import lease_waits
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.database import claim_admission
from batchwright_service.store.database.transactions import open_engine, read_transaction
from batchwright_service.store.models import WorkItem
from batchwright_service.store.store import Store
from batchwright_service.worker.coordinator import Coordinator
from batchwright_service.worker.idle_pause import IdlePause
from batchwright_service.worker.worker_settings import WorkerSettings
from batchwright_service.worker_bootstrap import worker_connections
from tests.service.worker.test_device_worker import VERSIONS, ended, no_training, queue_tuning, worker_settings
from tests.support.factories import CPU
from tests.support.service.postgres import Databases, own_server
from tests.support.service.scripted import InlineExecutor, ScriptedRunner, new_work, until_stopped

RARELY_SECONDS = 900.0
"""Longer than any test waits: what happens sooner was notified."""
PATIENCE_SECONDS = 120.0


@pytest.fixture
def store(postgresql: Databases) -> Iterator[Store]:
    """A store on PostgreSQL."""
    opened = Store(open_engine(postgresql.migrated()))
    yield opened
    opened.close()


Start = Callable[..., Coordinator]


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[Start]:
    """Starts a worker that polls rarely, or every ``fallback_poll_seconds``."""
    started: list[Coordinator] = []

    def new(runner: ScriptedRunner, fallback_poll_seconds: float = RARELY_SECONDS) -> Coordinator:
        base = vars(worker_settings(tmp_path, lease_seconds=4 * RARELY_SECONDS))
        settings = WorkerSettings(**{**base, "fallback_poll_seconds": fallback_poll_seconds})
        executor = InlineExecutor(CPU, runner, no_training)
        started.append(Coordinator(store, [executor], VERSIONS, settings))
        started[-1].start()
        return started[-1]

    yield new
    for coordinator in started:
        coordinator.stop()


def until(store: Store, query: str, wanted: int) -> None:
    """Wait until a count in the database is as wanted."""
    admin = create_engine(store.engine.url, isolation_level="AUTOCOMMIT")
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    with admin.connect() as connection:
        while connection.execute(text(query)).scalar_one() != wanted:
            assert time.monotonic() < deadline
            pause.wait(0.02)
    admin.dispose()


WAITING = "SELECT count(*) FROM workers WHERE waits AND lease_ms > 0"
LISTENING = "pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%')"


def end_connections(store: Store, condition: str) -> None:
    """Have the server end connections to this database, as a restart does."""
    admin = create_engine(store.engine.url, isolation_level="AUTOCOMMIT")
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    with admin.connect() as connection:
        query = f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others} AND {condition}"  # noqa: S608
        connection.execute(text(query))
    admin.dispose()


def test_work_and_cancellations_arrive_by_notification(store: Store, start: Start) -> None:
    """Neither the worker nor its heartbeat polls while the test lasts."""
    probing = threading.Event()
    start(ScriptedRunner(37, until_stopped(probing)))
    until(store, WAITING, 1)
    work_id = queue_tuning(store)
    assert probing.wait(PATIENCE_SECONDS)
    store.submissions.cancel(work_id)
    assert ended(store, work_id).state is State.CANCELLED


def test_a_claim_behind_those_of_many_others_is_repeated_at_once(
    store: Store, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker neither waits for a notification, as if there were no work, nor warns of the database."""
    monkeypatch.setattr(lease_waits, "CLAIM_SECONDS", 0.1)
    start(ScriptedRunner(37))
    until(store, WAITING, 1)
    with ExitStack() as holding:
        engine = open_engine(store.engine.url.render_as_string(hide_password=False))
        holding.callback(engine.dispose)
        for _ in range(claim_admission.TICKETS):
            holding.enter_context(claim_admission.admitted(engine, read_transaction, 10.0))  # the worker may hold one
        work_id = queue_tuning(store)
        until(store, WAITING, 0)
        threading.Event().wait(1.0)  # several times as long as a claim has patience
        assert store.work.get(work_id).state is State.QUEUED
    assert ended(store, work_id).state is State.SUCCEEDED
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("condition", ["TRUE", LISTENING], ids=["every connection", "the listening one"])
def test_broken_connections_are_opened_again(store: Store, start: Start, condition: str) -> None:
    """Work that is queued after the break, or during it, is run, although nothing polls."""
    start(ScriptedRunner(37))
    until(store, WAITING, 1)
    end_connections(store, condition)
    work_id = queue_tuning(store)
    assert ended(store, work_id).state is State.SUCCEEDED


def test_a_crash_of_the_database_during_work_loses_nothing(tmp_path: Path) -> None:
    """The server loses every connection and its memory: probes go on, are recorded once, and notifications resume."""
    probing, may_end = threading.Event(), threading.Event()

    def gate(_size: int, _should_stop: Callable[[], bool]) -> None:
        probing.set()
        assert may_end.wait(PATIENCE_SECONDS)

    runner = ScriptedRunner(37, gate)
    with own_server(synchronous_commit="on") as server, closing(Databases(server)) as databases:
        url = databases.migrated()
        store = Store(open_engine(url))
        base = vars(worker_settings(tmp_path, lease_seconds=4 * RARELY_SECONDS))
        settings = WorkerSettings(**{**base, "fallback_poll_seconds": RARELY_SECONDS})
        executor = InlineExecutor(CPU, runner, no_training)
        coordinator = Coordinator(store, [executor], VERSIONS, settings)
        with closing(store):
            coordinator.start()
            try:
                ids = [queue_tuning(store) for _ in range(2)]
                assert probing.wait(PATIENCE_SECONDS)
                crash(store)
                may_end.set()
                items = [reached_end(store, work_id) for work_id in ids]
                until(store, WAITING, 1)
                items.append(reached_end(store, queue_tuning(store)))
            finally:
                may_end.set()
                coordinator.stop()
            recorded = [probe.result.micro_batch_size for item in items for probe in store.evidence.probes(item.id)]
    assert [(item.state, item.attempts) for item in items] == 3 * [(State.SUCCEEDED, 1)]
    assert recorded == runner.sizes


def crash(store: Store) -> None:
    """Kill a process of the server, which then ends all others and recovers from its log."""
    admin = create_engine(store.engine.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    query = text("SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
    with admin.connect() as connection:
        pid = connection.execute(query).scalar_one()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while answers(connection):
            assert time.monotonic() < deadline
    while time.monotonic() < deadline:
        try:
            with admin.connect() as connection:
                assert connection.execute(query).scalar_one() != pid
                return
        except OperationalError:
            threading.Event().wait(0.05)
    raise AssertionError("the server has not recovered")


def answers(connection: Connection) -> bool:
    """True if the connection still stands."""
    try:
        connection.execute(text("SELECT pg_sleep(0.02)"))
    except OperationalError:
        return False
    return True


def reached_end(store: Store, work_id: str) -> WorkItem:
    """Wait for the end of work, also while the store cannot be reached."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(StoreUnavailableError):
            return ended(store, work_id)
        threading.Event().wait(0.05)
    raise AssertionError(f"{work_id} has not ended")


def test_a_process_has_few_connections_however_many_devices_it_serves(store: Store, tmp_path: Path) -> None:
    """Eight devices that all work at once share four, and the listener has one."""
    cards = [CPU.model_copy(update={"id": f"cuda:{index}", "kind": "cuda"}) for index in range(8)]
    together = threading.Barrier(len(cards))
    runner = ScriptedRunner(37, lambda _size, _stop: _wait_once(together))
    settings = worker_settings(tmp_path, lease_seconds=RARELY_SECONDS)
    url = store.engine.url.render_as_string(hide_password=False)
    executors = [InlineExecutor(card, runner, no_training) for card in cards]
    with closing(Store(open_engine(url, worker_connections(len(cards))))) as own:
        coordinator = Coordinator(own, executors, VERSIONS, settings)
        coordinator.start()
        try:
            ids = [store.submissions.add(new_work(f"tun_{index}", device=f"cuda:{index}")).id for index in range(8)]
            assert {ended(store, work_id).state for work_id in ids} == {State.SUCCEEDED}
            counting = create_engine(url, poolclass=NullPool)
            query = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            store.engine.dispose()
            with counting.connect() as connection:
                assert 2 <= connection.execute(text(query)).scalar_one() <= 5
        finally:
            coordinator.stop()


def _wait_once(together: threading.Barrier) -> None:
    """Wait for all others before the first probe."""
    with suppress(threading.BrokenBarrierError):
        together.wait(PATIENCE_SECONDS)
        together.abort()


def test_a_lost_notification_is_made_up_for_by_a_heartbeat(store: Store, start: Start) -> None:
    """Work that nothing announced is found within the interval of heartbeats."""
    start(ScriptedRunner(37), fallback_poll_seconds=0.2)
    until(store, WAITING, 1)
    admin = create_engine(store.engine.url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("UPDATE workers SET waits = false"))
    admin.dispose()
    assert ended(store, queue_tuning(store)).state is State.SUCCEEDED


def test_an_idle_worker_looks_again_once_then_waits() -> None:
    """A notification is requested, then there is one more look, and a long pause with short looks at the host."""
    now = [0.0]
    requests: list[float] = []
    pause = IdlePause(0.5, lambda: requests.append(now[0]), lambda: now[0])
    over = [pause.is_over]
    pause.begin()
    over.append(pause.is_over)
    assert 0.2 < pause.seconds < 0.4
    now[0] = 1.0
    over.append(pause.is_over)
    pause.begin()
    assert (requests, pause.seconds) == ([0.0], 5.0)
    now[0] = 200.0
    over.append(pause.is_over)
    pause.end()
    over.append(pause.is_over)
    pause.begin()
    assert over == [True, False, True, False, True]
    assert requests == [0.0, 200.0]


def test_a_worker_without_notifications_polls() -> None:
    """The pause is always over, and always as long."""
    pause = IdlePause(0.5)
    pause.begin()
    assert (pause.is_over, pause.seconds) == (True, 0.5)
