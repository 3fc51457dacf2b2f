"""What owners of leases do, each within a transaction of the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, case, func, insert, select, text, update

from service.domain.states import State, sources_of
from service.domain.work import EventKind
from service.domain.workers import ServedDevice
from service.store.database import mapping
from service.store.database.schema import is_held, now_ms, probes, recommendations, work_items
from service.store.database.statements import (
    ABANDONED,
    LEFT_BEHIND,
    RUNNING_HERE,
    change,
    change_held,
    held_by,
    not_taken_from,
    stale,
    state_event,
)
from service.store.models import Claim, Ending, Lease
from service.store.scheduling import NEXT_QUEUED, take_turn
from service.store.work_queries import read_item
from tuner.schemas.results import ProbeResult
from tuner.schemas.training import TrainingProgress

_work = work_items.c

_LONGEST_CODE = 64
_ADVISORY_LOCK = 0x636C6169
"""Any number that nothing else in the database locks: "clai"."""


class Candidate(NamedTuple):
    """Work that may be taken, as it was found."""

    id: str
    state: State
    token: int
    lost_leases: int
    key_id: str | None


def is_wanted(connection: Connection, served: ServedDevice) -> bool:
    """Whether there is something to do for this device: something to take, or to send away from its slot."""
    given = {"slot": served.slot, "hardware": served.hardware}
    if connection.execute(select(_work.id).where(LEFT_BEHIND), given).first() is not None:
        return True
    return _candidate(connection, served) is not None


def claim(connection: Connection, served: ServedDevice, lease_seconds: float) -> Claim | None:
    """Take what is next. Claims wait for one another, or several at a time would find the same submitter's turn."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    _send_away(connection, served)
    while (found := _candidate(connection, served)) is not None:
        if (taken := _take(connection, served, found, lease_seconds)) is not None:
            return taken
    return None


def _candidate(connection: Connection, served: ServedDevice) -> Candidate | None:
    """What the device would take now; none when nothing waits, or when something runs on its slot."""
    here = {"slot": served.slot}
    needed = {"device": served.device.id, "hardware": served.hardware}
    if connection.execute(RUNNING_HERE, here).first() is not None:
        return None
    row = connection.execute(ABANDONED, here | needed).first() or connection.execute(NEXT_QUEUED, needed).first()
    return None if row is None else Candidate(row[0], State(row[1]), *row[2:])


def _send_away(connection: Connection, served: ServedDevice) -> None:
    """What was left on this slot, and needs other hardware than there is now, waits for it in the queue again."""
    given = {"slot": served.slot, "hardware": served.hardware}
    for row in connection.execute(select(_work.id, _work.state).where(LEFT_BEHIND), given).all():
        ended = row.state == State.CANCELLING
        state = State.CANCELLED if ended else State.QUEUED
        values = {
            "state": state,
            "owner": None,
            "slot": None,
            "lease_expires_at": None,
            "claimed_at": None,
            "device_ms": _work.device_ms + _used_by_the_lost(),
            "lost_leases": _work.lost_leases + 1,
            "ended_at": now_ms() if ended else None,
        }
        still = and_(_work.id == row.id, _work.state == row.state, _work.lease_expires_at <= now_ms())
        change(connection, still, values, [state_event(state)])


def _take(connection: Connection, served: ServedDevice, found: Candidate, lease_seconds: float) -> Claim | None:
    """Take what was found; none when it was cancelled, or its owner renewed its lease, meanwhile."""
    was_queued = found.state is State.QUEUED
    state = State.RUNNING if was_queued else found.state
    lost_leases = found.lost_leases + int(not was_queued)
    values = {
        "state": state,
        "owner": served.owner,
        "slot": served.slot,
        "token": found.token + 1,
        "claimed_at": now_ms(),
        "device_ms": _work.device_ms + _used_by_the_lost(),
        "lease_expires_at": now_ms() + milliseconds(lease_seconds),
        "lost_leases": lost_leases,
        "started_at": func.coalesce(_work.started_at, now_ms()),
    }
    unchanged = and_(_work.id == found.id, _work.state == found.state, _work.token == found.token)
    if not was_queued:
        unchanged = and_(unchanged, _work.lease_expires_at <= now_ms())
    if change(connection, unchanged, values, [state_event(state)]) is None:
        return None
    if was_queued:
        take_turn(connection, found.key_id)
    lease = Lease(work_id=found.id, owner=served.owner, token=found.token + 1)
    return Claim(lease, read_item(connection, found.id), lost_leases)


def _used_by_the_lost() -> ColumnElement[int]:
    """Milliseconds that an owner who vanished held its device: to its lease's end, or none when that was cut short."""
    return case((_work.lease_expires_at > _work.claimed_at, _work.lease_expires_at - _work.claimed_at), else_=0)


