"""Workers on PostgreSQL that wait for notifications: of work, of cancellations, and without any for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from service.domain.states import State
from service.store.database.engine import open_engine
from service.store.store import Store
from service.worker.coordinator import Coordinator
from service.worker.executors.inline import InlineExecutor
from service.worker.idle_pause import IdlePause
from service.worker.settings import WorkerSettings
from tests.service.worker.test_device_worker import VERSIONS, ended, no_training, queue_tuning, worker_settings
from tests.support.factories import CPU
from tests.support.service.postgres import Databases
from tests.support.service.scripted import ScriptedRunner, until_stopped

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
        started.append(Coordinator(store, [executor], VERSIONS, settings, store.new_listener))
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


@pytest.mark.parametrize("condition", ["TRUE", LISTENING], ids=["every connection", "the listening one"])
def test_broken_connections_are_opened_again(store: Store, start: Start, condition: str) -> None:
    """Work that is queued after the break, or during it, is run, although nothing polls."""
    start(ScriptedRunner(37))
    until(store, WAITING, 1)
    end_connections(store, condition)
    work_id = queue_tuning(store)
    assert ended(store, work_id).state is State.SUCCEEDED


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
