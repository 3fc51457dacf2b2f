"""Claims of several devices in one round trip to PostgreSQL: the lock, each claim and the commit.

While a claimer holds the lock, every client round trip delays all others. Pipelining sends lock, claims and commit at
once. The server skips every statement after one that fails, also the commit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Dialect
from sqlalchemy.dialects.postgresql import psycopg as dialect
from sqlalchemy.exc import DBAPIError

from batchwright_service.store.database.claim_statements import CLAIM_AT_ONCE, LOCK_CLAIMS, Claimer
from batchwright_service.store.database.schema import StoredDocument, document_in, work_items

_DIALECT: Dialect = dialect.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
"""With parameters in PostgreSQL's own form: psycopg would convert such long statements anew for each claim."""
_CLAIM = CLAIM_AT_ONCE.compile(dialect=_DIALECT)
_DOCUMENTS = [column.name for column in work_items.columns if isinstance(column.type, StoredDocument)]
_IS_PLANNED = "has_plan_of_claims"
"""Key in the information on a connection."""
_NOBODY = {"own_slot": "", "own_device": "no device", "own_hardware": "", "own_lanes": "[]", "new_owner": ""}
"""The parameters of a device for which there is never any work. Others have the types of a claim's: a prepared
statement is one of certain types, which depend on the size of a number."""


def claim_and_commit(connection: Connection, claimers: Sequence[Claimer]) -> list[Any | None]:
    """Claim the next work of each device, and commit the transaction; return each claimed row, or None.

    The transaction must have the settings of claims (``admitted``).

    Raises:
        DBAPIError: when a statement fails, so that nothing is claimed; or when the connection is lost, perhaps after
            the commit.
    """
    import psycopg  # noqa: PLC0415 - an extra, which SQLite does without
    from psycopg.rows import namedtuple_row  # noqa: PLC0415 - as above

    driver: Any = connection.connection.driver_connection
    cursors = [psycopg.RawCursor(driver, row_factory=namedtuple_row) for _ in claimers]
    try:
        if _IS_PLANNED not in connection.info:  # planning takes ten times as long as a claim: not under the lock
            _execute(psycopg.RawCursor(driver), claimers[0].parameters | _NOBODY)
            connection.info[_IS_PLANNED] = True
        with driver.pipeline():
            driver.execute(LOCK_CLAIMS.text, prepare=True)
            for cursor, claimer in zip(cursors, claimers, strict=True):
                _execute(cursor, claimer.parameters)
            driver.commit()
        return [_with_documents(cursor.fetchone()) for cursor in cursors]
    except psycopg.Error as error:
        if driver.broken or not isinstance(error, (psycopg.IntegrityError, psycopg.errors.LockNotAvailable)):
            connection.invalidate(error)  # its server may be a standby now
        raise DBAPIError.instance(
            _CLAIM.string, (), error, psycopg.Error, connection_invalidated=driver.broken, dialect=connection.dialect
        ) from error


def _with_documents(row: Any | None) -> Any | None:  # noqa: ANN401 - a named tuple, whose columns SQLAlchemy does not read
    """Return a claimed row with the JSON of its documents, as SQLAlchemy returns it elsewhere."""
    stored = {name: value for name in _DOCUMENTS if (value := getattr(row, name, None)) is not None}
    return row and row._replace(**{name: document_in(value) for name, value in stored.items()})


def _execute(cursor: Any, parameters: Mapping[str, Any]) -> None:  # noqa: ANN401 - psycopg's
    """Execute the claim of one device as a prepared statement."""
    values = _CLAIM.construct_params(parameters)
    cursor.execute(_CLAIM.string, [values[name] for name in _CLAIM.positiontup or ()], prepare=True)
