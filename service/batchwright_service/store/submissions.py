"""Submissions: work is added with its first event and, under an idempotency key, with its request."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from sqlalchemy import Connection, Engine, and_, delete, insert, select, tuple_
from sqlalchemy.exc import IntegrityError

from batchwright.client.documents.audit import AuditAction
from batchwright.client.documents.states import RESUMABLE_STATES, State, WorkKind
from batchwright.schemas.recommendation import Recommendation
from batchwright_service.domain.callers import COMMAND_LINE, Caller
from batchwright_service.errors import ConflictError, NotResumableError
from batchwright_service.store.api_keys import check_quota
from batchwright_service.store.database.audit_log import record, record_each
from batchwright_service.store.database.mapping import name_values, recommendation_values, sort_values, work_item
from batchwright_service.store.database.notifications import notify_owner, notify_waiting
from batchwright_service.store.database.schema import (
    idempotency_keys,
    now_ms,
    now_once,
    recommendations,
    submitters,
    work_items,
)
from batchwright_service.store.database.statements import add_events, change, change_each, locking, state_event
from batchwright_service.store.database.transactions import insert_or_skip, read_transaction, write_transaction
from batchwright_service.store.models import (
    UNLIMITED,
    DuplicateRequestError,
    Idempotency,
    NewWork,
    Quota,
    StoredRequest,
    WorkItem,
)
from batchwright_service.store.outbox.endings import record_endings
from batchwright_service.store.work_queries import read_item

_work = work_items.c
_key = idempotency_keys.c

IDEMPOTENCY_KEY_TTL_SECONDS = 86_400.0
"""The lifetime of an idempotency key."""
_DELETED_PER_INSERT = 100
"""Expired keys that are deleted with each insert, so that they do not accumulate."""


class SubmissionStore:
    """Submissions: work is queued once, cancelled and resumed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, work: NewWork, quota: Quota = UNLIMITED, idempotency: Idempotency | None = None) -> WorkItem:
        """Queue a piece of work within the quota of its key, and store its request under its idempotency key.

        A stored request under the key is found even when the quota is used.

        Raises:
            ConflictError: when its id is taken.
            QuotaExceededError: when its key has used its quota; work without a key has no quota.
            DuplicateRequestError: when the key belongs to a stored request already; nothing is added.
        """
        with _taken_id_refused(work.id), write_transaction(self._engine) as connection:
            values = {"state": State.QUEUED, **_sorted_as_recommended(connection, work)}
            if idempotency is not None:
                _store_request(connection, idempotency, work.id, HTTPStatus.ACCEPTED)
            check_quota(connection, work.key_id, quota)
            return _insert(connection, work, values)

    def add_succeeded(
        self, work: NewWork, recommendation: Recommendation, idempotency: Idempotency | None = None
    ) -> WorkItem:
        """Store a tuning that needs no run, since its recommendation is known, in the state SUCCEEDED.

        The tuning uses no device, so that no quota limits it.

        Raises:
            ConflictError: when its id or the recommendation's is taken.
            DuplicateRequestError: as ``add``.
        """
        ended = {"state": State.SUCCEEDED, "started_at": now_ms(), "ended_at": now_ms()}
        stored = recommendation_values(recommendation, work.id, work.model, work.key_id)
        values = ended | {"recommendation_id": recommendation.id} | sort_values(stored)
        with _taken_id_refused(work.id), write_transaction(self._engine) as connection:
            if idempotency is not None:
                _store_request(connection, idempotency, work.id, HTTPStatus.OK)
            connection.execute(insert(recommendations).values(**stored))  # first: the returned work has its figures
            return _insert(connection, work, values)

    def store_request(self, idempotency: Idempotency, work_id: str) -> None:
        """Store a request that created nothing, because a stored tuning served it.

        Raises:
            DuplicateRequestError: as ``add``.
        """
        with write_transaction(self._engine) as connection:
            _store_request(connection, idempotency, work_id, HTTPStatus.OK)

    def find_request(self, owner: str, key: str) -> StoredRequest | None:
        """Return the first request under an idempotency key.

        None when the key is new, or older than ``IDEMPOTENCY_KEY_TTL_SECONDS``.
        """
        with read_transaction(self._engine) as connection:
            return _find_request(connection, owner, key)

    def cancel(self, work_id: str, caller: Caller = COMMAND_LINE) -> WorkItem:
        """Change QUEUED to CANCELLED, and RUNNING to CANCELLING; other states stay. Idempotent.

        Raises:
            NotFoundError: when there is none.
        """
        with write_transaction(self._engine) as connection:
            _cancel(connection, [work_id], caller)
            return read_item(connection, work_id)

    def cancel_all(self, work_ids: Collection[str], caller: Caller = COMMAND_LINE) -> dict[str, State]:
        """Cancel each as ``cancel`` does, all in one transaction, and return their states; unknown ids are left out."""
        found = select(_work.id, _work.state).where(_work.id.in_(work_ids))
        with write_transaction(self._engine) as connection:
            _cancel(connection, work_ids, caller)
            return {row.id: State(row.state) for row in connection.execute(found)}

    def set_priority(self, work_id: str, priority: int, caller: Caller = COMMAND_LINE) -> WorkItem:
        """Change the priority of QUEUED work; work in any other state stays as it is.

        Raises:
            NotFoundError: when there is none.
        """
        queued = and_(_work.id == work_id, _work.state == State.QUEUED)
        with write_transaction(self._engine) as connection:
            if change(connection, queued, {"priority": priority}) is not None:
                record(connection, AuditAction.PRIORITIZED, caller, work_id, f"priority {priority}")
            return read_item(connection, work_id)

    def resume(self, work_id: str, quota: Quota = UNLIMITED, caller: Caller = COMMAND_LINE) -> WorkItem:
        """Queue a FAILED or CANCELLED job again; its recorded evidence is kept, and its ending is cleared.

        Raises:
            NotFoundError: when there is none.
            NotResumableError: when it is in another state, or is no job.
            QuotaExceededError: when its key has used its quota.
        """
        resumable = and_(_work.id == work_id, _work.kind == WorkKind.JOB, _work.state.in_(sorted(RESUMABLE_STATES)))
        cleared = dict.fromkeys(("ended_at", "problem", "problem_code", "result"))
        values = {"state": State.QUEUED, "lost_leases": 0, **cleared}
        with write_transaction(self._engine) as connection:
            check_quota(connection, read_item(connection, work_id).key_id, quota)
            changed = change(connection, resumable, values, [state_event(State.QUEUED)])
            item = read_item(connection, work_id)
            if changed is not None:
                record(connection, AuditAction.RESUMED, caller, work_id)
                notify_waiting(connection, changed["device"], changed["hardware"])
        if changed is None:
            raise NotResumableError(f"{work_id} is {item.state}: only a job that is FAILED or CANCELLED can be resumed")
        return item


