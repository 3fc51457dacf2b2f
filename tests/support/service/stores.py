"""Support for the tests of the store: claims, ended work, bulk rows, and elapsed time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, insert, update

from batchwright.client.documents.states import State
from batchwright.client.documents.workers import ServedDevice
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.store.database.schema import submitters, work_items
from batchwright_service.store.database.transactions import insert_or_skip, open_engine, write_transaction
from batchwright_service.store.models import Beat, BeatReply, Claim, Ending, Lease, NewWork
from batchwright_service.store.outbox.deliveries import DueDelivery
from batchwright_service.store.store import Store
from tests.support.factories import recommendation
from tests.support.service.scripted import SERVED, new_work

LEASE_SECONDS = 3600.0

NewId = Callable[[str], str]


def claimed(store: Store, served: ServedDevice = SERVED, lease_seconds: float = LEASE_SECONDS) -> Claim:
    """Claim what is next; there must be something."""
    claim = store.leases.claim(served, lease_seconds)
    assert claim is not None
    return claim


def beaten(store: Store, *leases: Lease) -> BeatReply:
    """Send a heartbeat that renews these leases."""
    return store.devices.beat(Beat(LEASE_SECONDS, leases))


def elsewhere(name: str) -> ServedDevice:
    """Return a device like ``SERVED`` on another host."""
    return SERVED.model_copy(update={"slot": f"{name}/cpu", "owner": f"{name}:scope:1"})


def on_device(device: str, name: str = "test card") -> ServedDevice:
    """Another device, on a host of its own."""
    info = SERVED.device.model_copy(update={"id": device, "name": name})
    return SERVED.model_copy(update={"slot": f"{name}/{device}", "owner": f"{name}:scope:1", "device": info})


def ended(store: Store, work: NewWork, answer: Recommendation | None = None) -> Lease:
    """Queue work and see it end; nothing else may wait."""
    store.submissions.add(work)
    lease = claimed(store).lease
    assert lease.work_id == work.id
    store.leases.finish(lease, Ending(State.SUCCEEDED, recommendation=answer))
    return lease


def answered(store: Store, new_id: NewId, **changes: Any) -> Recommendation:
    """The answer of a tuning that has ended."""
    answer = recommendation(id=new_id("rec"))
    ended(store, new_work(new_id("tun"), **changes), answer)
    return answer


def fill(engine: Engine, count: int, keys: tuple[str, ...] = ("",), **columns: Any) -> list[str]:
    """Queue many pieces of work at once, of each key in turn, oldest first; their ids."""
    new_id = IdentifierSource().new
    row = vars(new_work("")) | {"state": State.QUEUED, "updated_at": 1} | columns
    rows = [
        row | {"id": new_id("tun"), "created_at": at, "key_id": keys[at % len(keys)] or None} for at in range(count)
    ]
    with write_transaction(engine) as connection:
        connection.execute(insert(work_items), rows)
        for key in keys:
            insert_or_skip(connection, submitters, {"id": key})
    return [row["id"] for row in rows]


@contextmanager
def engine_at(url: str) -> Iterator[Engine]:
    """An engine of the test's own."""
    engine = open_engine(url)
    yield engine
    engine.dispose()


def set_work(url: str, work_id: str, **values: Any) -> None:
    """Set columns of a work item, as if time had passed."""
    with engine_at(url) as engine, write_transaction(engine) as connection:
        connection.execute(update(work_items).where(work_items.c.id == work_id).values(**values))


def every_due(due: Sequence[DueDelivery]) -> list[str]:
    """Choose every message that is due."""
    return [message.id for message in due]
