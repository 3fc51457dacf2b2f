"""How work gets in, once: with its first event and, under an idempotency key, with its answer."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, and_, delete, insert, select, tuple_, update

from service.domain.states import RESUMABLE_STATES, State, WorkKind
from service.errors import NotResumableError
from service.store.api_keys import check_quota
from service.store.database.engine import insert_or_skip
from service.store.database.schema import idempotency_keys, now_ms, submitters, work_items
from service.store.database.statements import change, state_event
from service.store.models import (
    KEPT_SECONDS,
    AnsweredBeforeError,
    FirstAnswer,
    FirstTime,
    Idempotency,
    NewWork,
    Quota,
    WorkItem,
)
from service.store.work_queries import read_item

_work = work_items.c
_key = idempotency_keys.c

_FORGOTTEN_AT_ONCE = 100
"""Expired keys that are deleted when one comes: more than come, so that they do not pile up."""


def add_work(
    connection: Connection, work: NewWork, values: dict[str, Any], quota: Quota, first: FirstTime | None
) -> WorkItem:
    """Store new work in the state that ``values`` name. The primary key refuses an id that is there.

    The idempotency key is taken before anything else: who sends it at the same time waits here, then finds the answer.

    Raises:
        AnsweredBeforeError: when something was answered under this idempotency key already.
        QuotaExceededError: when its key has used its quota.
    """
    if first is not None:
        remember(connection, first.idempotency, FirstAnswer(first.idempotency.digest, work.id, 0, ""))
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


def resume(connection: Connection, work_id: str, quota: Quota) -> WorkItem:
    """Queue a job again that failed or was cancelled.

    Raises:
        NotFoundError: when there is none.
        NotResumableError: when it is in another state, or no job.
        QuotaExceededError: when its key has used its quota.
    """
    check_quota(connection, read_item(connection, work_id).key_id, quota)
    may_go_on = and_(_work.id == work_id, _work.kind == WorkKind.JOB, _work.state.in_(sorted(RESUMABLE_STATES)))
    forgotten = dict.fromkeys(("ended_at", "problem", "problem_code", "result"))
    values = {"state": State.QUEUED, "lost_leases": 0, **forgotten}
    if change(connection, may_go_on, values, [state_event(State.QUEUED)]) is None:
        item = read_item(connection, work_id)
        raise NotResumableError(f"{work_id} is {item.state}: only a job that is FAILED or CANCELLED can be resumed")
    return read_item(connection, work_id)


def remember(connection: Connection, idempotency: Idempotency, answer: FirstAnswer) -> None:
    """Store a first answer, and forget the oldest.

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
        if (found := first_answer(connection, idempotency.owner, idempotency.key)) is not None:
            raise AnsweredBeforeError(found)


def first_answer(connection: Connection, owner: str, key: str) -> FirstAnswer | None:
    """What was answered under a key that has not expired."""
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
