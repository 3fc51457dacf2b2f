"""Connections: how each database is opened, what a reading and a writing transaction are, and its errors translated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import ConnectionPoolEntry

from service.errors import ConfigurationError, InvalidInputError, StoreUnavailableError

_BUSY_SECONDS = 10.0
"""How long a writer waits for another before it gives up. Transactions take milliseconds."""
_POOL_SIZE = 20
_POOL_OVERFLOW = 40

_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


def open_engine(url: str) -> Engine:
    """The engine for a database URL; the folder of an SQLite file is created.

    Raises:
        ConfigurationError: when the URL names no database we can use.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigurationError(f"database_url {url!r} is not a URL such as sqlite:////path/to/file.db") from None
    if parsed.get_backend_name() == "sqlite":
        return _open_sqlite(parsed)
    if parsed.get_backend_name() in _DRIVERS:
        return _open_postgresql(parsed)
    raise ConfigurationError(f"database_url names {parsed.drivername!r}; it can be sqlite or postgresql")


def _open_sqlite(url: URL) -> Engine:
    if url.database in {None, "", ":memory:"}:
        raise ConfigurationError("database_url must name an SQLite file: one in memory would not survive a restart")
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_OVERFLOW,
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False},
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _open_postgresql(url: URL) -> Engine:
    return create_engine(
        url.set(drivername=_DRIVERS.get(url.drivername, url.drivername)),
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_OVERFLOW,
        pool_pre_ping=True,
    )


def _prepare_sqlite(connection: object, _record: ConnectionPoolEntry) -> None:
    """Readers beside one writer, every commit on the disk, and no transaction that the driver begins on its own."""
    connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = connection.cursor()  # type: ignore[attr-defined]
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes the lock at once: a reader that turns writer would fail instead of waiting its turn."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads.

    Raises:
        StoreUnavailableError: when the database cannot be reached.
    """
    with translated(), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that writes: committed at the end, undone when anything is raised.

    Raises:
        StoreUnavailableError: when the database cannot be reached or written.
    """
    with translated(), engine.connect() as plain:
        connection = plain.execution_options(writes=True)
        with connection.begin():
            yield connection


@contextmanager
def translated() -> Iterator[None]:
    """The one seam where the database's own errors become ours."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        raise StoreUnavailableError(f"the database cannot be used: {_first_line(error)}") from error
    except (DataError, OverflowError) as error:
        raise InvalidInputError(f"a value cannot be stored: {_first_line(error)}") from error
    except DBAPIError as error:
        if error.connection_invalidated:
            raise StoreUnavailableError(f"the connection to the database broke: {_first_line(error)}") from error
        raise


def _first_line(error: Exception) -> str:
    """The driver's own words, without the statement and its values."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().partition("\n")[0]
