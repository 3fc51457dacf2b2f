"""Browser sessions."""

from dataclasses import dataclass

from sqlalchemy import Engine, delete, insert, select
from sqlalchemy.exc import IntegrityError

from batchwright.client.documents.audit import AuditAction
from batchwright_service.domain.callers import Caller
from batchwright_service.errors import ConflictError
from batchwright_service.store.api_keys import stored_key
from batchwright_service.store.database.audit_log import record
from batchwright_service.store.database.schema import api_keys, now_ms, now_once, sessions
from batchwright_service.store.database.transactions import read_transaction, write_transaction
from batchwright_service.store.models import StoredKey

_session = sessions.c

_DELETED_PER_INSERT = 100
"""Expired sessions that are deleted with each insert, so that they do not accumulate."""


@dataclass(frozen=True)
class StoredSession:
    """An open session and its API key. ``seconds_left`` is the time until it ends, by the database's clock."""

    stored: StoredKey
    seconds_left: float


class SessionStore:
    """Browser sessions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def open(self, digest: str, key_id: str, seconds: float, address: str | None = None) -> None:
        """Store a session of a key under the digest of its token, and delete some expired sessions.

        Raises:
            ConflictError: when the digest is taken.
        """
        ends = now_ms() + int(seconds * 1000)
        values = {"digest": digest, "key_id": key_id, "created_at": now_ms(), "expires_at": ends}
        expired = select(_session.digest).where(_session.expires_at <= now_once()).order_by(_session.expires_at)
        batch = _session.digest.in_(expired.limit(_DELETED_PER_INSERT).with_for_update(skip_locked=True))
        try:
            with write_transaction(self._engine) as connection:
                connection.execute(delete(sessions).where(batch))
                connection.execute(insert(sessions).values(**values))
                record(connection, AuditAction.SIGNED_IN, Caller(key_id, address=address))
        except IntegrityError:
            raise ConflictError("there is a session with this digest already") from None

    def find(self, digest: str) -> StoredSession | None:
        """Return the open session with its key, also when the key has ended; None for any other session."""
        now = now_ms().label("now")
        joined = select(api_keys, now, _session.expires_at.label("session_ends"))
        joined = joined.join(sessions, _session.key_id == api_keys.c.id)
        with read_transaction(self._engine) as connection:
            row = connection.execute(joined.where(_session.digest == digest)).mappings().first()
        if row is None or row["session_ends"] <= row["now"]:
            return None
        return StoredSession(stored_key(row), (row["session_ends"] - row["now"]) / 1000)

    def close(self, digest: str, address: str | None = None) -> None:
        """End a session; unknown sessions are ignored."""
        ended = delete(sessions).where(_session.digest == digest).returning(_session.key_id)
        with write_transaction(self._engine) as connection:
            key_id = connection.execute(ended).scalar_one_or_none()
            if key_id is not None:
                record(connection, AuditAction.SIGNED_OUT, Caller(key_id, address=address))
