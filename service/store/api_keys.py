"""API keys, and the quota of each."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    Select,
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
from typing_extensions import override

from service.domain.api_keys import ApiKey, NewKey, Scope
from service.errors import ConflictError, NotFoundError, QuotaExceededError
from service.store.database.engine import reading, writing
from service.store.database.mapping import moment, moment_or_none
from service.store.database.schema import api_keys, is_queued, now_ms, used_time, work_items
from service.store.interface import KeyStore
from service.store.models import UNLIMITED, Quota, StoredKey

_key = api_keys.c
_work = work_items.c
_deleted = used_time.c

_QUEUE_RETRY_SECONDS = 10
"""Retry after this for room in the queue: running work may end at any time."""
_RUNNING_RETRY_SECONDS = 60
"""Retry after this while nothing that counts has ended yet."""


class SqlKeyStore(KeyStore):
    """Keys on SQLite and PostgreSQL; safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @override
    def add(self, new: NewKey) -> ApiKey:
        left = new.expires_in_seconds
        values = {
            "id": new.id,
            "prefix": new.prefix,
            "digest": new.digest,
            "name": new.name,
            "scopes": " ".join(new.scopes),
            "created_at": now_ms(),
            "expires_at": None if left is None else now_ms() + int(left * 1000),
        }
        try:
            with writing(self._engine) as connection:
                row = connection.execute(insert(api_keys).values(**values).returning(api_keys)).mappings().one()
        except IntegrityError:
            raise ConflictError(f"there is an API key {new.id!r} already") from None
        return _api_key(row)

    @override
    def find(self, key_id: str) -> StoredKey | None:
        with reading(self._engine) as connection:
            found = select(api_keys, now_ms().label("now")).where(_key.id == key_id)
            row = connection.execute(found).mappings().first()
        return None if row is None else stored_key(row)

    @override
    def list(self) -> list[ApiKey]:
        with reading(self._engine) as connection:
            found = connection.execute(select(api_keys).order_by(_key.created_at, _key.id))
            return [_api_key(row) for row in found.mappings()]

    @override
    def revoke(self, key_id: str) -> ApiKey:
        values = {"revoked_at": func.coalesce(_key.revoked_at, now_ms())}
        with writing(self._engine) as connection:
            ended = update(api_keys).where(_key.id == key_id).values(**values).returning(api_keys)
            row = connection.execute(ended).mappings().first()
        if row is None:
            raise NotFoundError(f"there is no API key {key_id!r}; `batchwright keys list` shows those there are")
        return _api_key(row)

    @override
    def touch(self, key_id: str, at_most_every_seconds: float) -> None:
        before = now_ms() - int(at_most_every_seconds * 1000)
        stale = or_(_key.last_used_at.is_(None), _key.last_used_at <= before)
        with writing(self._engine) as connection:
            connection.execute(update(api_keys).where(_key.id == key_id, stale).values(last_used_at=now_ms()))

    @override
    def exist(self) -> bool:
        with reading(self._engine) as connection:
            return connection.execute(select(_key.id).limit(1)).first() is not None


def check_quota(connection: Connection, key_id: str | None, quota: Quota) -> None:
    """Refuse more work of a key, within the transaction that would add it; work without a key is not limited.

    Raises:
        QuotaExceededError: naming what is used, the limit, and when to ask again.
    """
    if key_id is None or quota == UNLIMITED:
        return
    connection.execute(select(_key.id).where(_key.id == key_id).with_for_update())  # one at a time for each key
    before = now_ms() - int(quota.window_seconds * 1000)
    connection.execute(delete(used_time).where(_deleted.key_id == key_id, _deleted.ended_at <= before))
    used = connection.execute(_used(key_id, quota)).mappings().one()
    if quota.queued is not None and used["queued"] >= quota.queued:
        message = f"this key has {used['queued']} tunings and jobs queued, of {quota.queued} it may have"
        raise QuotaExceededError(f"{message}: wait until some have started", _QUEUE_RETRY_SECONDS)
    seconds = (used["device_ms"] or 0) / 1000
    if quota.device_seconds is not None and seconds >= quota.device_seconds:
        message = f"this key used {seconds:.0f} s on devices, of {quota.device_seconds:g} s"
        window = f"in {quota.window_seconds:g} s"
        raise QuotaExceededError(f"{message} it may use {window}: ask again later", _seconds_until_less(used, quota))


def _used(key_id: str, quota: Quota) -> Select[Any]:
    """Select queued work, counted milliseconds on devices, the end of the first counted work, and the time."""
    queued = select(func.count()).where(is_queued, _work.key_id == key_id).scalar_subquery()
    counted = union_all(*_counted(key_id, now_ms() - int(quota.window_seconds * 1000))).subquery()
    return select(
        queued.label("queued"),
        func.sum(counted.c.ms).label("device_ms"),
        func.min(case((counted.c.ms > 0, counted.c.ended_at))).label("first_ended"),
        now_ms().label("now"),
    )


def _counted(key_id: str, since: ColumnElement[int]) -> tuple[Select[Any], Select[Any]]:
    """The time of what runs, waits or ended within the window, and of what was deleted since it did."""
    running = case((_work.claimed_at.is_not(None), now_ms() - _work.claimed_at), else_=0)
    counts = or_(_work.ended_at.is_(None), _work.ended_at > since)
    there = select((_work.device_ms + running).label("ms"), _work.ended_at).where(_work.key_id == key_id, counts)
    gone = select(_deleted.device_ms, _deleted.ended_at).where(_deleted.key_id == key_id, _deleted.ended_at > since)
    return there, gone


def _seconds_until_less(used: RowMapping, quota: Quota) -> int:
    """Seconds until the first counted work leaves the window."""
    if used["first_ended"] is None:
        return _RUNNING_RETRY_SECONDS
    age = (used["now"] - used["first_ended"]) / 1000
    return max(1, int(quota.window_seconds - age) + 1)


def stored_key(row: RowMapping) -> StoredKey:
    """A key as it is verified, from its columns and the time as `now`."""
    expires = row["expires_at"]
    left = None if expires is None else (expires - row["now"]) / 1000
    return StoredKey(_api_key(row), row["digest"], left)


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
