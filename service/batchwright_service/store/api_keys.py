"""API keys and their quotas."""

from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    RowMapping,
    Select,
    and_,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.exc import IntegrityError

from batchwright.client.documents.api_keys import ApiKey, Scope
from batchwright.client.documents.audit import AuditAction
from batchwright_service.domain.callers import COMMAND_LINE, Caller
from batchwright_service.domain.key_texts import NewKey
from batchwright_service.errors import ConflictError, NotFoundError, QuotaExceededError
from batchwright_service.store.database.audit_log import record
from batchwright_service.store.database.mapping import moment, moment_or_none
from batchwright_service.store.database.schema import api_keys, is_queued, now_ms, now_once, used_time, work_items
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import UNLIMITED, Quota, StoredKey

_key = api_keys.c
_work = work_items.c
_deleted = used_time.c

_QUEUE_RETRY_SECONDS = 10
"""Retry-After when the queue is full: running work may end at any time."""
_RUNNING_RETRY_SECONDS = 60
"""Retry-After while no counted work has ended yet."""


class KeyStore:
    """API keys. Rows are never deleted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, new: NewKey, caller: Caller = COMMAND_LINE) -> ApiKey:
        """Store a key.

        Raises:
            ConflictError: when its id is taken.
        """
        lifetime = new.expires_in_seconds
        values = {
            "id": new.id,
            "prefix": new.prefix,
            "digest": new.digest,
            "name": new.name,
            "scopes": " ".join(new.scopes),
            "created_at": now_ms(),
            "expires_at": None if lifetime is None else now_ms() + int(lifetime * 1000),
        }
        try:
            with write_transaction(self._engine) as connection:
                row = connection.execute(insert(api_keys).values(**values).returning(api_keys)).mappings().one()
                detail = f"{new.name}: {', '.join(new.scopes)}"
                record(connection, AuditAction.KEY_CREATED, caller, new.id, detail)
        except IntegrityError:
            raise ConflictError(f"there is an API key {new.id!r} already") from None
        return _api_key(row)

    def find(self, key_id: str) -> StoredKey | None:
        """Return the key with this id, also when it is revoked or has expired."""
        with read_transaction(self._engine) as connection:
            found = select(api_keys, now_ms().label("now")).where(_key.id == key_id)
            row = connection.execute(found).mappings().first()
        return None if row is None else stored_key(row)

    def list(self) -> list[ApiKey]:
        """Return all keys, revoked and expired ones included, oldest first."""
        with read_transaction(self._engine) as connection:
            found = connection.execute(select(api_keys).order_by(_key.created_at, _key.id))
            return [_api_key(row) for row in found.mappings()]

    def revoke(self, key_id: str, caller: Caller = COMMAND_LINE) -> ApiKey:
        """Revoke a key. A revoked key stays unchanged.

        Raises:
            NotFoundError: when there is none with this id.
        """
        valid = and_(_key.id == key_id, _key.revoked_at.is_(None))
        with write_transaction(self._engine) as connection:
            ended = update(api_keys).where(valid).values(revoked_at=now_ms()).returning(api_keys)
            row = connection.execute(ended).mappings().first()
            if row is not None:
                record(connection, AuditAction.KEY_REVOKED, caller, key_id, row["name"])
            else:
                row = connection.execute(select(api_keys).where(_key.id == key_id)).mappings().first()
        if row is None:
            raise NotFoundError(f"there is no API key {key_id!r}; `batchwright admin keys list` lists all keys")
        return _api_key(row)

    def touch(self, key_id: str, at_most_every_seconds: float) -> None:
        """Record the use of a key, at most every ``at_most_every_seconds``; unknown keys are ignored."""
        before = now_ms() - int(at_most_every_seconds * 1000)
        stale = or_(_key.last_used_at.is_(None), _key.last_used_at <= before)
        with write_transaction(self._engine) as connection:
            connection.execute(update(api_keys).where(_key.id == key_id, stale).values(last_used_at=now_ms()))

    def exist(self) -> bool:
        """Return whether any key is stored; revoked keys count, so that authentication stays required."""
        with read_transaction(self._engine) as connection:
            return connection.execute(select(_key.id).limit(1)).first() is not None


def check_quota(connection: Connection, key_id: str | None, quota: Quota) -> None:
    """Check the quota of a key, within the transaction that adds work; work without a key is not limited.

    Raises:
        QuotaExceededError: naming the use, the limit, and the time after which to retry.
    """
    if key_id is None or quota == UNLIMITED:
        return
    connection.execute(select(_key.id).where(_key.id == key_id).with_for_update())  # one at a time for each key
    before = now_once() - int(quota.window_seconds * 1000)
    connection.execute(delete(used_time).where(_deleted.key_id == key_id, _deleted.ended_at <= before))
    used = connection.execute(_used(key_id, quota)).mappings().one()
    if quota.queued is not None and used["queued"] >= quota.queued:
        message = f"this key has {used['queued']} tunings and jobs queued (limit {quota.queued})"
        raise QuotaExceededError(f"{message}: wait until some have started", _QUEUE_RETRY_SECONDS)
    seconds = (used["device_ms"] or 0) / 1000
    if quota.device_seconds is not None and seconds >= quota.device_seconds:
        message = f"this key used {seconds:.0f} s on devices within {quota.window_seconds:g} s"
        limit = f"(limit {quota.device_seconds:g} s)"
        ended, retry = used["first_ended"], _RUNNING_RETRY_SECONDS
        if ended is not None:  # until the earliest counted work leaves the window
            retry = max(1, int(quota.window_seconds - (used["now"] - ended) / 1000) + 1)
        raise QuotaExceededError(f"{message} {limit}: try again later", retry)


def _used(key_id: str, quota: Quota) -> Select[Any]:
    """Select the queued work, the counted device time in milliseconds, the earliest counted end, and the time."""
    queued = select(func.count()).where(is_queued, _work.key_id == key_id).scalar_subquery()
    since = now_once() - int(quota.window_seconds * 1000)
    running = case((_work.claimed_at.is_not(None), now_ms() - _work.claimed_at), else_=0)
    counts = or_(_work.ended_at.is_(None), _work.ended_at > since)
    stored = select((_work.device_ms + running).label("ms"), _work.ended_at).where(_work.key_id == key_id, counts)
    removed = select(_deleted.device_ms, _deleted.ended_at).where(_deleted.key_id == key_id, _deleted.ended_at > since)
    counted = union_all(stored, removed).subquery()
    return select(
        queued.label("queued"),
        func.sum(counted.c.ms).label("device_ms"),
        func.min(case((counted.c.ms > 0, counted.c.ended_at))).label("first_ended"),
        now_ms().label("now"),
    )


def stored_key(row: RowMapping) -> StoredKey:
    """Return a key from its columns and the current time `now`."""
    expires = row["expires_at"]
    seconds_left = None if expires is None else (expires - row["now"]) / 1000
    return StoredKey(_api_key(row), row["digest"], seconds_left)


def _api_key(row: RowMapping) -> ApiKey:
    return ApiKey(
        id=row["id"],
        prefix=row["prefix"],
        name=row["name"],
        scopes=tuple(Scope(scope) for scope in row["scopes"].split()),
        created_at=moment(row["created_at"]),
        expires_at=moment_or_none(row["expires_at"]),
        revoked_at=moment_or_none(row["revoked_at"]),
        last_used_at=moment_or_none(row["last_used_at"]),
    )
