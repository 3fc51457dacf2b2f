"""Claims of several devices in one round trip to PostgreSQL: the lock, each claim and the commit.

Claimers in turn wait for the holder of the lock. With a round trip for each statement, they would wait for the client
too, which may be slow to go on; sent together, they wait for the server alone. The server skips every statement after
one that fails, the commit too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.dialects.postgresql import psycopg as dialect
from sqlalchemy.exc import DBAPIError

from service.store.database.claim_statements import CLAIM_AT_ONCE, CLAIM_SETTINGS, LOCK_CLAIMS, Claimer

_DIALECT: Dialect = dialect.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
"""With parameters in PostgreSQL's own form: psycopg would convert such long statements anew for each claim."""
_CLAIM = CLAIM_AT_ONCE.compile(dialect=_DIALECT)


def claim_and_commit(connection: Connection, claimers: Sequence[Claimer]) -> list[Any | None]:
    """Claim the next work of each device, and commit the transaction; return each claimed row, or None.

    Raises:
        DBAPIError: when a statement fails, so that nothing is claimed; or when the connection is lost, perhaps after
            the commit.
    """
    import psycopg  # noqa: PLC0415 - an extra, which SQLite does without
    from psycopg.rows import namedtuple_row  # noqa: PLC0415 - as above

    driver: Any = connection.connection.driver_connection
    cursors = [psycopg.RawCursor(driver, row_factory=namedtuple_row) for _ in claimers]
    try:
        with driver.pipeline():
            for statement in (CLAIM_SETTINGS, LOCK_CLAIMS):
                driver.execute(statement.text, prepare=True)
            for cursor, claimer in zip(cursors, claimers, strict=True):
                values = _CLAIM.construct_params(claimer.parameters)
                cursor.execute(_CLAIM.string, [values[name] for name in _CLAIM.positiontup or ()], prepare=True)
            driver.commit()
        return [cursor.fetchone() for cursor in cursors]
    except psycopg.Error as error:
        if driver.broken or not isinstance(error, psycopg.IntegrityError):  # its server may be a standby now
            connection.invalidate(error)
        raise DBAPIError.instance(
            _CLAIM.string, (), error, psycopg.Error, connection_invalidated=driver.broken, dialect=connection.dialect
        ) from error
