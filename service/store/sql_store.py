"""The store on SQLite and PostgreSQL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Engine, and_, delete, insert
from sqlalchemy.exc import IntegrityError
from typing_extensions import override

from service.domain.states import State, WorkKind
from service.domain.work import Event, RecommendationSummary, RecordedProbe
from service.domain.workers import ServedDevice
from service.errors import ConflictError, NotFoundError
from service.store import leases, recommendation_queries, retention, scheduling, statistics, submissions, work_queries
from service.store.api_keys import SqlKeyStore
from service.store.database import mapping
from service.store.database.engine import insert_or_replace, open_engine, reading, writing
from service.store.database.migrate import upgrade
from service.store.database.schema import health, now_ms, recommendations, work_items, workers
from service.store.database.statements import change, state_event
from service.store.interface import (
    EVERYTHING,
    PROVEN_SECONDS,
    UNLIMITED,
    Claim,
    Ending,
    FirstAnswer,
    FirstTime,
    Idempotency,
    KeyStore,
    Lease,
    NewWork,
    Pruned,
    QueueDepth,
    Quota,
    RecommendationFilter,
    SeenDevice,
    SessionStore,
    Store,
    Totals,
    Waiting,
    WorkFilter,
    WorkItem,
    WorkRow,
)
from service.store.sessions import SqlSessionStore
from tuner.schemas.recommendation import Recommendation
from tuner.schemas.results import ProbeResult
from tuner.schemas.training import TrainingProgress

_work = work_items.c

_FORGOTTEN_SECONDS = 86_400.0
"""A worker that was not heard of for so long is gone for good."""


def open_store(url: str) -> SqlStore:
    """The store at a database URL, its schema brought up to date.

    Raises:
        ConfigurationError: when the URL names no database we can use.
        StoreUnavailableError: when the database cannot be reached.
    """
    engine = open_engine(url)
    try:
        upgrade(engine)
    except BaseException:
        engine.dispose()
        raise
    return SqlStore(engine)


class SqlStore(Store):
    """One engine; a short transaction per call; safe to share between threads."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._keys = SqlKeyStore(engine)
        self._sessions = SqlSessionStore(engine)
        self._listed = mapping.KeptRows()
        self._clock = clock
        self._checking = threading.Lock()
        self._proven_until = 0.0

    @property
    @override
    def keys(self) -> KeyStore:
        return self._keys

    @property
    @override
    def sessions(self) -> SessionStore:
        return self._sessions

    # --- anyone ---

    @override
    def add(self, work: NewWork, quota: Quota = UNLIMITED, first: FirstTime | None = None) -> WorkItem:
        with _refusing_taken(work.id), writing(self._engine) as connection:
            return submissions.add_work(connection, work, {"state": State.QUEUED}, quota, first)

    @override
    def add_answered(self, work: NewWork, recommendation: Recommendation, first: FirstTime | None = None) -> WorkItem:
        ended = {"state": State.SUCCEEDED, "started_at": now_ms(), "ended_at": now_ms()}
        answered = ended | {"recommendation_id": recommendation.id}
        stored = mapping.recommendation_values(recommendation, work.id, work.model)
        with _refusing_taken(work.id), writing(self._engine) as connection:
            item = submissions.add_work(connection, work, answered, UNLIMITED, first)
            connection.execute(insert(recommendations).values(**stored))
            return item

    @override
    def remember(self, idempotency: Idempotency, answer: FirstAnswer) -> None:
        with writing(self._engine) as connection:
            submissions.remember(connection, idempotency, answer)

    @override
    def first_answer(self, owner: str, key: str) -> FirstAnswer | None:
        with reading(self._engine) as connection:
            return submissions.first_answer(connection, owner, key)

    @override
    def delete(self, work_id: str) -> None:
        with writing(self._engine) as connection:
            retention.delete_work(connection, work_id)

    @override
    def prune(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        return retention.prune(self._engine, ended_before_seconds, answers=recommendations)

    @override
    def prunable(self, ended_before_seconds: float, *, recommendations: bool = False) -> Pruned:
        with reading(self._engine) as connection:
            return retention.prunable(connection, ended_before_seconds, answers=recommendations)

    @override
    def queue(self, limit: int) -> list[Waiting]:
        with reading(self._engine) as connection:
            return scheduling.waiting(connection, limit)

    @override
    def queue_depths(self) -> list[QueueDepth]:
        with reading(self._engine) as connection:
            return scheduling.depths(connection)

    @override
    def get(self, work_id: str) -> WorkItem:
        with reading(self._engine) as connection:
            return work_queries.read_item(connection, work_id)

    @override
    def newest(
        self, kind: WorkKind, limit: int, before: str | None = None, wanted: WorkFilter = EVERYTHING
    ) -> list[WorkRow]:
        listing = work_queries.Listing(kind, limit, before, wanted)
        with reading(self._engine) as connection:
            kept = self._listed.find(listing.versions(connection))
            return [self._listed.take(row) for row in listing.rows(connection)] if kept is None else kept

    @override
    def cancel(self, work_id: str) -> WorkItem:
        queued = and_(_work.id == work_id, _work.state == State.QUEUED)
        running = and_(_work.id == work_id, _work.state == State.RUNNING)
        ended = {"state": State.CANCELLED, "ended_at": now_ms()}
        with writing(self._engine) as connection:
            if change(connection, queued, ended, [state_event(State.CANCELLED)]) is None:
                change(connection, running, {"state": State.CANCELLING}, [state_event(State.CANCELLING)])
            return work_queries.read_item(connection, work_id)

    @override
    def resume(self, work_id: str, quota: Quota = UNLIMITED) -> WorkItem:
        with writing(self._engine) as connection:
            return submissions.resume(connection, work_id, quota)

    @override
    def probes(self, work_id: str) -> list[RecordedProbe]:
        with reading(self._engine) as connection:
            return work_queries.read_probes(connection, work_id)

    @override
    def events(self, work_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        with reading(self._engine) as connection:
            return work_queries.read_events(connection, work_id, after, limit)

    @override
    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        with reading(self._engine) as connection:
            return work_queries.event_counts(connection, work_ids)

    @override
    def recommendation(self, recommendation_id: str) -> Recommendation:
        found = self.recommendation_texts([recommendation_id])
        if not found:
            raise NotFoundError.of("recommendation", recommendation_id)
        return Recommendation.model_validate_json(found[recommendation_id])

    @override
    def recommendation_texts(self, recommendation_ids: Sequence[str]) -> dict[str, str]:
        with reading(self._engine) as connection:
            return work_queries.recommendation_texts(connection, recommendation_ids)

    @override
    def tuning_with_answer(self, fingerprint: str) -> str | None:
        with reading(self._engine) as connection:
            return work_queries.tuning_with_answer(connection, fingerprint)

    @override
    def answers_to(self, question: str, limit: int) -> list[Recommendation]:
        with reading(self._engine) as connection:
            return work_queries.answers_to(connection, question, limit)

    @override
    def recommendations(
        self, wanted: RecommendationFilter, limit: int, before: str | None = None
    ) -> list[RecommendationSummary]:
        with reading(self._engine) as connection:
            return recommendation_queries.list_recommendations(connection, wanted, limit, before)

    @override
    def totals(self, seconds: float | None) -> Totals:
        with reading(self._engine) as connection:
            return statistics.totals(connection, seconds)

    @override
    def count_answers(self, hits: int, misses: int) -> None:
        with writing(self._engine) as connection:
            statistics.count_answers(connection, hits, misses)

    # --- owners ---

    @override
    def claim(self, served: ServedDevice, lease_seconds: float) -> Claim | None:
        with reading(self._engine) as connection:  # who finds nothing keeps nobody waiting
            if not leases.is_wanted(connection, served):
                return None
        try:
            with writing(self._engine) as connection:
                return leases.claim(connection, served, lease_seconds)
        except IntegrityError:  # the unique index: another owner has just taken this slot
            return None

    @override
    def renew(self, lease: Lease, lease_seconds: float) -> State:
        with writing(self._engine) as connection:
            return leases.renew(connection, lease, lease_seconds)

    @override
    def record_probe(self, lease: Lease, ordinal: int, result: ProbeResult) -> None:
        try:
            with writing(self._engine) as connection:
                leases.record_probe(connection, lease, ordinal, result)
        except IntegrityError:
            with reading(self._engine) as connection:
                if not leases.recorded_already(connection, lease, ordinal, result):
                    raise ConflictError(f"probe {ordinal} of {lease.work_id!r} is recorded already") from None

    @override
    def record_progress(self, lease: Lease, progress: Sequence[TrainingProgress]) -> None:
        if progress:
            with writing(self._engine) as connection:
                leases.record_progress(connection, lease, progress)

    @override
    def finish(self, lease: Lease, ending: Ending) -> None:
        with writing(self._engine) as connection:
            leases.finish(connection, lease, ending)

    @override
    def hand_back(self, lease: Lease) -> None:
        with writing(self._engine) as connection:
            leases.hand_back(connection, lease)

    @override
    def release_slot(self, slot: str, owner_prefix: str) -> None:
        with writing(self._engine) as connection:
            leases.release_slot(connection, slot, owner_prefix)

    # --- workers and health ---

    @override
    def announce(self, served: ServedDevice) -> None:
        said = {"owner": served.owner, "heartbeat_at": now_ms(), "document": served.model_dump_json()}
        gone = workers.c.heartbeat_at < now_ms() - leases.milliseconds(_FORGOTTEN_SECONDS)
        with writing(self._engine) as connection:
            insert_or_replace(connection, workers, {"slot": served.slot} | said)
            connection.execute(delete(workers).where(gone))

    @override
    def withdraw(self, served: ServedDevice) -> None:
        mine = and_(workers.c.slot == served.slot, workers.c.owner == served.owner)
        with writing(self._engine) as connection:
            connection.execute(delete(workers).where(mine))

    @override
    def devices(self) -> list[SeenDevice]:
        with reading(self._engine) as connection:
            return work_queries.seen_devices(connection)

    @override
    def check(self) -> None:
        with self._checking:
            if self._clock() < self._proven_until:
                return
            with writing(self._engine) as connection:
                insert_or_replace(connection, health, {"id": 1, "checked_at": now_ms()})
            self._proven_until = self._clock() + PROVEN_SECONDS

    @override
    def close(self) -> None:
        self._engine.dispose()


@contextmanager
def _refusing_taken(work_id: str) -> Iterator[None]:
    """A primary key that is taken already is a conflict.

    Raises:
        ConflictError: naming the work.
    """
    try:
        yield
    except IntegrityError:
        raise ConflictError(f"{work_id!r} exists already") from None