def renew(connection: Connection, lease: Lease, lease_seconds: float) -> State:
    """Hold the lease longer.

    Raises:
        StaleLeaseError: when it has ended.
    """
    statement = (
        update(work_items)
        .where(held_by(lease))
        .values(lease_expires_at=now_ms() + milliseconds(lease_seconds))
        .returning(_work.state)
    )
    state = connection.execute(statement).scalar_one_or_none()
    if state is None:
        raise stale(lease)
    return State(state)


def record_probe(connection: Connection, lease: Lease, ordinal: int, result: ProbeResult) -> None:
    """Add a probe, and its event. The primary key refuses an ordinal that is there.

    Raises:
        StaleLeaseError: when the lease has ended.
    """
    document = result.model_dump_json()
    event = EventKind.PROBE, f'{{"ordinal":{ordinal},"result":{document}}}'
    row = change_held(connection, lease, {"probe_count": ordinal, "lost_leases": 0}, [event])
    values = {"work_id": lease.work_id, "ordinal": ordinal, "document": document}
    connection.execute(insert(probes).values(**values, recorded_at=row["updated_at"]))


def record_progress(connection: Connection, lease: Lease, progress: Sequence[TrainingProgress]) -> None:
    """Add updates, one event each.

    Raises:
        StaleLeaseError: when the lease has ended.
    """
    documents = [item.model_dump_json() for item in progress]
    known = connection.execute(select(_work.progress).where(held_by(lease)).with_for_update()).first()
    if known is None:
        raise stale(lease)
    if known.progress == documents[-1]:
        return  # the same updates once more: the answer to the first time was lost with its connection
    values = {"progress": documents[-1], "lost_leases": 0}
    change_held(connection, lease, values, [(EventKind.PROGRESS, document) for document in documents])


def finish(connection: Connection, lease: Lease, ending: Ending) -> None:
    """End the work, storing what it left.

    Raises:
        StaleLeaseError: when the lease has ended.
        ConflictError: when its state does not lead to that end.
    """
    values: dict[str, Any] = {
        "state": ending.state,
        "problem": mapping.as_json(ending.problem),
        "problem_code": None if ending.problem is None else ending.problem.code[:_LONGEST_CODE],
        "result": mapping.as_json(ending.result),
        "ended_at": now_ms(),
    }
    if ending.recommendation is not None:
        values["recommendation_id"] = ending.recommendation.id
    may_end = _work.state.in_(sorted(sources_of(ending.state)))
    row = change_held(connection, lease, values | _given_up(), [state_event(ending.state)], may_end)
    if ending.recommendation is not None:
        stored = mapping.recommendation_values(ending.recommendation, lease.work_id, row["model"])
        connection.execute(insert(recommendations).values(**stored))


def hand_back(connection: Connection, lease: Lease) -> None:
    """Back to the queue, or to CANCELLED; after its end, too, as long as no other owner has taken the work.

    Raises:
        StaleLeaseError: when the work was taken over, or has ended.
    """
    ours = not_taken_from(lease)
    for before, after in ((State.RUNNING, State.QUEUED), (State.CANCELLING, State.CANCELLED)):
        values = {"state": after, "ended_at": now_ms() if after.terminal else None} | _given_up()
        if change(connection, and_(ours, _work.state == before), values, [state_event(after)]) is not None:
            return
    raise stale(lease)


def _given_up() -> dict[str, Any]:
    """What an owner leaves behind when it gives up its lease."""
    in_time = now_ms() - func.coalesce(_work.claimed_at, now_ms())
    used = case((_work.lease_expires_at > now_ms(), in_time), else_=_used_by_the_lost())
    return {"owner": None, "lease_expires_at": None, "claimed_at": None, "device_ms": _work.device_ms + used}


def release_slot(connection: Connection, slot: str, owner_prefix: str) -> None:
    """Expire the leases of dead owners of a slot."""
    theirs = _work.owner.startswith(owner_prefix, autoescape=True)
    held = and_(_work.slot == slot, is_held, theirs)
    connection.execute(update(work_items).where(held).values(lease_expires_at=0))


def recorded_already(connection: Connection, lease: Lease, ordinal: int, result: ProbeResult) -> bool:
    """Whether this very result is recorded: it was, if the connection broke after it was committed."""
    mine = and_(probes.c.work_id == lease.work_id, probes.c.ordinal == ordinal)
    document = connection.execute(select(probes.c.document).where(mine)).scalar_one_or_none()
    return document == result.model_dump_json()


def milliseconds(seconds: float) -> int:
    """As they are stored."""
    return int(seconds * 1000)
