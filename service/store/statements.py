"""The statements whose conditions carry the store's promises, apart from the code that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, case, insert, or_, select, update

from service.domain import EventKind
from service.fleet import ServedDevice
from service.states import State
from service.store.base import Lease
from service.store.rows import SLIM_WORK
from service.store.tables import events, held_states, now_ms, recommendations, work_items

_work = work_items.c

EventToAdd = tuple[EventKind, str]
"""Kind and JSON of an event."""


def state_event(state: State) -> EventToAdd:
    """The event that tells of a new state."""
    return EventKind.STATE, f'"{state.value}"'


def held_by(lease: Lease) -> ColumnElement[bool]:
    """That the lease still holds: same owner, same fencing token, not expired, not ended."""
    return and_(
        _work.id == lease.work_id,
        _work.owner == lease.owner,
        _work.token == lease.token,
        _work.state.in_(held_states),
        _work.lease_expires_at > now_ms(),
    )


def _is_abandoned() -> ColumnElement[bool]:
    return and_(_work.state.in_(held_states), _work.lease_expires_at <= now_ms())


def running_at(place: str) -> Select[tuple[str]]:
    """What holds a place with a lease that is good."""
    live = and_(_work.state.in_(held_states), _work.lease_expires_at > now_ms())
    return select(_work.id).where(_work.place == place, live)


def next_candidate(served: ServedDevice) -> Select[Any]:
    """The work to claim, locked: what was abandoned here, what was abandoned elsewhere, then the queue in its order."""
    turn = case(
        (and_(_work.state != State.QUEUED, _work.place == served.place), 0), (_work.state != State.QUEUED, 1), else_=2
    )
    return (
        select(_work.id, _work.state, _work.token, _work.lost_leases)
        .where(_work.device == served.device.id, or_(_work.state == State.QUEUED, _is_abandoned()))
        .order_by(turn, _work.priority.desc(), _work.created_at, _work.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


def newest_answers(column: ColumnElement[Any], condition: ColumnElement[bool], limit: int) -> Select[Any]:
    """One column of recommendations whose tunings are still there, newest first."""
    return (
        select(column)
        .join(work_items, _work.id == recommendations.c.tuning_id)
        .where(condition)
        .order_by(recommendations.c.id.desc())
        .limit(limit)
    )


def change(
    connection: Connection,
    condition: ColumnElement[bool],
    values: dict[str, Any],
    new_events: Sequence[EventToAdd] = (),
) -> RowMapping | None:
    """One conditional update of one work item, with the events that tell of it; none when the condition is not met.

    The update holds the row until the transaction ends, so events of one item get their numbers one after another and
    become visible in that order.
    """
    statement = (
        update(work_items)
        .where(condition)
        .values(updated_at=now_ms(), event_count=_work.event_count + len(new_events), **values)
        .returning(*SLIM_WORK)
    )
    row = connection.execute(statement).mappings().first()
    if row is not None and new_events:
        _add_events(connection, row, new_events)
    return row


def _add_events(connection: Connection, row: RowMapping, new_events: Sequence[EventToAdd]) -> None:
    first = row["event_count"] - len(new_events) + 1
    connection.execute(
        insert(events),
        [
            {"work_id": row["id"], "id": first + place, "at": row["updated_at"], "kind": kind.value, "document": text}
            for place, (kind, text) in enumerate(new_events)
        ],
    )
