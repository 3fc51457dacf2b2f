"""The audit log: entries are written in the transactions of their acts, and read in pages."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, delete, insert, select

from batchwright.client.documents.audit import AuditAction, AuditEntry
from batchwright_service.domain.callers import Caller
from batchwright_service.store.database.list_search import counted
from batchwright_service.store.database.mapping import moment
from batchwright_service.store.database.schema import api_keys, audit_log, now_ms, now_once, work_items
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import AuditFilter

_entry = audit_log.c
_LONGEST_DETAIL = 300
_BATCH_SIZE = 500
"""Entries that one transaction deletes, so that other writers wait for milliseconds."""


def record(
    connection: Connection, action: AuditAction, caller: Caller, object_id: str | None = None, detail: str | None = None
) -> None:
    """Record an act within its transaction, with the name that the key has."""
    connection.execute(insert(audit_log).values(**_values(action, caller, object_id, detail)))


def record_each(connection: Connection, action: AuditAction, caller: Caller, object_ids: Sequence[str]) -> None:
    """Record an act on several objects within its transaction, with an entry for each of them."""
    if object_ids:
        connection.execute(insert(audit_log).values([_values(action, caller, name, None) for name in object_ids]))


def _values(action: AuditAction, caller: Caller, object_id: str | None, detail: str | None) -> dict[str, Any]:
    name = select(api_keys.c.name).where(api_keys.c.id == caller.key_id).scalar_subquery()
    return {
        "at": now_ms(),
        "action": action,
        "key_id": caller.key_id,
        "key_name": None if caller.key_id is None else name,
        "object_id": object_id,
        "address": caller.address,
        "detail": None if detail is None else detail[:_LONGEST_DETAIL],
    }


def _conditions(wanted: AuditFilter) -> list[ColumnElement[bool]]:
    names = ("action", "key_id", "object_id")
    found = [_entry[name] == value for name in names if (value := getattr(wanted, name)) is not None]
    if wanted.exclude:
        found.append(_entry.action.not_in(wanted.exclude))
    if wanted.after is not None:
        found.append(_entry.at > round(wanted.after.timestamp() * 1000))
    if wanted.until is not None:
        found.append(_entry.at <= round(wanted.until.timestamp() * 1000))
    return found


class AuditStore:
    """The audit log, to which the other stores add in the transactions of their acts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def newest(self, wanted: AuditFilter, limit: int, before: int | None = None) -> Sequence[AuditEntry]:
        """Return at most ``limit`` matching entries, newest first, of those with an id below ``before``."""
        named = audit_log.outerjoin(work_items, work_items.c.id == _entry.object_id)
        columns = (*audit_log.columns, work_items.c.name.label("object_name"))
        statement = select(*columns).select_from(named).where(*_conditions(wanted))
        if before is not None:
            statement = statement.where(_entry.id < before)
        statement = statement.order_by(_entry.id.desc()).limit(limit)
        with read_transaction(self._engine) as connection:
            rows = connection.execute(statement).mappings().all()
        return [AuditEntry(**{**row, "action": AuditAction(row["action"]), "at": moment(row["at"])}) for row in rows]

    def count(self, wanted: AuditFilter) -> int:
        """Return the number of matching entries, counted up to a bound as in other lists."""
        with read_transaction(self._engine) as connection:
            return counted(connection, select(_entry.id).where(*_conditions(wanted)))

    def prune(self, older_than_seconds: float) -> int:
        """Delete older entries, in short transactions, and return their number."""
        expired = select(_entry.id).where(_entry.at <= now_once() - int(older_than_seconds * 1000))
        batch = _entry.id.in_(expired.order_by(_entry.at).limit(_BATCH_SIZE).with_for_update(skip_locked=True))
        deleted = 0
        while True:
            with write_transaction(self._engine) as connection:
                count = connection.execute(delete(audit_log).where(batch)).rowcount
            if not count:
                return deleted
            deleted += count
