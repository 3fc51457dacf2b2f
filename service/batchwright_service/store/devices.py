"""Served devices: announced by their workers with heartbeats, listed with their running and their waiting work.

Dispatchers announce the devices of a cluster, and report on the cluster as a whole.
"""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, and_, delete, func, or_, select, tuple_, update

from batchwright.client.documents.fleet import FleetReport
from batchwright.client.documents.states import HELD_STATES, State
from batchwright.client.documents.workers import ServedDevice
from batchwright_service.domain.hardware import ANY_DEVICE, fits, need_of_lane
from batchwright_service.store.database.claim_statements import prospects_of
from batchwright_service.store.database.schema import (
    fleets,
    held_slots,
    is_held,
    is_queued,
    now_ms,
    now_once,
    work_items,
    workers,
)
from batchwright_service.store.database.statements import renew_leases, valid_leases
from batchwright_service.store.database.transactions import insert_or_replace, read_transaction, write_transaction
from batchwright_service.store.models import AnnouncedDevice, Beat, BeatReply, FleetWork, ReportedFleet, SlotHolder
from batchwright_service.store.scheduling import QueueStore

_work = work_items.c
_FLEET_COLUMNS = ("id", "state", "device", "hardware", "token", "lease_expires_at", "updated_at")
_FLEET_WORK = select(*(_work[name] for name in _FLEET_COLUMNS), now_ms().label("now"))
_RETENTION_MS = 86_400_000
"""Age of the last heartbeat, or of a dispatcher's last report, from which it is no longer listed."""


class DeviceStore:
    """Served devices, as their workers announce them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def announce(self, served: ServedDevice) -> None:
        """Record that a worker serves the device now."""
        with write_transaction(self._engine) as connection:
            _announce(connection, [served])

    def beat(self, beat: Beat) -> BeatReply:
        """Renew leases, announce devices and look for work of one process, in one transaction.

        Leases that have ended do not affect the others. Devices that were withdrawn or deleted are announced anew.
        """
        lease_ms = int(beat.lease_seconds * 1000)
        with write_transaction(self._engine) as connection:
            renewed = renew_leases(connection, beat.leases, lease_ms)
            valid = valid_leases(connection, [lease for lease in beat.leases if lease not in renewed])
            changed = [served for served in beat.devices if served.slot in beat.changed]
            _announce(connection, changed, lease_ms)
            _keep_announced(connection, [served for served in beat.devices if served not in changed], lease_ms)
            wanted = frozenset(prospects_of(connection, beat.idle))
        return BeatReply(renewed, frozenset(beat.leases) - renewed.keys() - valid, wanted)

    def await_work(self, served: ServedDevice) -> None:
        """Have the worker of an announced device notified of the next work for the device, where notifications exist.

        Work that was queued at the same time may not be noticed: look for work again a moment later.
        """
        own = and_(workers.c.slot == served.slot, workers.c.owner == served.owner)
        with write_transaction(self._engine) as connection:
            connection.execute(update(workers).where(own, workers.c.waits.is_(False)).values(waits=True))

    def withdraw(self, served: ServedDevice) -> None:
        """Remove a worker's device, unless another worker has taken the slot over."""
        own = and_(workers.c.slot == served.slot, workers.c.owner == served.owner)
        with write_transaction(self._engine) as connection:
            connection.execute(delete(workers).where(own))

    def holder(self, slot: str) -> SlotHolder | None:
        """Return the process that announced a slot, alive or not."""
        age = now_ms() - workers.c.heartbeat_at
        statement = select(workers.c.owner, age.label("age_ms")).where(workers.c.slot == slot)
        with read_transaction(self._engine) as connection:
            row = connection.execute(statement).first()
        return None if row is None else SlotHolder(row.owner, max(0, row.age_ms) / 1000)

    def list(self) -> list[AnnouncedDevice]:
        """Return the announced devices whose last heartbeat is less than a day old."""
        recent = workers.c.heartbeat_at > now_once() - _RETENTION_MS
        announced = select(workers, now_ms().label("now")).where(recent).order_by(workers.c.slot)
        with read_transaction(self._engine) as connection:
            found = connection.execute(announced).all()
            holding = connection.execute(select(_work.slot, _work.id).where(is_held))
            holders: dict[str | None, str] = {row.slot: row.id for row in holding}
            holders |= {row.slot: row.work_id for row in connection.execute(select(held_slots))}
            lanes: tuple[Any, ...] = (_work.device, _work.hardware)
            counted = select(*lanes, func.count().label("queued")).where(is_queued).group_by(*lanes)
            queued = {(row.device, row.hardware): row.queued for row in connection.execute(counted)}
        return [
            AnnouncedDevice(
                served=served,
                age_seconds=max(0.0, (row.now - row.heartbeat_at) / 1000),
                running_id=holders.get(served.slot),
                queued=sum(queued.get((served.device.id, kind), 0) for kind in (None, served.hardware))
                + sum(
                    count
                    for (device, lane), count in queued.items()
                    if device == ANY_DEVICE and lane is not None and fits(served.device, need_of_lane(lane))
                ),
            )
            for row in found
            for served in ServedDevice.readable([row.document])
        ]


