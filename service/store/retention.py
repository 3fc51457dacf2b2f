"""How work goes: one piece at its owner's wish, or all that ended long ago. Probes and events go with their work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, and_, delete, exists, func, insert, not_, or_, select

from service.domain.states import TERMINAL_STATES, WorkKind
from service.errors import NotEndedError
from service.store.database.engine import reading, writing
from service.store.database.schema import now_ms, recommendations, used_time, work_items
from service.store.models import Pruned
from service.store.work_queries import no_work

_work = work_items.c
_answer = recommendations.c
_used = used_time.c

_AT_ONCE = 200
"""Pieces of work, or answers, that one transaction deletes: others that write wait for milliseconds."""

_ended = _work.state.in_(sorted(TERMINAL_STATES))


def delete_work(connection: Connection, work_id: str) -> None:
    """Delete work that has ended, keeping what it used of devices.

    Raises:
        NotFoundError: when there is none.
        NotEndedError: when it has not ended.
    """
    mine = and_(_work.id == work_id, _ended)
    counts = and_(mine, _work.key_id.is_not(None), _work.device_ms > 0)
    used = select(_work.id, _work.key_id, _work.ended_at, _work.device_ms).where(counts)
    connection.execute(insert(used_time).from_select(["work_id", "key_id", "ended_at", "device_ms"], used))
    if connection.execute(delete(work_items).where(mine)).rowcount:
        return
    state = connection.execute(select(_work.state).where(_work.id == work_id)).scalar_one_or_none()
    if state is None:
        raise no_work(work_id)
    raise NotEndedError(f"{work_id!r} is {state}: cancel it first, and delete it when it has ended")


def prune(engine: Engine, seconds: float, *, answers: bool) -> Pruned:
    """Delete what is older than that, a part at a time; everyone else goes on meanwhile."""
    deleted = list(_prune_work(engine, seconds))
    with writing(engine) as connection:
        connection.execute(delete(used_time).where(_used.ended_at <= _time(seconds)))
    gone = sum(_prune_answers(engine, seconds)) if answers else 0
    return _pruned(deleted, gone)


def prunable(connection: Connection, seconds: float, *, answers: bool) -> Pruned:
    """What ``prune`` would delete."""
    old = _is_old(seconds)
    found = connection.execute(select(_work.id, _work.kind).where(old).order_by(_work.id))
    unnamed = _unnamed(seconds, not_(old))
    gone = connection.execute(select(func.count()).select_from(recommendations).where(unnamed)).scalar_one()
    return _pruned([(row.id, row.kind) for row in found], gone if answers else 0)


def _prune_work(engine: Engine, seconds: float) -> Iterator[tuple[str, str]]:
    oldest = select(_work.id).where(_is_old(seconds)).order_by(_work.ended_at).limit(_AT_ONCE)
    batch = _work.id.in_(oldest.with_for_update(skip_locked=True))
    while True:
        with writing(engine) as connection:
            gone = connection.execute(delete(work_items).where(batch).returning(_work.id, _work.kind)).all()
        if not gone:
            return
        yield from ((row.id, row.kind) for row in gone)


def _prune_answers(engine: Engine, seconds: float) -> Iterator[int]:
    """Delete answers in the order of their ids: those that work still names are passed over once."""
    last = ""
    while True:
        with reading(engine) as connection:
            next_ones = select(_answer.id).where(_answer.id > last, _unnamed(seconds))
            found = connection.execute(next_ones.order_by(_answer.id).limit(_AT_ONCE)).scalars().all()
        if not found:
            return
        with writing(engine) as connection:
            still = delete(recommendations).where(_answer.id.in_(found), _unnamed(seconds))
            yield connection.execute(still).rowcount
        last = found[-1]


def _pruned(work: list[tuple[str, Any]], answers: int) -> Pruned:
    jobs = tuple(sorted(work_id for work_id, kind in work if kind == WorkKind.JOB))
    return Pruned(tunings=len(work) - len(jobs), jobs=len(jobs), recommendations=answers, job_ids=jobs)


def _is_old(seconds: float) -> ColumnElement[bool]:
    return and_(_ended, _work.ended_at <= _time(seconds))


def _unnamed(seconds: float, *remaining: ColumnElement[bool]) -> ColumnElement[bool]:
    """That an answer is as old, and that no work names it; of all work, or of what remains."""
    names = [exists().where(column == _answer.id, *remaining) for column in _naming]
    return and_(_answer.created_at <= _time(seconds), not_(or_(*names)))


_naming = (_work.recommendation_id, _work.warm_start_from)


def _time(seconds: float) -> ColumnElement[int]:
    return now_ms() - int(seconds * 1000)
