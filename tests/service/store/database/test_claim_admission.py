"""Few claimers stand in the line for the lock of claims; the others come back, and none fails or starves."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import OperationalError

from batchwright_service.domain.hardware import ANY_DEVICE, HardwareNeed
from batchwright_service.errors import ClaimsCrowdedError
from batchwright_service.store.database.claim_admission import TICKETS, admitted
from batchwright_service.store.database.claim_statements import lock_claims
from batchwright_service.store.database.transactions import open_engine, read_transaction, write_transaction
from batchwright_service.store.models import Beat
from batchwright_service.store.store import Store
from tests.support.service.postgres import Databases
from tests.support.service.stores import LEASE_SECONDS, claimed, elsewhere, fill, on_device

CLAIMERS = 3 * TICKETS
"""Processes, each with a store and connections of its own."""
PATIENCE_SECONDS = 60.0
IN_LINE = text("SELECT count(*) FROM pg_locks WHERE relation = 'health'::regclass AND NOT granted")


@pytest.fixture
def url(postgresql: Databases) -> str:
    """A database with the tables of the store."""
    return postgresql.migrated()


@pytest.fixture
def stores(url: str) -> Iterator[list[Store]]:
    """A store for each claimer."""
    opened = [Store(open_engine(url)) for _ in range(CLAIMERS)]
    yield opened
    for store in opened:
        store.close()


@pytest.fixture
def admin(url: str) -> Iterator[Connection]:
    """A connection that observes."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, or fail."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline


def test_few_claimers_stand_in_line(stores: list[Store], admin: Connection) -> None:
    """While one process holds the lock, the others return their connections; then each claimer takes an item."""
    queued = fill(stores[0].engine, CLAIMERS, ("", "a" * 16))
    returned: set[int] = set()

    def claim(number: int) -> str:
        return claimed(stores[number], elsewhere(f"host{number}")).item.id

    with ThreadPoolExecutor(CLAIMERS) as pool:
        with write_transaction(stores[0].engine) as holding:
            lock_claims(holding)
            for number, store in enumerate(stores):
                event.listen(store.engine, "checkin", lambda *_, number=number: returned.add(number))
            claims = [pool.submit(claim, number) for number in range(CLAIMERS)]
            wait_until(lambda: len(returned) == CLAIMERS - TICKETS)
            wait_until(lambda: admin.execute(IN_LINE).scalar_one() == TICKETS)
            assert not any(each.done() for each in claims)
        taken = [each.result(PATIENCE_SECONDS) for each in claims]
    assert Counter(taken) == Counter(queued)


def test_none_fails_while_all_claim_at_once(stores: list[Store], admin: Connection) -> None:
    """Many processes empty a queue whose claims are slow."""
    queued = fill(stores[0].engine, 4 * CLAIMERS, ("", "a" * 16, "b" * 16))
    body = "'BEGIN PERFORM pg_sleep(0.01); RETURN NEW; END'"
    admin.execute(text(f"CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS {body}"))
    admin.execute(text("CREATE TRIGGER slow BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION pause()"))
    ends, lengths = threading.Event(), [0]

    def watch() -> None:
        while not ends.is_set():
            lengths.append(admin.execute(IN_LINE).scalar_one())

    def drain(number: int) -> list[str]:
        taken: list[str] = []
        while True:
            names = [f"host{number}x{len(taken)}x{index}" for index in range(2)]  # each slot takes one item
            wanted = [(elsewhere(name), LEASE_SECONDS) for name in names]
            found = [claim.lease.work_id for claim in stores[number].leases.claim_together(wanted) if claim is not None]
            if not found:
                return taken
            taken += found

    try:
        with ThreadPoolExecutor(CLAIMERS + 1) as pool:
            watching = pool.submit(watch)
            try:
                taken = [work_id for each in pool.map(drain, range(CLAIMERS)) for work_id in each]
            finally:
                ends.set()
            watching.result(PATIENCE_SECONDS)
    finally:
        admin.execute(text("DROP TRIGGER slow ON events"))
        admin.execute(text("DROP FUNCTION pause"))
    assert Counter(taken) == Counter(queued)
    assert 1 < max(lengths) <= TICKETS


def test_a_claim_gives_up_when_no_ticket_is_returned(stores: list[Store]) -> None:
    """The error tells it from a database that cannot be used; the work waits, and the tickets serve the next claims."""
    fill(stores[0].engine, 1)
    with ExitStack() as holding:
        for store in stores[:TICKETS]:
            holding.enter_context(admitted(store.engine, read_transaction, 0.0))
        with pytest.raises(ClaimsCrowdedError, match="other claims went first"):
            holding.enter_context(admitted(stores[-1].engine, read_transaction, 0.0))
    assert claimed(stores[-1]).lease.token == 1


def test_claims_that_were_made_are_returned_when_a_later_one_fails(stores: list[Store]) -> None:
    """Work for one device is claimed first; then the connection of the claim for two is lost."""
    store = stores[0]
    one = fill(store.engine, 1, device="cpu")
    card = on_device("cuda:0")
    pair = card.model_copy(update={"slot": f"{card.host}/cuda:1"})
    need = HardwareNeed(product=card.device.name, devices_per_node=2)
    fill(store.engine, 1, device=ANY_DEVICE, hardware=need.lane)
    store.devices.beat(Beat(LEASE_SECONDS, devices=(card, pair), changed=frozenset({card.slot, pair.slot})))
    checkouts: list[None] = []

    def lose_second(*_: object) -> None:
        checkouts.append(None)
        if len(checkouts) == 2:
            raise OperationalError("SELECT 1", {}, ConnectionError("the connection is lost"))

    event.listen(store.engine, "checkout", lose_second)
    wanted = [(elsewhere("host"), LEASE_SECONDS), (card, LEASE_SECONDS)]
    claims = store.leases.claim_together(wanted)
    assert [claim and claim.lease.work_id for claim in claims] == [*one, None]
    assert len(checkouts) == 2
    event.remove(store.engine, "checkout", lose_second)
    assert claimed(store, card).other_slots == (pair.slot,)
