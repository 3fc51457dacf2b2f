"""Conditions and conditional updates of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    String,
    and_,
    bindparam,
    case,
    column,
    exists,
    insert,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy import values as rows_of

from service.domain.hardware import ANY_DEVICE
from service.domain.states import State
from service.domain.work import EventKind
from service.domain.workers import ServedDevice
from service.errors import ConflictError, StaleLeaseError
from service.store.database.lanes import lanes_of, own_lanes
from service.store.database.mapping import WORK_COLUMNS
from service.store.database.schema import events, held_slots, is_held, is_queued, now_ms, work_items
from service.store.models import Lease

_work = work_items.c

_RECHECK_SHARE = 3
"""A renewal moves the indexed time when less than this part of a lease is left of it. Processes renew four times."""

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
    return and_(_work.id == lease.work_id, _work.owner == lease.owner, _work.token == lease.token, is_held)


def _holds(slot: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition that work is, or was last, in a slot: as its own, or beside its own."""
    beside = select(held_slots.c.work_id).where(held_slots.c.slot == slot)
    return or_(_work.slot == slot, _work.id.in_(beside))


RUNNING_HERE = (
    select(_work.id).where(_holds(bindparam("own_slot")), is_held, _work.lease_expires_at > now_ms()).limit(1)
)
"""The work that holds a slot with a valid lease; its parameter is `own_slot`."""

ABANDONED = (
    select(_work.id, _work.state, _work.token, _work.lost_leases, _work.key_id)
    .where(
        is_held,
        or_(
            and_(
                _work.device == bindparam("own_device"),
                or_(_work.hardware.is_(None), _work.hardware == bindparam("own_hardware")),
            ),
            and_(_work.device == ANY_DEVICE, _work.hardware.in_(select(own_lanes("lost_lanes").c.value))),
        ),
        _work.expiry_check_at <= now_ms(),
        _work.lease_expires_at <= now_ms(),
    )
    .order_by(_work.slot != bindparam("own_slot"), _work.priority.desc(), _work.created_at, _work.id)
    .limit(1)
)
"""The first work for a device whose lease has expired: work of its slot, then of others; its parameters are `own_slot`,
`own_device`, `own_hardware` and `own_lanes`."""

MISPLACED = and_(
    is_held,
    _work.slot == bindparam("own_slot"),
    or_(
        and_(_work.device != ANY_DEVICE, _work.hardware != bindparam("own_hardware")),
        and_(_work.device == ANY_DEVICE, _work.hardware.not_in(select(own_lanes("slot_lanes").c.value))),
    ),
    _work.lease_expires_at <= now_ms(),
)
"""The work that holds a slot with an expired lease, and needs other hardware than the slot has now. No worker takes it
over there, and it blocks the slot. The parameters are `own_slot`, `own_hardware` and `own_lanes`."""


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


def slots_with_work(connection: Connection, devices: Sequence[ServedDevice]) -> frozenset[str]:
    """Return the slots of the devices whose workers would find something to claim, in one statement."""
    if not devices:
        return frozenset()
    columns = (column("slot", String), column("device", String), column("hardware", String))
    rows = [(served.slot, served.device.id, served.hardware) for served in devices]
    asked = rows_of(*columns, name="asked").data(rows).cte("asked")
    lane_rows = [(slot, lane) for slot, lanes in lanes_of(connection, devices).items() for lane in lanes]
    lane_columns = (column("slot", String), column("lane", String))
    lanes = rows_of(*lane_columns, name="lanes").data(lane_rows or [("", "")]).cte("lanes")
    is_lane = and_(_work.device == ANY_DEVICE, _work.hardware == lanes.c.lane, lanes.c.slot == asked.c.slot)
    expired = and_(is_held, _work.lease_expires_at <= now_ms())
    is_lost = and_(expired, _work.expiry_check_at <= now_ms())
    has_lane = exists().where(is_lane).correlate(work_items, asked)
    fits = and_(_work.device == asked.c.device, or_(_work.hardware.is_(None), _work.hardware == asked.c.hardware))
    of_slot = _work.slot == asked.c.slot
    is_placed = _work.device != ANY_DEVICE
    is_misplaced = exists().where(
        of_slot,
        expired,
        or_(and_(is_placed, _work.hardware != asked.c.hardware), and_(~is_placed, ~has_lane)),
    )
    is_busy = exists().where(_holds(asked.c.slot), is_held, _work.lease_expires_at > now_ms())
    waiting = (
        exists().where(fits, is_lost),
        exists().where(is_queued, _work.device == asked.c.device, _work.hardware.is_(None)),
        exists().where(is_queued, _work.device == asked.c.device, _work.hardware == asked.c.hardware),
        exists().where(is_lane, or_(is_queued, is_lost)),
    )
    found = connection.execute(select(asked.c.slot).where(or_(is_misplaced, and_(~is_busy, or_(*waiting)))))
    return frozenset(found.scalars())


def change(
    connection: Connection,
    condition: ColumnElement[bool],
    values: dict[str, Any],
    new_events: Sequence[EventToAdd] = (),
) -> RowMapping | None:
    """Update one work item under a condition, and add events; return its row, or None when the condition is not met.

    The update locks the row until the transaction ends, so that events of one item are numbered and become visible in
    order.
    """
    statement = (
        update(work_items)
        .where(condition)
        .values(updated_at=now_ms(), event_count=_work.event_count + len(new_events), **values)
        .returning(*WORK_COLUMNS)
    )
    row = connection.execute(statement).mappings().first()
    if row is not None and new_events:
        _add_events(connection, row, new_events)
    return row


def change_held(
    connection: Connection,
    lease: Lease,
    values: dict[str, Any],
    new_events: Sequence[EventToAdd],
    also: ColumnElement[bool] | None = None,
) -> RowMapping:
    """Update the work item of a valid lease, and return its row.

    Raises:
        StaleLeaseError: when the lease has ended.
        ConflictError: when the lease is valid, but ``also`` is not met.
    """
    row = change(connection, held_by(lease) if also is None else and_(held_by(lease), also), values, new_events)
    if row is not None:
        return row
    state = connection.execute(select(_work.state).where(held_by(lease))).scalar_one_or_none()
    if state is None:
        raise stale_lease_error(lease)
    raise ConflictError(f"{lease.work_id} is {state}, from where it cannot become {values.get('state')}")


def stale_lease_error(lease: Lease) -> StaleLeaseError:
    """Return the error for a report after the end of its lease."""
    name = f"lease {lease.token} of {lease.owner} on {lease.work_id}"
    return StaleLeaseError(f"{name} has ended: it expired, was taken over, or its work ended")


def _add_events(connection: Connection, row: RowMapping, new_events: Sequence[EventToAdd]) -> None:
    first = row["event_count"] - len(new_events) + 1
    connection.execute(
        insert(events),
        [
            {"work_id": row["id"], "id": number, "at": row["updated_at"], "kind": kind.value, "document": text}
            for number, (kind, text) in enumerate(new_events, start=first)
        ],
    )
