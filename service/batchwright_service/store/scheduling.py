"""The order in which queued work is taken: by priority, then fairly among submitters, then by age.

Submitters (API keys; callers without one count as one) take turns: the next is the one whose work was started least
recently, on any device.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

from sqlalchemy import (
    Connection,
    Engine,
    bindparam,
    case,
    func,
    select,
    update,
)

from batchwright.client.documents.states import WorkKind
from batchwright_service.domain.hardware import ANY_DEVICE, need_of_lane
from batchwright_service.store.database.schema import health, is_queued, metadata, now_ms, submitters, work_items
from batchwright_service.store.database.transactions import insert_or_replace, read_transaction, write_transaction

WRITE_CHECK_TTL_SECONDS = 3.0
"""The time for which a successful write proves that the database can be written."""

_work = work_items.c


# --- claims ---


def record_turn(connection: Connection, key_id: str | None) -> None:
    """Record that work of this submitter is started now. Claims are serialised, so that turns are unique."""
    now = select(func.max(submitters.c.turn) + 1).scalar_subquery()
    connection.execute(update(submitters).where(submitters.c.id == (key_id or "")).values(turn=now))


# --- waiting work ---


class Queued(NamedTuple):
    """A waiting piece of work: the columns that determine the order."""

    id: str
    device: str
    hardware: str | None
    submitter: str
    priority: int
    created_at: int


_LANE = (_work.device, _work.hardware, _work.key_id, _work.priority)
_RANK = func.row_number().over(partition_by=_LANE, order_by=(_work.created_at, _work.id)).label("rank")
_RANKED = select(*_LANE, _work.created_at, _work.id, _RANK).where(is_queued).subquery()
_FIRST_PER_LANE = select(_RANKED).where(_RANKED.c.rank <= bindparam("limit"))
"""The first pieces of work of each submitter in each lane; the index covers this query."""
_AGE = (now_ms() - _work.updated_at).label("age_ms")
_WAITING = (
    *(_work.id, _work.kind, _work.device, _work.hardware, _work.name, _work.model, _work.effective_batch_size),
    *(_work.priority, _AGE),
)


@dataclass(frozen=True)
class Waiting:
    """A tuning or job in the queue, and its position in the queue of its device, from 1.

    ``age_seconds`` counts from the time at which it was queued, or handed back to the queue.
    """

    id: str
    kind: WorkKind
    device: str
    model: str
    priority: int
    position: int
    age_seconds: float
    effective_batch_size: int
    hardware: str | None = None
    """The value of ``NewWork.hardware``."""
    name: str | None = None


@dataclass(frozen=True)
class QueueDepth:
    """The work that waits for one device or lane. Ages count from the time at which it was queued, or handed back."""

    device: str
    waiting: int
    oldest_age_seconds: float
    lane: str | None = None
    """The lane of work that needs hardware; none of work for a device."""

    @property
    def name(self) -> str:
        """The device, or the hardware in words."""
        return self.device if self.lane is None else need_of_lane(self.lane).in_words


class QueueStore:
    """The waiting work of all devices."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._checking = threading.Lock()
        self._proven_until = 0.0

    def waiting(self, limit: int) -> list[Waiting]:
        """Return at most ``limit`` waiting pieces of work, by their position in the queue of their device.

        The order of each device assumes that no other device takes work from now on.
        """
        with read_transaction(self._engine) as connection:
            found = connection.execute(_FIRST_PER_LANE, {"limit": limit})
            queued = [
                Queued(row.id, row.device, row.hardware, row.key_id or "", row.priority, row.created_at)
                for row in found
            ]
            turns = {row.id: row.turn for row in connection.execute(select(submitters))}
            positions = positions_of(queued, turns, limit)
            rows = connection.execute(select(*_WAITING).where(is_queued, _work.id.in_(positions)))
            entries = [
                Waiting(
                    id=row.id,
                    kind=WorkKind(row.kind),
                    device=row.device,
                    model=row.model,
                    priority=row.priority,
                    position=positions[row.id],
                    age_seconds=max(0, row.age_ms) / 1000,
                    effective_batch_size=row.effective_batch_size,
                    hardware=row.hardware,
                    name=row.name,
                )
                for row in rows
            ]
        return sorted(entries, key=lambda entry: (entry.position, entry.device, entry.id))

    def depths(self) -> list[QueueDepth]:
        """Return the depth of the queue of each device; devices without waiting work are left out."""
        age = now_ms() - func.min(_work.updated_at)
        lane = case((_work.device == ANY_DEVICE, _work.hardware)).label("lane")
        statement = select(_work.device, lane, func.count().label("waiting"), age.label("age_ms")).where(is_queued)
        with read_transaction(self._engine) as connection:
            found = connection.execute(statement.group_by(_work.device, lane).order_by(_work.device, lane))
            return [QueueDepth(row.device, row.waiting, max(0.0, row.age_ms / 1000), row.lane) for row in found]

    def check(self) -> None:
        """Check that the database can be written; a success is cached for ``WRITE_CHECK_TTL_SECONDS`` per process."""
        with self._checking:
            if self._clock() < self._proven_until:
                return
            with write_transaction(self._engine) as connection:
                insert_or_replace(connection, health, {"id": 1, "checked_at": now_ms()})
                for table in metadata.sorted_tables:  # or work would end nowhere in a table that lacks a column
                    connection.execute(select(table).limit(0))
            self._proven_until = self._clock() + WRITE_CHECK_TTL_SECONDS


def positions_of(queued: Sequence[Queued], turns: Mapping[str, int], limit: int) -> dict[str, int]:
    """Return the first ``limit`` positions, each in the order of the kind of device that takes the work first."""
    positions: dict[str, int] = {}
    device_of = {work.id: work.device for work in queued}
    for _, group in groupby(sorted(queued, key=_device), key=_device):
        on_device = list(group)
        for kind in {work.hardware for work in on_device} - {None} or {None}:
            lane = [work for work in on_device if work.hardware in {None, kind}]
            for position, work in enumerate(islice(fair_order(lane, turns), limit), start=1):
                positions[work.id] = min(position, positions.get(work.id, position))
    chosen = sorted(positions, key=lambda work_id: (positions[work_id], device_of[work_id], work_id))[:limit]
    return {work_id: positions[work_id] for work_id in chosen}


def fair_order(queued: Iterable[Queued], turns: Mapping[str, int]) -> Iterator[Queued]:
    """Yield work in the order in which one device takes it, if no other device takes work and none is added."""
    turn_of = dict(turns)
    now = max(turn_of.values(), default=0)
    by_urgency = sorted(queued, key=lambda work: (-work.priority, work.created_at, work.id))
    for _, equals in groupby(by_urgency, key=lambda work: work.priority):
        lines: dict[str, deque[Queued]] = {}
        for work in equals:
            lines.setdefault(work.submitter, deque()).append(work)
        while lines:
            key = min(lines, key=lambda key: (turn_of.get(key, 0), lines[key][0].created_at, lines[key][0].id))
            now += 1
            turn_of[key] = now
            yield lines[key].popleft()
            if not lines[key]:
                del lines[key]


def _device(queued: Queued) -> str:
    return queued.device
