"""Claims of several devices in one round trip to PostgreSQL."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, text

from batchwright.client.documents.states import State
from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.database.claim_statements import lock_claims
from batchwright_service.store.database.transactions import open_engine, read_transaction, write_transaction
from batchwright_service.store.models import Claim
from batchwright_service.store.store import Store
from tests.support.service.scripted import new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed, elsewhere, fill

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
PATIENCE_SECONDS = 60.0
QUEUED = 60
WAITING = "FROM pg_locks WHERE relation = 'health'::regclass AND NOT granted"
"""Claims in line for the lock."""


def claims_of(store: Store, *names: str) -> list[Claim | None]:
    """Claim for a device of each of these hosts together."""
    return list(store.leases.claim_together([(elsewhere(name), LEASE_SECONDS) for name in names]))


def test_the_lock_is_held_while_the_client_has_nothing_to_do(store: Store, tmp_path: Path) -> None:
    """Between the lock and the commit of three claims, the server waits for no message of the client."""
    fill(store.engine, 3)
    protocol = tmp_path / "protocol"
    with protocol.open("w") as file:

        def trace(connection: Any, *_more: object) -> None:
            connection.pgconn.trace(file.fileno())

        event.listen(store.engine, "checkout", trace)
        assert None not in claims_of(store, "one", "two", "three")
        store.close()
    _, _, since_lock = protocol.read_text().partition("LOCK TABLE")
    under_lock, commit, _ = since_lock.partition("COMMIT")
    assert commit
    assert under_lock.count("\tF\t") > 3  # messages of the client
    assert "\tB\t" not in under_lock  # none of the server before the commit was sent
    assert "WITH found" not in under_lock  # the claims were planned before


def test_no_two_of_many_claimers_take_one_item(store: Store) -> None:
    """Eight processes with three devices each claim until the queue is empty."""
    queued = fill(store.engine, QUEUED, ("", "a" * 16))
    stores = [Store(open_engine(store.engine.url.render_as_string(hide_password=False))) for _ in range(8)]

    def drain(number: int) -> list[str]:
        taken: list[str] = []
        while True:
            names = [f"host{number}x{len(taken)}x{index}" for index in range(3)]  # each slot takes one item
            found = [claim.lease.work_id for claim in claims_of(stores[number], *names) if claim is not None]
            if not found:
                return taken
            taken += found

    try:
        with ThreadPoolExecutor(8) as pool:
            taken = [work_id for each in pool.map(drain, range(8)) for work_id in each]
    finally:
        for opened in stores:
            opened.close()
    assert Counter(taken) == Counter(queued)


def test_a_claim_is_made_whole_or_not_at_all_when_the_lock_is_not_had_in_time(store: Store) -> None:
    """The error is that of a database which cannot be used now; the next claims are made."""
    fill(store.engine, 2)

    def be_impatient(connection: Any, *_more: object) -> None:
        connection.execute("SET lock_timeout = '100ms'")
        connection.commit()

    opened: list[None] = []
    event.listen(store.engine, "checkout", be_impatient)
    event.listen(store.engine, "connect", lambda *_: opened.append(None))
    other = open_engine(store.engine.url.render_as_string(hide_password=False))
    with write_transaction(other) as holding:
        lock_claims(holding)
        with pytest.raises(StoreUnavailableError, match="lock timeout"):
            claims_of(store, "one", "two")
    other.dispose()
    assert store.queue.depths()[0].waiting == 2
    assert None not in claims_of(store, "one", "two")
    assert opened == []  # with the connection whose plans are made


def test_claims_whose_connection_is_lost_before_the_commit_are_not_made(store: Store) -> None:
    """The statements wait for the lock in the server when it ends the connection."""
    fill(store.engine, 2)
    admin = create_engine(store.engine.url, isolation_level="AUTOCOMMIT")
    other = create_engine(store.engine.url)
    with ThreadPoolExecutor(1) as pool, write_transaction(other) as holding:
        lock_claims(holding)
        claims = pool.submit(claims_of, store, "one", "two")
        with admin.connect() as connection:
            while not connection.execute(text(f"SELECT pg_terminate_backend(pid) {WAITING}")).all():
                pass
        with pytest.raises(StoreUnavailableError):
            claims.result(PATIENCE_SECONDS)
    admin.dispose()
    other.dispose()
    with read_transaction(store.engine) as connection:
        states = connection.execute(text("SELECT state, token FROM work_items")).all()
    assert [tuple(row) for row in states] == [(State.QUEUED, 0)] * 2
    assert None not in claims_of(store, "one", "two")


def test_claims_that_wait_hold_no_snapshot(store: Store) -> None:
    """PostgreSQL may remove what has changed since, so that later claims need not pass it."""
    fill(store.engine, 2)
    assert None not in claims_of(store, "one")  # a connection's first claim reads the catalogue for it
    admin = create_engine(store.engine.url, isolation_level="AUTOCOMMIT")
    other = create_engine(store.engine.url)
    in_line = text(f"SELECT backend_xmin FROM pg_stat_activity WHERE pid IN (SELECT pid {WAITING})")  # noqa: S608
    with ThreadPoolExecutor(1) as pool, write_transaction(other) as holding:
        lock_claims(holding)
        claim = pool.submit(claimed, store)
        with admin.connect() as connection:
            while not (found := connection.execute(in_line).scalars().all()):
                pass
        holding.rollback()
        assert claim.result(PATIENCE_SECONDS).lease.token == 1
    admin.dispose()
    other.dispose()
    assert found == [None]


def test_work_that_is_cancelled_under_a_claim_does_not_hide_the_next(store: Store, new_id: NewId) -> None:
    """The claim waits for the cancellation, whose row it had chosen, and then takes the other item."""
    first, second = (store.submissions.add(new_work(new_id("tun"))).id for _ in range(2))
    admin = create_engine(store.engine.url, isolation_level="AUTOCOMMIT")
    blocked = text("SELECT 1 FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted")
    with ThreadPoolExecutor(1) as pool, admin.connect() as connection:
        with write_transaction(store.engine) as cancelling:
            change = text("UPDATE work_items SET state = 'CANCELLED', event_count = event_count WHERE id = :id")
            cancelling.execute(change, {"id": first})
            claim = pool.submit(claimed, store)
            while not connection.execute(blocked).all():
                pass
        assert claim.result(PATIENCE_SECONDS).lease.work_id == second
    admin.dispose()
