"""Statistics of a period, counted in the database from covering indexes."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    Select,
    case,
    func,
    literal,
    or_,
    select,
    union_all,
)

from batchwright.client.documents.problems import Problem
from batchwright.client.documents.states import State, WorkKind
from batchwright.client.documents.workers import Failures
from batchwright_service.store.database.mapping import moment
from batchwright_service.store.database.schema import (
    held_slots,
    is_failed,
    is_gained,
    is_held,
    is_infeasible,
    now_ms,
    recommendation_hits,
    recommendations,
    work_items,
)
from batchwright_service.store.database.transactions import insert_or_skip, read_transaction, write_transaction

_work = work_items.c
_hits = recommendation_hits.c
_recommendation = recommendations.c
_gain = (_recommendation.model, _recommendation.speedup, _recommendation.speed_source, _recommendation.memory_gain)

_MAX_CAUSES = 20
_SAMPLED_FAILURES = 20
"""Newest failures of each cause whose messages are compared."""
_MAX_MESSAGE_LENGTH = 1000
_MAX_GAINS = 2000
"""Newest recommendations with a baseline that a period counts."""
_MS_PER_HOUR = 3_600_000


@dataclass(frozen=True)
class BusyTime:
    """Time for which work of one kind held a slot within a bucket of ``OccupancyBuckets``."""

    slot: str
    kind: WorkKind
    bucket: int
    """Number of the bucket, from 0."""
    seconds: float


@dataclass(frozen=True)
class OccupancyBuckets:
    """Buckets of equal length up to now, the last of which is not over yet."""

    start: datetime
    """Begin of the first bucket."""
    end: datetime
    """Now, as the database has it."""
    busy: tuple[BusyTime, ...]


@dataclass(frozen=True)
class WorkTotal:
    """The count and the device time of the work of one kind and state that ran last in one slot."""

    kind: WorkKind
    state: State
    slot: str | None
    count: int
    device_seconds: float


@dataclass(frozen=True)
class RecordedGain:
    """The gain of one recommendation over its baseline; None for what is not known."""

    model: str
    speedup: float | None
    speed_source: str | None
    memory_gain: float | None
    """Share of the limit that the plan uses, less that of the baseline."""


@dataclass
class TrendBucket:
    """Figures of the work that ended in one part of a period."""

    start: datetime
    tunings: int = 0
    failures: int = 0
    speedups: list[float] = field(default_factory=list)
    """Known speedups of the recommendations that were made, of the newest ``_MAX_GAINS``."""


@dataclass(frozen=True)
class Totals:
    """Counts of work that ended within a period, and of all work that has not ended."""

    work: tuple[WorkTotal, ...]
    failures: tuple[Failures, ...]
    """The most frequent cause first."""
    hits: int
    """Submitted tunings that a stored recommendation served."""
    misses: int
    """Submitted tunings that were queued, since no recommendation was stored."""
    infeasible: int = 0
    """Tunings that succeeded with the proof that there is no plan."""
    gains: tuple[RecordedGain, ...] = ()
    """Gains of the newest recommendations of the period over their baselines."""


class StatisticsStore:
    """Statistics of work, failures and cache hits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def totals(self, seconds: float | None) -> Totals:
        """Count the work that ended within ``seconds`` (None: ever), to the millisecond, and all that has not ended.

        Hits and misses are stored by the hour: those of the hour in which the period began count too.
        """
        with read_transaction(self._engine) as connection:
            since = 0 if seconds is None else _now(connection) - int(seconds * 1000)
            groups = connection.execute(_failed_since(since)).mappings().all()
            sums = select(func.sum(_hits.hits), func.sum(_hits.misses))
            hits, misses = connection.execute(sums.where(_hits.hour >= since // _MS_PER_HOUR)).one()
            gained = select(*_gain).where(is_gained, _recommendation.created_at > since)
            newest = gained.order_by(_recommendation.created_at.desc()).limit(_MAX_GAINS)
            # Few tunings end without a plan.
            ended = recommendations.join(work_items, _work.recommendation_id == _recommendation.id)
            conditions = (is_infeasible, _work.kind == WorkKind.TUNING, _work.ended_at > since)
            return Totals(
                work=tuple(_work_total(row) for row in connection.execute(_counted(since)).mappings()),
                failures=tuple(_failures(connection, group) for group in groups),
                hits=int(hits or 0),
                misses=int(misses or 0),
                infeasible=connection.execute(select(func.count()).select_from(ended).where(*conditions)).scalar_one(),
                gains=tuple(RecordedGain(*row) for row in connection.execute(newest)),
            )

    def trend(self, buckets: int, bucket_seconds: int) -> list[TrendBucket]:
        """Count what ended in each of the ``buckets`` up to now, which begin at multiples of their length."""
        length = bucket_seconds * 1000
        with read_transaction(self._engine) as connection:
            start = (_now(connection) // length - buckets + 1) * length
            group = (_work.kind, _work.state, (_work.ended_at - start) // length)
            counts = connection.execute(
                select(*group, func.count()).where(_work.ended_at >= start).group_by(*group)
            ).all()
            made = select((_recommendation.created_at - start) // length, _recommendation.speedup)
            made = made.where(is_gained, _recommendation.speedup.is_not(None), _recommendation.created_at >= start)
            gains = connection.execute(made.order_by(_recommendation.created_at.desc()).limit(_MAX_GAINS)).all()
        found = [TrendBucket(moment(start + number * length)) for number in range(buckets)]
        for kind, state, number, count in counts:
            bucket = found[min(number, buckets - 1)]
            bucket.tunings += count if kind == WorkKind.TUNING else 0
            bucket.failures += count if state == State.FAILED else 0
        for number, speedup in gains:
            found[min(number, buckets - 1)].speedups.append(speedup)
        return found

    def occupancy(self, buckets: int, bucket_seconds: int) -> OccupancyBuckets:
        """Sum the time for which recorded work held each slot, in ``buckets`` that begin at multiples of their length.

        Work that has ended counts for its last slot, for the device time of all its claims before its end; work that
        is held counts since its claim, in each of its slots. Slots and buckets without work are left out.
        """
        length = bucket_seconds * 1000
        with read_transaction(self._engine) as connection:
            now = _now(connection)
            start = (now // length - buckets + 1) * length
            rows = connection.execute(_busy(start, now, length)).all()
        busy = tuple(BusyTime(slot, WorkKind(kind), bucket, float(ms) / 1000) for slot, kind, bucket, ms in rows)
        return OccupancyBuckets(moment(start), moment(now), busy)

    def count_hits(self, hits: int, misses: int) -> None:
        """Add to the counts of tunings that a stored recommendation served (hits), and of queued ones (misses)."""
        more = {"hits": _hits.hits + hits, "misses": _hits.misses + misses}
        with write_transaction(self._engine) as connection:
            hour = _now(connection) // _MS_PER_HOUR
            insert_or_skip(connection, recommendation_hits, {"hour": hour, "hits": 0, "misses": 0})
            connection.execute(recommendation_hits.update().where(_hits.hour == hour).values(**more))


def _now(connection: Connection) -> int:
    return connection.execute(select(now_ms())).scalar_one()


def _counted(since: int) -> Select[Any]:
    """Select counts and device time by kind, state and slot, of work that ended after ``since`` or has not ended."""
    group = (_work.kind, _work.state, _work.slot)
    counts = (*group, func.count().label("count"), func.sum(_work.device_ms).label("ms"))
    running = case((_work.claimed_at.is_not(None), now_ms() - _work.claimed_at), else_=0)
    parts = union_all(
        select(*counts).where(or_(_work.ended_at > since, _work.ended_at.is_(None))).group_by(*group),
        select(*group, literal(0), running).where(is_held),
    ).subquery()
    columns = (parts.c.kind, parts.c.state, parts.c.slot)
    sums = (func.sum(parts.c.count).label("count"), func.sum(parts.c.ms).label("ms"))
    return select(*columns, *sums).group_by(*columns)


def _busy(start: int, now: int, length: int) -> Select[Any]:
    """Select the milliseconds of work by slot, kind and bucket: a span of work is cut at the edges of buckets."""
    earliest, latest, step = (literal(value, BigInteger) for value in (start, now, length))

    def bucket(at: ColumnElement[int]) -> ColumnElement[int]:
        return (at - earliest) // step

    def edge(at: ColumnElement[int]) -> ColumnElement[int]:
        return earliest + (bucket(at) + 1) * step

    claimed = _greatest(_work.claimed_at, earliest)
    held = (is_held, _work.claimed_at < latest)
    began = _greatest(_work.ended_at - _work.device_ms, earliest)
    ended = (_work.ended_at > earliest, _work.slot.is_not(None), _work.device_ms > 0)
    beside = held_slots.join(work_items, _work.id == held_slots.c.work_id)
    span = (
        union_all(
            select(_work.slot, _work.kind, began.label("began"), _work.ended_at.label("ended")).where(*ended),
            select(_work.slot, _work.kind, claimed, latest).where(*held, _work.slot.is_not(None)),
            select(held_slots.c.slot, _work.kind, claimed, latest).select_from(beside).where(*held),
        )
        .subquery("spans")
        .c
    )
    whole = select(span.slot, span.kind, span.began, span.ended).cte("pieces", recursive=True)
    rest = select(whole.c.slot, whole.c.kind, edge(whole.c.began), whole.c.ended)
    piece = whole.union_all(rest.where(edge(whole.c.began) < whole.c.ended)).c
    group = (piece.slot, piece.kind, bucket(piece.began).label("bucket"))
    end = edge(piece.began)
    length_of = case((piece.ended < end, piece.ended), else_=end) - piece.began
    return select(*group, func.sum(length_of)).group_by(*group).order_by(*group)


def _greatest(one: ColumnElement[int], other: ColumnElement[int]) -> ColumnElement[int]:
    return case((one > other, one), else_=other)


def _failed_since(since: int) -> Select[Any]:
    group = (_work.kind, _work.problem_code)
    found = select(*group, func.count().label("count")).where(is_failed, _work.ended_at > since).group_by(*group)
    return found.order_by(func.count().desc(), *group).limit(_MAX_CAUSES)


def _failures(connection: Connection, group: RowMapping) -> Failures:
    code = group["problem_code"]
    named = _work.problem_code.is_(None) if code is None else _work.problem_code == code
    same = (is_failed, _work.kind == group["kind"], named)
    newest = select(_work.id, _work.ended_at, _work.problem).where(*same)
    found = connection.execute(newest.order_by(_work.ended_at.desc(), _work.id.desc()).limit(_SAMPLED_FAILURES)).all()
    messages = Counter(problem.detail for problem in Problem.readable(row.problem for row in found if row.problem))
    return Failures(
        kind=WorkKind(group["kind"]),
        code=code or "",
        count=group["count"],
        message=max(messages, key=messages.__getitem__, default="")[:_MAX_MESSAGE_LENGTH],
        newest_id=found[0].id,
        newest_at=moment(found[0].ended_at),
    )


def _work_total(row: RowMapping) -> WorkTotal:
    return WorkTotal(
        kind=WorkKind(row["kind"]),
        state=State(row["state"]),
        slot=row["slot"],
        count=int(row["count"]),
        device_seconds=float(row["ms"]) / 1000,
    )
