"""Served devices: announced by their workers, listed with their running and their waiting work."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, and_, delete, func, select
from typing_extensions import override

from service.domain.workers import ServedDevice
from service.store.database.engine import insert_or_replace, read_transaction, write_transaction
from service.store.database.schema import is_held, is_queued, now_ms, work_items, workers
from service.store.interface import DeviceStore
from service.store.models import AnnouncedDevice

_work = work_items.c
_RETENTION_MS = 86_400_000
"""Age of the last heartbeat from which a worker is deleted."""


class SqlDeviceStore(DeviceStore):
    """Served devices on SQLite and PostgreSQL; safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @override
    def announce(self, served: ServedDevice) -> None:
        row = {"owner": served.owner, "heartbeat_at": now_ms(), "document": served.model_dump_json()}
        gone = workers.c.heartbeat_at < now_ms() - _RETENTION_MS
        with write_transaction(self._engine) as connection:
            insert_or_replace(connection, workers, {"slot": served.slot} | row)
            connection.execute(delete(workers).where(gone))

    @override
    def withdraw(self, served: ServedDevice) -> None:
        own = and_(workers.c.slot == served.slot, workers.c.owner == served.owner)
        with write_transaction(self._engine) as connection:
            connection.execute(delete(workers).where(own))

    @override
    def list(self) -> list[AnnouncedDevice]:
        with read_transaction(self._engine) as connection:
            found = connection.execute(select(workers, now_ms().label("now")).order_by(workers.c.slot)).all()
            holding = connection.execute(select(_work.slot, _work.id).where(is_held))
            holders: dict[str | None, str] = {row.slot: row.id for row in holding}
            queued = _queued(connection)
        return [
            AnnouncedDevice(
                served=served,
                age_seconds=max(0.0, (row.now - row.heartbeat_at) / 1000),
                running_id=holders.get(served.slot),
                queued=sum(queued.get((served.device.id, kind), 0) for kind in (None, served.hardware)),
            )
            for served, row in ((ServedDevice.model_validate_json(row.document), row) for row in found)
        ]


def _queued(connection: Connection) -> dict[tuple[str, str | None], int]:
    """Return the amount of waiting work, by the device and the hardware that it needs."""
    lane: tuple[Any, ...] = (_work.device, _work.hardware)
    found = connection.execute(select(*lane, func.count().label("queued")).where(is_queued).group_by(*lane))
    return {(row.device, row.hardware): row.queued for row in found}