class FleetStore:
    """The work of dispatchers, and their reports."""

    def __init__(self, engine: Engine, queue: QueueStore) -> None:
        self._engine = engine
        self._queue = queue

    def work(self, limit: int, work_ids: Collection[str]) -> list[FleetWork]:
        """Return at most ``limit`` queued pieces of work in the order of the queue, all that are held, and those named.

        Work with an expired lease comes first. Unknown ids are left out.
        """
        place = {waiting.id: number for number, waiting in enumerate(self._queue.waiting(limit))}
        wanted = or_(is_held, _work.id.in_({*place, *work_ids}))
        with read_transaction(self._engine) as connection:
            found = [_fleet_work(row) for row in connection.execute(_FLEET_WORK.where(wanted))]
        return sorted(found, key=lambda work: (place.get(work.id, -1), work.id))

    def report(self, report: FleetReport) -> None:
        """Store the report of a dispatcher in place of the last one of the same cluster."""
        name = f"{report.engine} {report.address}"
        values = {"name": name, "reported_at": now_ms(), "document": report.model_dump_json()}
        with write_transaction(self._engine) as connection:
            insert_or_replace(connection, fleets, values)

    def reports(self) -> list[ReportedFleet]:
        """Return the last report of each cluster that was made within a day."""
        age = now_ms() - fleets.c.reported_at
        statement = select(fleets.c.document, age.label("age_ms")).where(age < _RETENTION_MS).order_by(fleets.c.name)
        with read_transaction(self._engine) as connection:
            found = connection.execute(statement).all()
        return [
            ReportedFleet(report, max(0, row.age_ms) / 1000)
            for row in found
            for report in FleetReport.readable([row.document])
        ]


def _fleet_work(row: Any) -> FleetWork:  # noqa: ANN401 - a row of `_FLEET_WORK`
    state = State(row.state)
    is_live = state in HELD_STATES and row.lease_expires_at > row.now
    since = row.lease_expires_at if state in HELD_STATES else row.updated_at
    seconds = max(0, row.now - since) / 1000
    return FleetWork(row.id, state, row.device, row.hardware, row.token, is_live, seconds)


def _announce(connection: Connection, devices: Sequence[ServedDevice], lease_ms: int = 0) -> None:
    """Write whole rows, and delete those of workers that have long been gone.

    A worker that waits for work still waits, unless its process has just started or it takes none.
    """
    for served in devices:
        values = {
            "slot": served.slot,
            "owner": served.owner,
            "heartbeat_at": now_ms(),
            "document": served.model_dump_json(),
            "device": served.device.id,
            "hardware": served.hardware,
            "lease_ms": lease_ms,
            "waits": False,
        }
        stays = lease_ms > 0 and served.unready is None
        insert_or_replace(connection, workers, values, kept={"waits"} if stays else ())
    if devices:
        connection.execute(delete(workers).where(workers.c.heartbeat_at < now_ms() - _RETENTION_MS))


def _keep_announced(connection: Connection, devices: Sequence[ServedDevice], lease_ms: int) -> None:
    """Update the times of heartbeats; rows that are missing, or another worker's, are written anew."""
    if not devices:
        return
    keys = [(served.slot, served.owner) for served in devices]
    own = tuple_(workers.c.slot, workers.c.owner).in_(keys)
    times = {"heartbeat_at": now_ms(), "lease_ms": lease_ms}
    kept = set(connection.execute(update(workers).where(own).values(**times).returning(workers.c.slot)).scalars())
    _announce(connection, [served for served in devices if served.slot not in kept], lease_ms)