def _cancel(connection: Connection, work_ids: Collection[str], caller: Caller) -> None:
    """Cancel work that has not ended, with an entry of the audit log for each."""
    named = _work.id.in_(work_ids)
    connection.execute(locking(and_(named, _work.state.in_((State.QUEUED, State.RUNNING)))))
    ended = {"state": State.CANCELLED, "ended_at": now_ms()}
    queued = change_each(connection, and_(named, _work.state == State.QUEUED), ended, state_event(State.CANCELLED))
    stopping = {"state": State.CANCELLING}
    running = change_each(
        connection, and_(named, _work.state == State.RUNNING), stopping, state_event(State.CANCELLING)
    )
    record_endings(connection, [row["id"] for row in queued])
    for row in running:
        notify_owner(connection, row["owner"], row["id"])
    record_each(connection, AuditAction.CANCELLED, caller, [row["id"] for row in (*queued, *running)])


@contextmanager
def _taken_id_refused(work_id: str) -> Iterator[None]:
    """Translate the error of a taken primary key."""
    try:
        yield
    except IntegrityError:
        raise ConflictError(f"{work_id!r} exists already") from None


def _sorted_as_recommended(connection: Connection, work: NewWork) -> dict[str, Any]:
    """Return the columns by which a job is sorted: those of its recommendation, if that is stored."""
    if work.recommendation_id is None:
        return {}
    figures = (recommendations.c.samples_per_second, recommendations.c.peak_bytes)
    found = connection.execute(select(*figures).where(recommendations.c.id == work.recommendation_id)).mappings()
    return sort_values(dict(row) if (row := found.first()) is not None else None)


def _insert(connection: Connection, work: NewWork, values: dict[str, Any]) -> WorkItem:
    """Insert new work in the state of ``values``.

    Raises:
        IntegrityError: when the id is taken.
    """
    given = {name: getattr(work, name) for name in NewWork.__dataclass_fields__ if name not in {"names", "address"}}
    given |= name_values(work.names)
    times = {"created_at": now_ms(), "updated_at": now_ms(), "event_count": 1}
    stored = insert(work_items).values(**(given | times | values)).returning(*work_items.columns)
    row = connection.execute(stored).one()
    add_events(connection, row._mapping, [state_event(State(values["state"]))])  # noqa: SLF001 - its public name
    insert_or_skip(connection, submitters, {"id": work.key_id or ""})
    record(connection, AuditAction.SUBMITTED, Caller(work.key_id, address=work.address), work.id)
    is_alone = row.key_id is None and row.recommendation_id is None
    item = work_item(row, related=False) if is_alone else read_item(connection, work.id)
    if item.state is State.QUEUED:
        notify_waiting(connection, work.device, work.hardware)
    else:
        record_endings(connection, [work.id])
    return item


def _store_request(connection: Connection, idempotency: Idempotency, work_id: str, status: HTTPStatus) -> None:
    """Insert a request, and delete some expired ones.

    It comes first in its transaction: a concurrent request with the key waits here, then finds the stored one.
    """
    # This key if it has expired, and some other expired ones.
    expired = _key.created_at <= _oldest_kept()
    own = and_(_key.owner == idempotency.owner, _key.key == idempotency.key)
    connection.execute(delete(idempotency_keys).where(own, expired))
    others = select(_key.owner, _key.key).where(expired).order_by(_key.created_at).limit(_DELETED_PER_INSERT)
    batch = tuple_(_key.owner, _key.key).in_(others.with_for_update(skip_locked=True))
    connection.execute(delete(idempotency_keys).where(batch))
    values = {
        "owner": idempotency.owner,
        "key": idempotency.key,
        "created_at": now_ms(),
        "digest": idempotency.digest,
        "work_id": work_id,
        "status": int(status),
    }
    # Neither inserted nor found: the row has just been deleted, as it expired between the two statements.
    while not insert_or_skip(connection, idempotency_keys, values):
        if (found := _find_request(connection, idempotency.owner, idempotency.key)) is not None:
            raise DuplicateRequestError(found)


def _find_request(connection: Connection, owner: str, key: str) -> StoredRequest | None:
    """Return the request under a key that has not expired."""
    own = and_(_key.owner == owner, _key.key == key, _key.created_at > _oldest_kept())
    row = connection.execute(select(idempotency_keys).where(own)).first()
    return None if row is None else StoredRequest(row.digest, row.work_id, row.status)


def _oldest_kept() -> Any:  # noqa: ANN401 - an expression of SQLAlchemy's
    return now_once() - int(IDEMPOTENCY_KEY_TTL_SECONDS * 1000)
