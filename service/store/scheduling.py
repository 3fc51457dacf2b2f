"""The order in which queued work is taken: the highest priority, then whose turn it is, then the oldest.

Submitters (API keys; callers without one count as one) take turns: next is the one whose work was started least
recently, on whatever device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, bindparam, func, select, union_all, update

from service.domain.states import WorkKind
from service.store.database.schema import is_queued, now_ms, submitters, work_items
from service.store.models import QueueDepth, Waiting

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


class Queued(NamedTuple):
    """What the order depends on, of one piece of work that waits."""

    id: str
    device: str
    hardware: str | None
    submitter: str
    priority: int
    created_at: int


_LANE = (_work.device, _work.hardware, _work.key_id, _work.priority)
_RANK = func.row_number().over(partition_by=_LANE, order_by=(_work.created_at, _work.id)).label("rank")
_RANKED = select(*_LANE, _work.created_at, _work.id, _RANK).where(is_queued).subquery()
_FIRST_ONES = select(_RANKED).where(_RANKED.c.rank <= bindparam("limit"))
"""The first of each submitter in each lane: the index has all that this needs."""


def waiting(connection: Connection, limit: int) -> list[Waiting]:
    """The first of every device, then the second of every device, and so on: at most ``limit``."""
    found = connection.execute(_FIRST_ONES, {"limit": limit})
    queued = [Queued(it.id, it.device, it.hardware, it.key_id or "", it.priority, it.created_at) for it in found]
    turns = {row.id: row.turn for row in connection.execute(select(submitters))}
    positions = positioned(queued, turns, limit)
    age = (now_ms() - _work.updated_at).label("age_ms")
    columns = (_work.id, _work.kind, _work.device, _work.model, _work.priority, _work.hardware, age)
    rows = connection.execute(select(*columns).where(is_queued, _work.id.in_(positions)))
    told = [
        Waiting(
            id=it.id,
            kind=WorkKind(it.kind),
            device=it.device,
            model=it.model,
            priority=it.priority,
            position=positions[it.id],
            age_seconds=max(0, it.age_ms) / 1000,
            hardware=it.hardware,
        )
        for it in rows
    ]
    return sorted(told, key=lambda it: (it.position, it.device, it.id))


def positioned(queued: Sequence[Queued], turns: Mapping[str, int], limit: int) -> dict[str, int]:
    """Of the first ``limit`` the places, each in the order of the kind of device that takes it first."""
    places: dict[str, int] = {}
    device_of = {it.id: it.device for it in queued}
    for _, group in groupby(sorted(queued, key=_device), key=_device):
        on_device = list(group)
        for kind in {it.hardware for it in on_device} - {None} or {None}:
            lane = [it for it in on_device if it.hardware in {None, kind}]
            for position, it in enumerate(islice(in_turn(lane, turns), limit), start=1):
                places[it.id] = min(position, places.get(it.id, position))
    first_ones = sorted(places, key=lambda it: (places[it], device_of[it], it))[:limit]
    return {it: places[it] for it in first_ones}


def in_turn(queued: Iterable[Queued], turns: Mapping[str, int]) -> Iterator[Queued]:
    """The order in which one device takes these, if no other takes any and nothing comes."""
    turn_of = dict(turns)
    now = max(turn_of.values(), default=0)
    by_urgency = sorted(queued, key=lambda it: (-it.priority, it.created_at, it.id))
    for _, equals in groupby(by_urgency, key=lambda it: it.priority):
        lines: dict[str, deque[Queued]] = {}
        for it in equals:
            lines.setdefault(it.submitter, deque()).append(it)
        while lines:
            who = min(lines, key=lambda it: (turn_of.get(it, 0), lines[it][0].created_at, lines[it][0].id))
            now += 1
            turn_of[who] = now
            yield lines[who].popleft()
            if not lines[who]:
                del lines[who]


def _device(queued: Queued) -> str:
    return queued.device


def depths(connection: Connection) -> list[QueueDepth]:
    """What waits for each device, by the device's id."""
    age = now_ms() - func.min(_work.updated_at)
    statement = select(_work.device, func.count().label("waiting"), age.label("age_ms")).where(is_queued)
    found = connection.execute(statement.group_by(_work.device).order_by(_work.device))
    return [QueueDepth(row.device, row.waiting, max(0.0, row.age_ms / 1000)) for row in found]
