"""The order in which queued work is taken: the highest priority, then whose turn it is, then the oldest.

Submitters (API keys; callers without one count as one) take turns: next is the one whose work was started least
recently, on whatever device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, select, union_all, update

from service.states import WorkKind
from service.store.records import QueueDepth, Waiting
from service.store.tables import is_queued, now_ms, submitters, work_items

_work = work_items.c


# --- claims ---


def _next_queued() -> Select[Any]:
    """One look into an index for each submitter and kind of lane, however much waits."""
    heads = union_all(*(_heads(any_hardware=either, keyed=keyed) for either in (0, 1) for keyed in (0, 1))).subquery()
    return (
        select(_work.id, _work.state, _work.token, _work.lost_leases, _work.key_id)
        .join(heads, heads.c.id == _work.id)
        .order_by(_work.priority.desc(), heads.c.turn, _work.created_at, _work.id)
        .limit(1)
    )


def _heads(*, any_hardware: int, keyed: int) -> Select[Any]:
    """What each submitter has first for one kind of device, and when it last had its turn.

    The order names every column of the index: PostgreSQL does not know that a column that is null is constant.
    """
    mine = work_items.alias("mine").c
    order = (mine.device, mine.hardware, mine.key_id, mine.priority.desc(), mine.created_at, mine.id)
    first = (
        select(mine.id)
        .where(
            is_queued,
            mine.device == bindparam("device"),
            mine.hardware.is_(None) if any_hardware else mine.hardware == bindparam("hardware"),
            mine.key_id == submitters.c.id if keyed else mine.key_id.is_(None),
        )
        .order_by(*order)
        .limit(1)
        .correlate(submitters)
        .scalar_subquery()
    )
    who = submitters.c.id != "" if keyed else submitters.c.id == ""
    return select(submitters.c.turn, first.label("id")).where(who)


NEXT_QUEUED = _next_queued()
"""What a device takes next from the queue; its parameters are `device` and `hardware`. Making it costs more than
running it, so it is made once."""


def take_turn(connection: Connection, key_id: str | None) -> None:
    """Note that work of this submitter is started now. Claims come one at a time, so that no two have one number."""
    now = select(func.max(submitters.c.turn) + 1).scalar_subquery()
    connection.execute(update(submitters).where(submitters.c.id == (key_id or "")).values(turn=now))


# --- what waits ---


@dataclass(frozen=True)
class Queued:
    """What the order depends on, of one piece of work that waits."""

    shown: Waiting
    hardware: str | None
    submitter: str
    created_at: int


def waiting(connection: Connection, limit: int) -> list[Waiting]:
    """The first of every device, then the second of every device, and so on: at most ``limit``."""
    lane = (_work.device, _work.hardware, _work.key_id, _work.priority)
    rank = func.row_number().over(partition_by=lane, order_by=(_work.created_at, _work.id)).label("rank")
    ranked = select(_work.id, rank).where(is_queued).subquery()  # needs nothing but the index
    columns = (
        *lane,
        _work.id,
        _work.kind,
        _work.model,
        _work.created_at,
        (now_ms() - _work.updated_at).label("age_ms"),
    )
    first_ones = select(*columns).join(ranked, ranked.c.id == _work.id).where(ranked.c.rank <= limit)
    found = connection.execute(first_ones)
    queued = [
        Queued(
            Waiting(row.id, WorkKind(row.kind), row.device, row.model, row.priority, 0, max(0.0, row.age_ms / 1000)),
            row.hardware,
            row.key_id or "",
            row.created_at,
        )
        for row in found
    ]
    turns = {row.id: row.turn for row in connection.execute(select(submitters))}
    return positioned(queued, turns, limit)


def positioned(queued: Iterable[Queued], turns: Mapping[str, int], limit: int) -> list[Waiting]:
    """The first ``limit``, each with its place in the order of the device that takes it first."""
    places: dict[str, Waiting] = {}
    for _, group in groupby(sorted(queued, key=_device), key=_device):
        on_device = list(group)
        for kind in {it.hardware for it in on_device} - {None} or {None}:
            lane = [it for it in on_device if it.hardware in {None, kind}]
            for position, it in enumerate(islice(in_turn(lane, turns), limit), start=1):
                known = places.get(it.shown.id)
                if known is None or position < known.position:
                    places[it.shown.id] = replace(it.shown, position=position)
    return sorted(places.values(), key=lambda it: (it.position, it.device, it.id))[:limit]


def in_turn(queued: Iterable[Queued], turns: Mapping[str, int]) -> Iterator[Queued]:
    """The order in which one device takes these, if no other takes any and nothing comes."""
    turn_of = dict(turns)
    now = max(turn_of.values(), default=0)
    by_urgency = sorted(queued, key=lambda it: (-it.shown.priority, it.created_at, it.shown.id))
    for _, equals in groupby(by_urgency, key=lambda it: it.shown.priority):
        lines: dict[str, deque[Queued]] = {}
        for it in equals:
            lines.setdefault(it.submitter, deque()).append(it)
        while lines:
            who = min(lines, key=lambda it: (turn_of.get(it, 0), lines[it][0].created_at, lines[it][0].shown.id))
            now += 1
            turn_of[who] = now
            yield lines[who].popleft()
            if not lines[who]:
                del lines[who]


def _device(queued: Queued) -> str:
    return queued.shown.device


def depths(connection: Connection) -> list[QueueDepth]:
    """What waits for each device, by the device's id."""
    age = now_ms() - func.min(_work.updated_at)
    statement = select(_work.device, func.count().label("waiting"), age.label("age_ms")).where(is_queued)
    found = connection.execute(statement.group_by(_work.device).order_by(_work.device))
    return [QueueDepth(row.device, row.waiting, max(0.0, row.age_ms / 1000)) for row in found]
