"""Submissions: work is added once, with its first event and, under an idempotency key, with its response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, and_, delete, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from typing_extensions import override

from service.domain.states import RESUMABLE_STATES, State, WorkKind
from service.errors import ConflictError, NotResumableError
from service.store.api_keys import check_quota
from service.store.database.engine import insert_or_skip, reading, writing
from service.store.database.mapping import recommendation_values
from service.store.database.schema import idempotency_keys, now_ms, recommendations, submitters, work_items
from service.store.database.statements import change, state_event
from service.store.interface import SubmissionStore
from service.store.models import (
    KEPT_SECONDS,
    UNLIMITED,
    AnsweredBeforeError,
    FirstAnswer,
    FirstTime,
    Idempotency,
    NewWork,
    Quota,
    WorkItem,
)
from service.store.work_queries import read_item
from tuner.schemas.recommendation import Recommendation

_work = work_items.c
_key = idempotency_keys.c

_FORGOTTEN_AT_ONCE = 100
"""Expired keys that are deleted when one comes: more than come, so that they do not pile up."""


class SqlSubmissionStore(SubmissionStore):
    """Submissions on SQLite and PostgreSQL; safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @override
    def add(self, work: NewWork, quota: Quota = UNLIMITED, first: FirstTime | None = None) -> WorkItem:
        with _refusing_taken(work.id), writing(self._engine) as connection:
            return _insert(connection, work, {"state": State.QUEUED}, quota, first)

    @override
    def add_answered(self, work: NewWork, recommendation: Recommendation, first: FirstTime | None = None) -> WorkItem:
        ended = {"state": State.SUCCEEDED, "started_at": now_ms(), "ended_at": now_ms()}
        answered = ended | {"recommendation_id": recommendation.id}
        stored = recommendation_values(recommendation, work.id, work.model)
        with _refusing_taken(work.id), writing(self._engine) as connection:
            item = _insert(connection, work, answered, UNLIMITED, first)
            connection.execute(insert(recommendations).values(**stored))
            return item

    @override
    def remember(self, idempotency: Idempotency, answer: FirstAnswer) -> None:
        with writing(self._engine) as connection:
            _remember(connection, idempotency, answer)

    @override
    def first_answer(self, owner: str, key: str) -> FirstAnswer | None:
        with reading(self._engine) as connection:
            return _first_answer(connection, owner, key)

    @override
    def cancel(self, work_id: str) -> WorkItem:
        queued = and_(_work.id == work_id, _work.state == State.QUEUED)
        running = and_(_work.id == work_id, _work.state == State.RUNNING)
        ended = {"state": State.CANCELLED, "ended_at": now_ms()}
        with writing(self._engine) as connection:
            if change(connection, queued, ended, [state_event(State.CANCELLED)]) is None:
                change(connection, running, {"state": State.CANCELLING}, [state_event(State.CANCELLING)])
            return read_item(connection, work_id)

    @override
    def resume(self, work_id: str, quota: Quota = UNLIMITED) -> WorkItem:
        resumable = and_(_work.id == work_id, _work.kind == WorkKind.JOB, _work.state.in_(sorted(RESUMABLE_STATES)))
        cleared = dict.fromkeys(("ended_at", "problem", "problem_code", "result"))
        values = {"state": State.QUEUED, "lost_leases": 0, **cleared}
        with writing(self._engine) as connection:
            check_quota(connection, read_item(connection, work_id).key_id, quota)
            changed = change(connection, resumable, values, [state_event(State.QUEUED)])
            item = read_item(connection, work_id)
        if changed is None:
            raise NotResumableError(f"{work_id} is {item.state}: only a job that is FAILED or CANCELLED can be resumed")
        return item


@contextmanager
def _refusing_taken(work_id: str) -> Iterator[None]:
    """Translate a primary key that is taken already.

    Raises:
        ConflictError: naming the work.
    """
    try:
        yield
    except IntegrityError:
        raise ConflictError(f"{work_id!r} exists already") from None


def _insert(
    connection: Connection, work: NewWork, values: dict[str, Any], quota: Quota, first: FirstTime | None
) -> WorkItem:
    """Store new work in the state that ``values`` name. The primary key refuses an id that is there.

    The idempotency key is taken before anything else: a concurrent request with the key waits here, then finds the
    response.

    Raises:
        AnsweredBeforeError: when this idempotency key has a response already.
        QuotaExceededError: when its key has used its quota.
    """
    if first is not None:
        _remember(connection, first.idempotency, FirstAnswer(first.idempotency.digest, work.id, 0, ""))
    check_quota(connection, work.key_id, quota)
    given = {name: getattr(work, name) for name in NewWork.__dataclass_fields__}
    times = {"created_at": now_ms(), "updated_at": now_ms()}
    connection.execute(insert(work_items).values(**(given | times | values)))
    change(connection, _work.id == work.id, {}, [state_event(State(values["state"]))])
    insert_or_skip(connection, submitters, {"id": work.key_id or ""})
    item = read_item(connection, work.id)
    if first is not None:
        _fill(connection, first.idempotency, first.answer(item))
    return item


def _remember(connection: Connection, idempotency: Idempotency, answer: FirstAnswer) -> None:
    """Store a first response, and delete the oldest ones.

    Raises:
        AnsweredBeforeError: when there is one already.
    """
    _forget(connection, idempotency)
    values = {
        "owner": idempotency.owner,
        "key": idempotency.key,
        "created_at": now_ms(),
        "digest": answer.digest,
        "work_id": answer.work_id,
        "status": answer.status,
        "body": answer.body,
    }
    while not insert_or_skip(connection, idempotency_keys, values):
        if (found := _first_answer(connection, idempotency.owner, idempotency.key)) is not None:
            raise AnsweredBeforeError(found)


def _first_answer(connection: Connection, owner: str, key: str) -> FirstAnswer | None:
    """The response under a key that has not expired."""
    mine = and_(_key.owner == owner, _key.key == key, _key.created_at > _oldest_kept())
    row = connection.execute(select(idempotency_keys).where(mine)).first()
    return None if row is None else FirstAnswer(row.digest, row.work_id, row.status, row.body)


def _fill(connection: Connection, idempotency: Idempotency, answer: FirstAnswer) -> None:
    mine = and_(_key.owner == idempotency.owner, _key.key == idempotency.key)
    values = {"digest": answer.digest, "work_id": answer.work_id, "status": answer.status, "body": answer.body}
    connection.execute(update(idempotency_keys).where(mine).values(**values))


def _forget(connection: Connection, idempotency: Idempotency) -> None:
    """Delete this key if it has expired, and some others that have."""
    expired = _key.created_at <= _oldest_kept()
    mine = and_(_key.owner == idempotency.owner, _key.key == idempotency.key)
    connection.execute(delete(idempotency_keys).where(mine, expired))
    others = select(_key.owner, _key.key).where(expired).order_by(_key.created_at).limit(_FORGOTTEN_AT_ONCE)
    batch = tuple_(_key.owner, _key.key).in_(others.with_for_update(skip_locked=True))
    connection.execute(delete(idempotency_keys).where(batch))


def _oldest_kept() -> Any:  # noqa: ANN401 - an expression of SQLAlchemy's
    return now_ms() - int(KEPT_SECONDS * 1000)
