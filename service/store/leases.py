"""Leases: claims of queued work, fenced by tokens, renewed, and given up at the end of the work."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Engine, and_, case, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError
from typing_extensions import override

from service.domain.states import State, sources_of
from service.domain.workers import ServedDevice
from service.store.database import mapping
from service.store.database.engine import reading, writing
from service.store.database.schema import is_held, now_ms, recommendations, work_items
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
from service.store.interface import LeaseStore
from service.store.models import Claim, Ending, Lease
from service.store.scheduling import NEXT_QUEUED, take_turn
from service.store.work_queries import read_item

_work = work_items.c

_LONGEST_CODE = 64
_ADVISORY_LOCK = 0x636C6169
"""Any number that nothing else in the database locks: "clai"."""


class Candidate(NamedTuple):
    """Work that may be taken, as it was read."""

    id: str
    state: State
    token: int
    lost_leases: int
    key_id: str | None


class SqlLeaseStore(LeaseStore):
    """Leases on SQLite and PostgreSQL; safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @override
    def claim(self, served: ServedDevice, lease_seconds: float) -> Claim | None:
        with reading(self._engine) as connection:  # a claim that finds nothing takes no writer's lock
            if not _is_wanted(connection, served):
                return None
        try:
            with writing(self._engine) as connection:
                return _claim(connection, served, lease_seconds)
        except IntegrityError:  # the unique index: another owner has just taken this slot
            return None

    @override
    def renew(self, lease: Lease, lease_seconds: float) -> State:
        expires = {"lease_expires_at": now_ms() + _milliseconds(lease_seconds)}
        statement = update(work_items).where(held_by(lease)).values(**expires).returning(_work.state)
        with writing(self._engine) as connection:
            state = connection.execute(statement).scalar_one_or_none()
        if state is None:
            raise stale(lease)
        return State(state)

    @override
    def finish(self, lease: Lease, ending: Ending) -> None:
        given, problem = ending.recommendation, ending.problem
        values: dict[str, Any] = {
            "state": ending.state,
            "problem": mapping.as_json(problem),
            "problem_code": None if problem is None else problem.code[:_LONGEST_CODE],
            "result": mapping.as_json(ending.result),
            "ended_at": now_ms(),
        }
        if given is not None:
            values["recommendation_id"] = given.id
        may_end = _work.state.in_(sorted(sources_of(ending.state)))
        with writing(self._engine) as connection:
            row = change_held(connection, lease, values | _given_up(), [state_event(ending.state)], may_end)
            if given is not None:
                stored = mapping.recommendation_values(given, lease.work_id, row["model"])
                connection.execute(insert(recommendations).values(**stored))

    @override
    def hand_back(self, lease: Lease) -> None:
        ours = not_taken_from(lease)
        with writing(self._engine) as connection:
            for before, after in ((State.RUNNING, State.QUEUED), (State.CANCELLING, State.CANCELLED)):
                values = {"state": after, "ended_at": now_ms() if after.terminal else None} | _given_up()
                if change(connection, and_(ours, _work.state == before), values, [state_event(after)]) is not None:
                    return
            raise stale(lease)

    @override
    def release_slot(self, slot: str, owner_prefix: str) -> None:
        dead = _work.owner.startswith(owner_prefix, autoescape=True)
        held = and_(_work.slot == slot, is_held, dead)
        with writing(self._engine) as connection:
            connection.execute(update(work_items).where(held).values(lease_expires_at=0))


def _is_wanted(connection: Connection, served: ServedDevice) -> bool:
    """Return whether there is something to take for this device, or to send away from its slot."""
    given = {"slot": served.slot, "hardware": served.hardware}
    if connection.execute(select(_work.id).where(LEFT_BEHIND), given).first() is not None:
        return True
    return _candidate(connection, served) is not None


def _claim(connection: Connection, served: ServedDevice, lease_seconds: float) -> Claim | None:
    """Take the next work. Claims are serialised, or several at a time would find the same submitter's turn."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    _send_away(connection, served)
    while (found := _candidate(connection, served)) is not None:
        if (taken := _take(connection, served, found, lease_seconds)) is not None:
            return taken
    return None


def _candidate(connection: Connection, served: ServedDevice) -> Candidate | None:
    """The work that the device would take now; none when nothing waits, or when something runs in its slot."""
    slot = {"slot": served.slot}
    needed = {"device": served.device.id, "hardware": served.hardware}
    if connection.execute(RUNNING_HERE, slot).first() is not None:
        return None
    row = connection.execute(ABANDONED, slot | needed).first() or connection.execute(NEXT_QUEUED, needed).first()
    return None if row is None else Candidate(row[0], State(row[1]), *row[2:])


def _send_away(connection: Connection, served: ServedDevice) -> None:
    """Queue abandoned work of this slot again that needs other hardware than there is now."""
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
            "device_ms": _work.device_ms + _used_by_lost_owner(),
            "lost_leases": _work.lost_leases + 1,
            "ended_at": now_ms() if ended else None,
        }
        still = and_(_work.id == row.id, _work.state == row.state, _work.lease_expires_at <= now_ms())
        change(connection, still, values, [state_event(state)])


def _take(connection: Connection, served: ServedDevice, found: Candidate, lease_seconds: float) -> Claim | None:
    """Take a candidate; none when it was cancelled, or its owner renewed its lease, meanwhile."""
    was_queued = found.state is State.QUEUED
    state = State.RUNNING if was_queued else found.state
    lost_leases = found.lost_leases + int(not was_queued)
    values = {
        "state": state,
        "owner": served.owner,
        "slot": served.slot,
        "token": found.token + 1,
        "claimed_at": now_ms(),
        "device_ms": _work.device_ms + _used_by_lost_owner(),
        "lease_expires_at": now_ms() + _milliseconds(lease_seconds),
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


def _used_by_lost_owner() -> ColumnElement[int]:
    """Milliseconds of device time of a vanished owner: to its lease's end, or none when that was cut short."""
    return case((_work.lease_expires_at > _work.claimed_at, _work.lease_expires_at - _work.claimed_at), else_=0)


def _given_up() -> dict[str, Any]:
    """Values of a row whose owner gives up its lease."""
    in_time = now_ms() - func.coalesce(_work.claimed_at, now_ms())
    used = case((_work.lease_expires_at > now_ms(), in_time), else_=_used_by_lost_owner())
    return {"owner": None, "lease_expires_at": None, "claimed_at": None, "device_ms": _work.device_ms + used}


def _milliseconds(seconds: float) -> int:
    """A duration as it is stored."""
    return int(seconds * 1000)
