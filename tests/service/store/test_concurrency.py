"""Many claimers on one database, of several processes' engines: nothing is run twice, nothing is lost."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import func, select

from batchwright.client.documents.states import State, WorkKind
from batchwright_service.errors import StaleLeaseError
from batchwright_service.store.database.schema import probes
from batchwright_service.store.database.transactions import open_engine, read_transaction
from batchwright_service.store.models import Ending
from batchwright_service.store.store import Store
from tests.support.factories import probe_result
from tests.support.service.scripted import new_work
from tests.support.service.stores import LEASE_SECONDS, NewId, claimed, elsewhere, engine_at, fill

ITEMS, CLAIMERS = 400, 8
ENGINES = 2
"""Engines that the claimers share, as threads share that of their process. SQLite has one host, with two processes."""
KEYS = ("", "a" * 16, "b" * 16)


def test_items_are_each_run_once(store: Store, database_url: str) -> None:
    """Eight claimers work everything off, while one in ten of their attempts vanishes and is taken over."""
    with engine_at(database_url) as engine:
        ids = fill(engine, ITEMS, KEYS)
    vanished: list[str] = []
    run: list[str] = []
    together = threading.Barrier(CLAIMERS)
    stores = [Store(open_engine(database_url)) for _ in range(ENGINES)]

    def work(name: int) -> None:
        own = stores[name % ENGINES]
        served = elsewhere(f"host{name}")
        together.wait()
        while len(run) < ITEMS:
            vanishes = (len(run) + name) % 10 == 0
            claim = own.leases.claim(served, 0.0 if vanishes else LEASE_SECONDS)
            if claim is None:
                continue
            if vanishes:
                vanished.append(claim.item.id)
                continue
            run.append(claim.item.id)
            own.leases.finish(claim.lease, Ending(State.SUCCEEDED))

    with ThreadPoolExecutor(CLAIMERS) as pool:
        list(pool.map(work, range(CLAIMERS)))
    for opened in stores:
        opened.close()
    assert Counter(run) == Counter(ids)
    rows = store.work.newest(WorkKind.TUNING, ITEMS + 1)
    assert {row.state for row in rows} == {State.SUCCEEDED}
    assert Counter({row.id: row.attempts for row in rows}) == Counter(run) + Counter(vanished)


def test_claimers_at_once_take_turns(store: Store, new_id: NewId) -> None:
    """Devices that become free together do not all take work of one key."""
    for key in KEYS:
        for _ in range(4):
            store.submissions.add(new_work(new_id("tun"), key_id=key or None))
    together = threading.Barrier(6)

    def claim(name: int) -> str | None:
        together.wait()
        return claimed(store, elsewhere(f"host{name}")).item.key_id

    with ThreadPoolExecutor(6) as pool:
        assert Counter(pool.map(claim, range(6))) == {None: 2, "a" * 16: 2, "b" * 16: 2}


def test_of_two_owners_of_one_item_only_the_later_records(store: Store, database_url: str, new_id: NewId) -> None:
    """While one is taken over again and again, every report of an earlier owner is refused."""
    work_id = store.submissions.add(new_work(new_id("tun"))).id
    refused = 0
    for ordinal in range(1, 11):
        earlier = claimed(store, elsewhere("one"), lease_seconds=0.0).lease
        later = claimed(store, elsewhere("two"), LEASE_SECONDS if ordinal == 10 else 0.0)
        with ThreadPoolExecutor(2) as pool:
            reports = [
                pool.submit(store.evidence.record_probe, lease, 1, probe_result(size))
                for size, lease in ((4, earlier), (8, later.lease))
            ]
            refused += sum(isinstance(report.exception(), StaleLeaseError) for report in reports)
    with engine_at(database_url) as engine, read_transaction(engine) as connection:
        assert connection.execute(select(func.count()).select_from(probes)).scalar_one() == 1
    assert refused == 19
    assert [probe.result.micro_batch_size for probe in store.evidence.probes(work_id)] == [8]
