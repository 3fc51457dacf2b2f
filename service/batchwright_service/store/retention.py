"""Deletion of one piece of work, or of all that ended long ago. Probes and events are deleted with their work."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Engine, and_, delete, exists, func, insert, not_, or_, select

from batchwright.client.documents.audit import AuditAction
from batchwright.client.documents.states import TERMINAL_STATES, State, WorkKind
from batchwright_service.domain.callers import COMMAND_LINE, Caller
from batchwright_service.errors import NotEndedError
from batchwright_service.store.database.audit_log import record, record_each
from batchwright_service.store.database.schema import now_once, recommendations, used_time, work_items
from batchwright_service.store.database.statements import locking
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.work_queries import work_not_found

_work = work_items.c
_recommendation = recommendations.c
_used = used_time.c

_BATCH_SIZE = 200
"""Pieces of work, or recommendations, that one transaction deletes, so that other writers wait for milliseconds."""

_ended = _work.state.in_(sorted(TERMINAL_STATES))


@dataclass(frozen=True)
class Pruned:
    """Counts of deleted work and recommendations."""

    tunings: int
    jobs: int
    recommendations: int
    job_ids: tuple[str, ...]
    """The deleted jobs, whose folders can be deleted too."""


class RetentionStore:
    """Deletion of work that has ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def delete(self, work_id: str, caller: Caller = COMMAND_LINE) -> None:
        """Delete work that has ended, with its probes and events. Its recommendation stays.

        Its device time still counts towards the quota of its key.

        Raises:
            NotFoundError: when there is none.
            NotEndedError: when it has not ended.
        """
        found = self.delete_all([work_id], caller)
        if work_id not in found:
            raise work_not_found(work_id)
        if (state := found[work_id]) is not None:
            raise NotEndedError.of(work_id, state)

    def delete_all(self, work_ids: Collection[str], caller: Caller = COMMAND_LINE) -> dict[str, State | None]:
        """Delete each that has ended as ``delete`` does, all in one transaction.

        Returns the states of those that have not ended, and None for those that were deleted; unknown ids are left out.
        """
        named = _work.id.in_(work_ids)
        ended = and_(named, _ended)
        counts = and_(ended, _work.key_id.is_not(None), _work.device_ms > 0)
        used = select(_work.id, _work.key_id, _work.ended_at, _work.device_ms).where(counts)
        with write_transaction(self._engine) as connection:
            connection.execute(locking(ended))
            connection.execute(insert(used_time).from_select(["work_id", "key_id", "ended_at", "device_ms"], used))
            gone = connection.execute(delete(work_items).where(ended).returning(_work.id)).scalars().all()
            record_each(connection, AuditAction.DELETED, caller, gone)
            left = connection.execute(select(_work.id, _work.state).where(named)).all()
        return {**dict.fromkeys(gone), **{row.id: State(row.state) for row in left}}

    def prune(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        """Delete work that ended longer ago than ``ended_before_seconds``, in short transactions.

        With ``recommendations``, recommendations of that age that no remaining work references are deleted too, and
        so are records of device time of that age.
        """
        deleted = list(_prune_work(self._engine, ended_before_seconds))
        with write_transaction(self._engine) as connection:
            connection.execute(delete(used_time).where(_used.ended_at <= _time(ended_before_seconds)))
        gone = sum(_prune_recommendations(self._engine, ended_before_seconds)) if recommendations else 0
        return _pruned(deleted, gone)

    def prunable(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        """Return the result that ``prune`` would have now."""
        old = _is_old(ended_before_seconds)
        unreferenced = _unreferenced(ended_before_seconds, not_(old))
        with read_transaction(self._engine) as connection:
            found = connection.execute(select(_work.id, _work.kind).where(old).order_by(_work.id)).all()
            gone = connection.execute(select(func.count(_recommendation.id)).where(unreferenced)).scalar_one()
        return _pruned([(row.id, row.kind) for row in found], gone if recommendations else 0)


def _prune_work(engine: Engine, seconds: float) -> Iterator[tuple[str, str]]:
    oldest = select(_work.id).where(_is_old(seconds)).order_by(_work.ended_at).limit(_BATCH_SIZE)
    batch = _work.id.in_(oldest.with_for_update(skip_locked=True))
    while True:
        with write_transaction(engine) as connection:
            gone = connection.execute(delete(work_items).where(batch).returning(_work.id, _work.kind)).all()
            if gone:
                jobs = sum(row.kind == WorkKind.JOB for row in gone)
                record(connection, AuditAction.PRUNED, COMMAND_LINE, detail=f"{len(gone) - jobs} tunings, {jobs} jobs")
        if not gone:
            return
        yield from ((row.id, row.kind) for row in gone)


def _prune_recommendations(engine: Engine, seconds: float) -> Iterator[int]:
    """Delete recommendations in the order of their ids; those that work still references are skipped."""
    last = ""
    while True:
        with read_transaction(engine) as connection:
            next_ones = select(_recommendation.id).where(_recommendation.id > last, _unreferenced(seconds))
            found = connection.execute(next_ones.order_by(_recommendation.id).limit(_BATCH_SIZE)).scalars().all()
        if not found:
            return
        with write_transaction(engine) as connection:
            # Checked anew: a tuning may have been queued since the read that one of them is to warm-start.
            still = delete(recommendations).where(_recommendation.id.in_(found), _unreferenced(seconds))
            count = connection.execute(still).rowcount
            if count:
                record(connection, AuditAction.PRUNED, COMMAND_LINE, detail=f"{count} recommendations")
        yield count
        last = found[-1]


def _pruned(work: list[tuple[str, Any]], gone: int) -> Pruned:
    jobs = tuple(sorted(work_id for work_id, kind in work if kind == WorkKind.JOB))
    return Pruned(tunings=len(work) - len(jobs), jobs=len(jobs), recommendations=gone, job_ids=jobs)


def _is_old(seconds: float) -> ColumnElement[bool]:
    return and_(_ended, _work.ended_at <= _time(seconds))


def _unreferenced(seconds: float, *remaining: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a recommendation is old, and that no work (or no ``remaining`` work) references it."""
    names = [exists().where(column == _recommendation.id, *remaining) for column in _REFERENCES]
    return and_(_recommendation.created_at <= _time(seconds), not_(or_(*names)))


_REFERENCES = (_work.recommendation_id, _work.warm_start_from)


def _time(seconds: float) -> ColumnElement[int]:
    return now_once() - int(seconds * 1000)
