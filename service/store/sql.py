"""The store on SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, and_, case, delete, func, insert, select, true, update
from sqlalchemy.exc import IntegrityError
from typing_extensions import override

from service.domain import Event, EventKind, RecommendationSummary, RecordedProbe
from service.errors import ConflictError, NotFoundError, StaleLeaseError
from service.fleet import ServedDevice
from service.states import State, WorkKind, sources_of
from service.store import rows
from service.store.base import (
    UNLIMITED,
    Claim,
    Ending,
    KeyStore,
    Lease,
    NewWork,
    Quota,
    RecommendationFilter,
    SeenDevice,
    Store,
    WorkItem,
    WorkRow,
)
from service.store.engine import open_engine, reading, writing
from service.store.keys import SqlKeyStore, check_quota
from service.store.migrate import upgrade
from service.store.statements import change, held_by, newest_answers, next_candidate, running_at, state_event
from service.store.tables import (
    events,
    health,
    held_states,
    now_ms,
    probes,
    recommendations,
    work_items,
    workers,
)
from tuner.results import ProbeResult, Recommendation
from tuner.training.runs import TrainingProgress

_work = work_items.c


def open_store(url: str) -> SqlStore:
    """The store at a database URL, its schema brought up to date.

    Raises:
        ConfigurationError: when the URL names no database we can use.
        StoreUnavailableError: when the database cannot be reached.
    """
    engine = open_engine(url)
    upgrade(engine)
    return SqlStore(engine)


class SqlStore(Store):
    """One engine; a short transaction per call; safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._keys = SqlKeyStore(engine)

    @property
    @override
    def keys(self) -> KeyStore:
        return self._keys

    # --- anyone ---

    @override
    def add(self, work: NewWork, quota: Quota = UNLIMITED) -> WorkItem:
        return self._insert(work, {"state": State.QUEUED}, quota=quota)

    @override
    def add_answered(self, work: NewWork, recommendation: Recommendation) -> WorkItem:
        ended = {"state": State.SUCCEEDED, "started_at": now_ms(), "ended_at": now_ms()}
        return self._insert(work, ended | {"recommendation_id": recommendation.id}, recommendation)

    @override
    def get(self, work_id: str) -> WorkItem:
        with reading(self._engine) as connection:
            return _read_item(connection, work_id)

    @override
    def newest(self, kind: WorkKind, limit: int, before: str | None = None) -> list[WorkRow]:
        older = true() if before is None else _work.id < before
        statement = select(*rows.SLIM_WORK).where(_work.kind == kind, older).order_by(_work.id.desc()).limit(limit)
        with reading(self._engine) as connection:
            return [rows.work_row(row) for row in connection.execute(statement).mappings()]

    @override
    def cancel(self, work_id: str) -> WorkItem:
        with writing(self._engine) as connection:
            if not _end_queued(connection, work_id):
                running = and_(_work.id == work_id, _work.state == State.RUNNING)
                change(connection, running, {"state": State.CANCELLING}, [state_event(State.CANCELLING)])
            return _read_item(connection, work_id)

    @override
    def probes(self, work_id: str) -> list[RecordedProbe]:
        statement = select(probes).where(probes.c.work_id == work_id).order_by(probes.c.ordinal)
        with reading(self._engine) as connection:
            return [rows.recorded_probe(row) for row in connection.execute(statement).mappings()]

    @override
    def events(self, work_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        newer = and_(events.c.work_id == work_id, events.c.id > after)
        with reading(self._engine) as connection:
            found = connection.execute(select(events).where(newer).order_by(events.c.id).limit(limit))
            return [rows.event(row) for row in found.mappings()]

    @override
    def event_counts(self, work_ids: Sequence[str]) -> dict[str, int]:
        with reading(self._engine) as connection:
            found = connection.execute(select(_work.id, _work.event_count).where(_work.id.in_(work_ids)))
            return {row.id: row.event_count for row in found}

    @override
    def recommendation(self, recommendation_id: str) -> Recommendation:
        statement = select(recommendations.c.document).where(recommendations.c.id == recommendation_id)
        with reading(self._engine) as connection:
            document = connection.execute(statement).scalar_one_or_none()
        if document is None:
            raise NotFoundError(f"there is no recommendation {recommendation_id!r}")
        return Recommendation.model_validate_json(document)

    @override
    def tuning_with_answer(self, fingerprint: str) -> str | None:
        statement = newest_answers(recommendations.c.tuning_id, recommendations.c.fingerprint == fingerprint, 1)
        with reading(self._engine) as connection:
            return connection.execute(statement).scalar_one_or_none()

    @override
    def answers_to(self, question: str, limit: int) -> list[Recommendation]:
        asked = and_(_work.question == question, recommendations.c.feasible)
        statement = newest_answers(recommendations.c.document, asked, limit)
        with reading(self._engine) as connection:
            return [Recommendation.model_validate_json(it) for it in connection.execute(statement).scalars()]

    @override
    def recommendations(
        self, wanted: RecommendationFilter, limit: int, before: str | None = None
    ) -> list[RecommendationSummary]:
        older = true() if before is None else recommendations.c.id < before
        statement = (
            select(*rows.SLIM_RECOMMENDATION)
            .where(older, *_conditions(wanted))
            .order_by(recommendations.c.id.desc())
            .limit(limit)
        )
        with reading(self._engine) as connection:
            return [rows.recommendation_summary(row) for row in connection.execute(statement).mappings()]

    def _insert(
        self,
        work: NewWork,
        values: dict[str, Any],
        answer: Recommendation | None = None,
        quota: Quota = UNLIMITED,
    ) -> WorkItem:
        given = {name: getattr(work, name) for name in NewWork.__dataclass_fields__}
        times = {"created_at": now_ms(), "updated_at": now_ms()}
        try:
            with writing(self._engine) as connection:
                check_quota(connection, work.key_id, quota)
                connection.execute(insert(work_items).values(**(given | times | values)))
                change(connection, _work.id == work.id, {}, [state_event(values["state"])])
                if answer is not None:
                    stored = rows.recommendation_values(answer, work.id, work.model)
                    connection.execute(insert(recommendations).values(**stored))
                return _read_item(connection, work.id)
        except IntegrityError:
            raise ConflictError(f"{work.id!r} exists already") from None

    # --- owners ---

    @override
    def claim(self, served: ServedDevice, lease_seconds: float) -> Claim | None:
        try:
            with writing(self._engine) as connection:
                return _claim(connection, served, lease_seconds)
        except IntegrityError:  # the unique index: another owner has just taken this place
            return None

    @override
    def renew(self, lease: Lease, lease_seconds: float) -> State:
        with writing(self._engine) as connection:
            statement = (
                update(work_items)
                .where(held_by(lease))
                .values(lease_expires_at=now_ms() + _milliseconds(lease_seconds))
                .returning(_work.state)
            )
            state = connection.execute(statement).scalar_one_or_none()
        if state is None:
            raise _stale(lease)
        return State(state)

    @override
    def record_probe(self, lease: Lease, ordinal: int, result: ProbeResult) -> None:
        document = result.model_dump_json()
        event = EventKind.PROBE, f'{{"ordinal":{ordinal},"result":{document}}}'
        try:
            with writing(self._engine) as connection:
                row = _change_held(connection, lease, {"probe_count": ordinal, "lost_leases": 0}, [event])
                values = {"work_id": lease.work_id, "ordinal": ordinal, "document": document}
                connection.execute(insert(probes).values(**values, recorded_at=row["updated_at"]))
        except IntegrityError:
            raise ConflictError(f"probe {ordinal} of {lease.work_id!r} is recorded already") from None

    @override
    def record_progress(self, lease: Lease, progress: Sequence[TrainingProgress]) -> None:
        if not progress:
            return
        documents = [item.model_dump_json() for item in progress]
        values = {"progress": documents[-1], "lost_leases": 0}
        with writing(self._engine) as connection:
            _change_held(connection, lease, values, [(EventKind.PROGRESS, document) for document in documents])

    @override
    def finish(self, lease: Lease, ending: Ending) -> None:
        values: dict[str, Any] = {
            "state": ending.state,
            "problem": rows.as_json(ending.problem),
            "result": rows.as_json(ending.result),
        }
        if ending.recommendation is not None:
            values["recommendation_id"] = ending.recommendation.id
        with writing(self._engine) as connection:
            row = _change_held(
                connection,
                lease,
                values | _given_up() | {"ended_at": now_ms()},
                [state_event(ending.state)],
                _work.state.in_(sorted(sources_of(ending.state))),
            )
            if ending.recommendation is not None:
                stored = rows.recommendation_values(ending.recommendation, lease.work_id, row["model"])
                connection.execute(insert(recommendations).values(**stored))

    @override
    def hand_back(self, lease: Lease) -> None:
        with writing(self._engine) as connection:
            running = and_(held_by(lease), _work.state == State.RUNNING)
            values = {"state": State.QUEUED} | _given_up()
            if change(connection, running, values, [state_event(State.QUEUED)]) is None:
                ended = {"state": State.CANCELLED, "ended_at": now_ms()} | _given_up()
                _change_held(connection, lease, ended, [state_event(State.CANCELLED)])

    @override
    def release_place(self, place: str, owner_prefix: str) -> None:
        with writing(self._engine) as connection:
            theirs = _work.owner.startswith(owner_prefix, autoescape=True)
            held = and_(_work.place == place, _work.state.in_(held_states), theirs)
            connection.execute(update(work_items).where(held).values(lease_expires_at=0))

    # --- workers and health ---

    @override
    def announce(self, served: ServedDevice) -> None:
        values = {"owner": served.owner, "heartbeat_at": now_ms(), "document": served.model_dump_json()}
        with writing(self._engine) as connection:
            known = connection.execute(update(workers).where(workers.c.place == served.place).values(**values))
            if known.rowcount == 0:
                connection.execute(insert(workers).values(place=served.place, **values))

    @override
    def withdraw(self, served: ServedDevice) -> None:
        with writing(self._engine) as connection:
            mine = and_(workers.c.place == served.place, workers.c.owner == served.owner)
            connection.execute(delete(workers).where(mine))

    @override
    def devices(self) -> list[SeenDevice]:
        with reading(self._engine) as connection:
            seen = select(workers, now_ms().label("now")).order_by(workers.c.place)
            found = connection.execute(seen).mappings().all()
            holding = connection.execute(select(_work.place, _work.id).where(_work.state.in_(held_states)))
            holders = {row.place: row.id for row in holding}
            waiting = select(_work.device, func.count().label("queued")).where(_work.state == State.QUEUED)
            queued = {row.device: row.queued for row in connection.execute(waiting.group_by(_work.device))}
        served = [(ServedDevice.model_validate_json(row["document"]), row) for row in found]
        return [
            SeenDevice(
                served=device,
                age_seconds=max(0.0, (row["now"] - row["heartbeat_at"]) / 1000),
                held_by=holders.get(device.place),
                queued=queued.get(device.device.id, 0),
            )
            for device, row in served
        ]

    @override
    def check(self) -> None:
        with writing(self._engine) as connection:
            if connection.execute(update(health).where(health.c.id == 1).values(checked_at=now_ms())).rowcount == 0:
                connection.execute(insert(health).values(id=1, checked_at=now_ms()))

    @override
    def close(self) -> None:
        self._engine.dispose()


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _stale(lease: Lease) -> StaleLeaseError:
    name = f"lease {lease.token} of {lease.owner} on {lease.work_id}"
    return StaleLeaseError(f"{name} has ended: it expired, was taken over, or its work ended")


def _given_up() -> dict[str, Any]:
    """What an owner leaves behind when it gives up its lease."""
    used = now_ms() - func.coalesce(_work.claimed_at, now_ms())
    return {"owner": None, "lease_expires_at": None, "claimed_at": None, "device_ms": _work.device_ms + used}


def _read_item(connection: Connection, work_id: str) -> WorkItem:
    row = connection.execute(select(work_items).where(_work.id == work_id)).mappings().first()
    if row is None:
        raise NotFoundError(f"there is no tuning or job {work_id!r}")
    return rows.work_item(row)


def _end_queued(connection: Connection, work_id: str) -> bool:
    queued = and_(_work.id == work_id, _work.state == State.QUEUED)
    values = {"state": State.CANCELLED, "ended_at": now_ms()}
    return change(connection, queued, values, [state_event(State.CANCELLED)]) is not None


def _change_held(
    connection: Connection,
    lease: Lease,
    values: dict[str, Any],
    new_events: Sequence[tuple[EventKind, str]],
    also: ColumnElement[bool] | None = None,
) -> Any:  # noqa: ANN401 - a row of SQLAlchemy's
    """A change that only the holder of a good lease may make.

    Raises:
        StaleLeaseError: when the lease has ended.
        ConflictError: when it holds, but ``also`` is not met.
    """
    row = change(connection, held_by(lease) if also is None else and_(held_by(lease), also), values, new_events)
    if row is not None:
        return row
    state = connection.execute(select(_work.state).where(held_by(lease))).scalar_one_or_none()
    if state is None:
        raise _stale(lease)
    raise ConflictError(f"{lease.work_id} is {state}, from where it cannot become {values.get('state')}")


def _claim(connection: Connection, served: ServedDevice, lease_seconds: float) -> Claim | None:
    if connection.execute(running_at(served.place)).first() is not None:
        return None
    found = connection.execute(next_candidate(served)).first()
    if found is None:
        return None
    abandoned = found.state != State.QUEUED
    state = State(found.state) if abandoned else State.RUNNING
    values = {
        "state": state,
        "owner": served.owner,
        "place": served.place,
        "token": found.token + 1,
        "claimed_at": now_ms(),
        "device_ms": _work.device_ms + _used_by_the_lost(),
        "lease_expires_at": now_ms() + _milliseconds(lease_seconds),
        "lost_leases": found.lost_leases + int(abandoned),
        "started_at": func.coalesce(_work.started_at, now_ms()),
    }
    unchanged = and_(_work.id == found.id, _work.state == found.state, _work.token == found.token)
    if change(connection, unchanged, values, [state_event(state)]) is None:
        return None
    lease = Lease(work_id=found.id, owner=served.owner, token=found.token + 1)
    return Claim(lease, _read_item(connection, found.id), found.lost_leases + int(abandoned))


def _used_by_the_lost() -> ColumnElement[int]:
    """Milliseconds that an owner who vanished held its device: to its lease's end, or none when that was cut short."""
    return case((_work.lease_expires_at > _work.claimed_at, _work.lease_expires_at - _work.claimed_at), else_=0)


def _conditions(wanted: RecommendationFilter) -> list[ColumnElement[bool]]:
    columns = recommendations.c
    conditions: list[ColumnElement[bool]] = []
    if wanted.fingerprint is not None:
        conditions.append(columns.fingerprint == wanted.fingerprint)
    if wanted.model is not None:
        conditions.append(columns.model == wanted.model)
    if wanted.device is not None:
        conditions.append((columns.device == wanted.device) | (columns.device_name == wanted.device))
    return conditions
