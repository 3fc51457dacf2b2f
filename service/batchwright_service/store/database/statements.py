"""Conditional updates of work, and the renewal of leases."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    and_,
    case,
    insert,
    literal,
    select,
    tuple_,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from batchwright.client.documents.states import State
from batchwright.client.documents.work import EventKind
from batchwright_service.errors import ConflictError, StaleLeaseError
from batchwright_service.store.database.schema import StoredDocument, events, is_held, now_ms, work_items
from batchwright_service.store.models import Lease

_work = work_items.c

_RECHECK_SHARE = 3
"""A renewal moves the indexed time when less than this part of a lease is left of it. Processes renew four times."""

_CHANGED = [
    _work[name]
    for name in ("id", "model", "key_id", "device", "hardware", "slot", "owner", "updated_at", "event_count")
]
"""The columns of a changed row that callers use; each costs time when a statement is built."""

EventToAdd = tuple[EventKind, str]
"""Kind and JSON of an event."""


def state_event(state: State) -> EventToAdd:
    """Return the event of a new state."""
    return EventKind.STATE, f'"{state.value}"'


def held_by(lease: Lease) -> ColumnElement[bool]:
    """Return the condition that the lease is valid: same owner, same fencing token, not expired, not ended."""
    return and_(is_latest_lease(lease), _work.lease_expires_at > now_ms())


def is_latest_lease(lease: Lease) -> ColumnElement[bool]:
    """Return the condition that the lease is the newest, expired or not: same owner and fencing token, not ended."""
    # The owner alone does not do: a process may lose a lease and claim the same work again, in another thread.
    return and_(_work.id == lease.work_id, _work.owner == lease.owner, _work.token == lease.token, is_held)


def renew_leases(connection: Connection, leases: Sequence[Lease], lease_ms: int) -> dict[Lease, State]:
    """Extend the valid ones of these leases, and return the states of their work.

    Rows that another transaction has locked are left out, so that a slow one delays no other lease. The indexed column
    changes only when it would pass before the next renewals.
    """
    if not leases:
        return {}
    valid = and_(_is_one_of(leases), is_held, _work.lease_expires_at > now_ms())
    free = select(_work.id).where(valid).order_by(_work.id).with_for_update(skip_locked=True)
    until = now_ms() + lease_ms
    is_due = _work.expiry_check_at <= now_ms() + lease_ms // _RECHECK_SHARE
    check_at = case((is_due, until), else_=_work.expiry_check_at)
    statement = (
        update(work_items)
        .where(_work.id.in_(free), valid)
        .values(lease_expires_at=until, expiry_check_at=check_at)
        .returning(_work.id, _work.owner, _work.token, _work.state)
    )
    found = connection.execute(statement).all()
    return {Lease(row.id, row.owner, row.token): State(row.state) for row in found}


def valid_leases(connection: Connection, leases: Sequence[Lease]) -> frozenset[Lease]:
    """Return the leases that have not ended."""
    if not leases:
        return frozenset()
    valid = and_(_is_one_of(leases), is_held, _work.lease_expires_at > now_ms())
    found = connection.execute(select(_work.id, _work.owner, _work.token).where(valid))
    return frozenset(Lease(row.id, row.owner, row.token) for row in found)


def _is_one_of(leases: Sequence[Lease]) -> ColumnElement[bool]:
    keys = [(lease.work_id, lease.owner, lease.token) for lease in leases]
    return tuple_(_work.id, _work.owner, _work.token).in_(keys)


def change(
    connection: Connection,
    condition: ColumnElement[bool],
    values: dict[str, Any],
    new_events: Sequence[EventToAdd] = (),
) -> RowMapping | None:
    """Update one work item under a condition, and add events; None when the condition is not met.

    The result has the columns that the store needs of a changed row (``_CHANGED``).

    The update locks the row until the transaction ends, so that events of one item are numbered and become visible in
    order.
    """
    return _execute(connection, changing(condition, values, len(new_events)), new_events)


def change_each(
    connection: Connection, condition: ColumnElement[bool], values: dict[str, Any], new_event: EventToAdd
) -> Sequence[RowMapping]:
    """Update every work item under a condition, add the event to each, and return their rows as ``change`` does."""
    rows = connection.execute(changing(condition, values, 1)).mappings().all()
    if rows:
        connection.execute(insert(events), [_event_values(row, row["event_count"], new_event) for row in rows])
    return rows


def locking(condition: ColumnElement[bool]) -> Select[Any]:
    """Return a statement that locks the rows under a condition in the order of their ids.

    Transactions that change several rows execute it first, so that none waits for another that waits for it.
    """
    return select(_work.id).where(condition).order_by(_work.id).with_for_update()


def changing(condition: ColumnElement[bool], values: dict[str, Any], events_added: int) -> ReturningUpdate[Any]:
    """Return the statement of a change, for a caller that executes it often: to build it takes longer."""
    counted = _work.event_count + events_added
    changed = update(work_items).where(condition).values(updated_at=now_ms(), event_count=counted, **values)
    return changed.returning(*_CHANGED)


def _execute(
    connection: Connection, changed: ReturningUpdate[Any], new_events: Sequence[EventToAdd]
) -> RowMapping | None:
    if connection.dialect.name == "postgresql" and len(new_events) == 1:
        return connection.execute(with_event(changed, *new_events[0])).mappings().first()
    row = connection.execute(changed).mappings().first()
    if row is not None and new_events:
        add_events(connection, row, new_events)
    return row


def with_event(changing: ReturningUpdate[Any], kind: EventKind, document: str) -> Select[Any]:
    """Return one statement of PostgreSQL that changes a row and adds an event to it."""
    row = changing.cte("changed")
    columns = (row.c.id, row.c.event_count, row.c.updated_at, literal(kind.value), literal(document, StoredDocument()))
    added = insert(events).from_select(["work_id", "id", "at", "kind", "document"], select(*columns))
    return select(row).add_cte(added.cte("added"))


def change_held(
    connection: Connection, lease: Lease, values: dict[str, Any], new_events: Sequence[EventToAdd]
) -> RowMapping:
    """Update the work item of a valid lease, and return its row.

    Raises:
        StaleLeaseError: when the lease has ended.
        ConflictError: when the lease is valid, and the state does not allow the new one.
    """
    row = change(connection, held_by(lease), values, new_events)
    if row is None:
        raise refusal(connection, lease, values.get("state"))
    return row


def refusal(connection: Connection, lease: Lease, new_state: State | None) -> StaleLeaseError | ConflictError:
    """Return the error for a change under a lease that was not made."""
    state = connection.execute(select(_work.state).where(held_by(lease))).scalar_one_or_none()
    if state is None:
        return stale_lease_error(lease)
    return ConflictError(f"{lease.work_id} is {state}, from where it cannot become {new_state}")


def stale_lease_error(lease: Lease) -> StaleLeaseError:
    """Return the error for a report after the end of its lease."""
    name = f"lease {lease.token} of {lease.owner} on {lease.work_id}"
    return StaleLeaseError(f"{name} has ended: it expired, was taken over, or its work ended")


def add_events(connection: Connection, row: RowMapping, new_events: Sequence[EventToAdd]) -> None:
    """Add the newest events of a work item, whose row counts them already."""
    first = row["event_count"] - len(new_events) + 1
    values = [_event_values(row, number, new_event) for number, new_event in enumerate(new_events, start=first)]
    connection.execute(insert(events), values)


def _event_values(row: RowMapping, number: int, new_event: EventToAdd) -> dict[str, Any]:
    kind, text = new_event
    return {"work_id": row["id"], "id": number, "at": row["updated_at"], "kind": kind.value, "document": text}
