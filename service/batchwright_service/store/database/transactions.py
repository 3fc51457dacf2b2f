"""Engines for each database, read and write transactions, and the translation of database errors."""

import select
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    InvalidatePoolError,
    ProgrammingError,
    TimeoutError as PoolTimeoutError,
)
from sqlalchemy.pool import ConnectionPoolEntry

from batchwright_service.errors import ConfigurationError, InvalidInputError, StoreBrokenError, StoreUnavailableError
from batchwright_service.folders import create_private_file, make_private_folder

_BUSY_SECONDS = 10.0
"""The time for which a writer waits for others. Transactions take milliseconds."""
_RETRY_SECONDS = 0.01
_UNKNOWN_NAMES = "42"
"""Class of PostgreSQL's error codes for tables and columns that do not exist, and statements that it cannot parse."""
_PERMANENT = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
"""SQLite's codes of a missing table or column, and of a file that is damaged or no database."""
_IDLE_SECONDS = 10.0
"""The time after which PostgreSQL ends an idle transaction, whose locks others may wait for."""
_WRITER_LOCK = "writer_lock"
"""The execution option of an SQLite engine that has its writer lock."""
_EXAMPLES = "sqlite:////path/to/file.db or postgresql://user:password@host/database"
CONNECTIONS = 60
"""Connections that a process uses at most, unless it says otherwise."""
_MOST_KEPT = 20
"""Connections that stay open while they are not used."""
_PING_SECONDS = 15.0
"""The time after which an unused connection is tried before its use: a host between may have dropped it in silence."""

_READ_ONLY = "25006"
"""PostgreSQL's code for a write in a read-only transaction."""
_SQLITE = {"sqlite", "sqlite+pysqlite"}
_POSTGRESQL = {"postgresql", "postgresql+psycopg", "postgres"}
_TIMEOUTS = {
    "application_name": "batchwright",
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Limits of the wait for an unresponsive PostgreSQL host, unless the URL sets them: about half a minute."""


def open_engine(url: str, connections: int = CONNECTIONS) -> Engine:
    """Create the engine for a database URL; the folder of an SQLite file is created.

    Args:
        url: the URL of the database.
        connections: the connections that are open at most, besides that of a listener; further callers wait.

    Raises:
        ConfigurationError: when the URL names no supported database.
    """
    parsed = _parsed(url)
    if parsed.drivername in _SQLITE:
        return _open_sqlite(parsed, connections)
    if parsed.drivername in _POSTGRESQL:
        return _open_postgresql(parsed, connections)
    raise ConfigurationError(f"database_url names {parsed.drivername!r}; supported are sqlite and postgresql")


def _parsed(url: str) -> URL:
    """Parse the URL. It may have a password, so that errors repeat no part of it but the name of the driver."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"database_url is not a URL such as {_EXAMPLES}") from None
    if "@" in (parsed.host or ""):
        raise ConfigurationError("database_url has more than one `@`: write one within the password as %40")
    return parsed


def _open_sqlite(url: URL, connections: int) -> Engine:
    if url.database in {None, "", ":memory:"}:
        raise ConfigurationError("database_url must name an SQLite file: one in memory would not survive a restart")
    make_private_folder(Path(str(url.database)).parent)
    create_private_file(Path(str(url.database)))  # SQLite's log has the mode of the database
    engine = create_engine(
        url,
        **_pool(connections),
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False},
        execution_options={_WRITER_LOCK: FairLock()},
    )
    check = partial(_check_identity, Path(str(url.database)), _identity(Path(str(url.database))))
    event.listen(engine, "do_connect", lambda *_: check())
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", lambda _: check())
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode of a file."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _check_identity(path: Path, identity: tuple[int, int]) -> None:
    """Refuse a database whose file was replaced: open connections would go on to write to a file without a name."""
    with suppress(FileNotFoundError):
        if _identity(path) == identity:
            return
    raise StoreBrokenError(
        f"the SQLite file {path} was deleted or replaced while the service runs: stop the service, put the file back, "
        "and start the service again"
    )


def _open_postgresql(url: URL, connections: int) -> Engine:
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        **_pool(connections),
        pool_use_lifo=True,
        connect_args={name: value for name, value in _TIMEOUTS.items() if name not in url.query},
    )
    event.listen(engine, "connect", _prepare_postgresql)
    event.listen(engine, "handle_error", _leave_standby)
    event.listen(engine, "checkin", lambda _, record: record.info.update(returned_at=time.monotonic()))
    event.listen(engine, "checkout", _refuse_broken)
    return engine


def _pool(connections: int) -> dict[str, Any]:
    """Return the limits of a pool."""
    kept = min(connections, _MOST_KEPT)
    return {"pool_size": kept, "max_overflow": connections - kept}


def _refuse_broken(connection: Any, record: ConnectionPoolEntry, _proxy: object) -> None:  # noqa: ANN401 - psycopg's
    """Try a connection before its use if the server has sent something, as at its end, or it was long unused.

    To try each one would double the transactions of a fleet.
    """
    import psycopg  # noqa: PLC0415 - an extra, which SQLite does without

    returned_at = record.info.get("returned_at")
    if returned_at is None:  # a new one
        return
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if not poll.poll(0) and time.monotonic() < returned_at + _PING_SECONDS:
        return
    try:
        connection.execute("SELECT 1")
        connection.commit()
    except psycopg.Error as error:
        raise InvalidatePoolError from error


def _leave_standby(context: ExceptionContext) -> None:
    """Disconnect from a server that has become read-only, so that the next call connects anew."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
        context.is_disconnect = True


def _prepare_postgresql(connection: object, _record: ConnectionPoolEntry) -> None:
    """Bound lock waits and idle transactions; set outside a transaction, so that the settings persist."""
    limits = {"lock_timeout": _BUSY_SECONDS, "idle_in_transaction_session_timeout": _IDLE_SECONDS}
    connection.autocommit = True  # type: ignore[attr-defined]
    for name, seconds in limits.items():
        connection.execute(f"SET {name} = '{seconds:.0f}s'")  # type: ignore[attr-defined]
    connection.autocommit = False  # type: ignore[attr-defined]


def _prepare_sqlite(connection: object, _record: ConnectionPoolEntry) -> None:
    """Allow readers beside one writer, write each commit to disk, and disable implicit transactions of the driver."""
    connection.isolation_level = None  # type: ignore[attr-defined]
    cursor = connection.cursor()  # type: ignore[attr-defined]
    _use_wal(cursor)
    for pragma in ("synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Switch to a write-ahead log. Retry while another connection switches: SQLite does not wait for it here."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    """Lock at the start of a write transaction: a reader that becomes a writer would fail instead of waiting."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that only reads.

    Raises:
        StoreUnavailableError: when the database cannot be reached.
    """
    with translate_errors(), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that writes, committed at the end of the block and rolled back on an exception.

    Raises:
        StoreUnavailableError: when the database cannot be reached or written.
    """
    lock: FairLock | None = engine.get_execution_options().get(_WRITER_LOCK)
    held = nullcontext() if lock is None else lock.acquire(_BUSY_SECONDS)
    with translate_errors(), held, engine.connect() as plain:
        connection = plain.execution_options(writes=True)
        with connection.begin():
            yield connection


def insert_or_skip(connection: Connection, table: Table, values: dict[str, Any]) -> bool:
    """Insert a row unless its key exists, and return whether it was inserted."""
    statement = _insert(connection, table, values).on_conflict_do_nothing().returning(*table.primary_key)
    return connection.execute(statement).first() is not None


def insert_or_replace(connection: Connection, table: Table, values: dict[str, Any], kept: Collection[str] = ()) -> None:
    """Insert a row, or overwrite the row with its key, except the columns ``kept``."""
    statement = _insert(connection, table, values)
    key = [column.name for column in table.primary_key]
    new = {name: value for name, value in values.items() if name not in kept}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=new))


def _insert(connection: Connection, table: Table, values: dict[str, Any]) -> sqlite.Insert | postgresql.Insert:
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).values(**values)
    return sqlite.insert(table).values(**values)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate database errors; violated constraints are raised unchanged."""
    try:
        yield
    except (DataError, OverflowError) as error:
        raise InvalidInputError(f"a value cannot be stored: {_first_line(error)}") from error
    except (IntegrityError, ProgrammingError) as error:
        if error.connection_invalidated:
            raise StoreUnavailableError(f"the connection to the database broke: {_first_line(error)}") from error
        if str(getattr(error.orig, "sqlstate", "")).startswith(_UNKNOWN_NAMES):
            raise StoreBrokenError(f"the database does not match this version: {_first_line(error)}") from error
        raise
    except (DBAPIError, PoolTimeoutError) as error:
        if getattr(getattr(error, "orig", None), "sqlite_errorcode", None) in _PERMANENT:
            raise StoreBrokenError(f"the database must be repaired: {_first_line(error)}") from error
        raise StoreUnavailableError(f"the database cannot be used: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Return the message of the driver, without the statement and its values."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().partition("\n")[0]


class FairLock:
    """A lock that is acquired in the order of the requests. Safe to share between threads; not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        """Each waiter waits on its own lock; the first one holds the fair lock."""

    @contextmanager
    def acquire(self, timeout_seconds: float) -> Iterator[None]:
        """Hold the lock within the block.

        Raises:
            StoreUnavailableError: when the lock is not acquired in time.
        """
        own = threading.Lock()
        own.acquire()
        with self._lock:
            self._waiting.append(own)
            if self._waiting[0] is own:
                own.release()
        try:
            if not own.acquire(timeout=timeout_seconds):
                raise StoreUnavailableError(
                    f"the database cannot be used: other writers held it for {timeout_seconds:g} s"
                )
            yield
        finally:
            with self._lock:
                held = self._waiting[0] is own
                self._waiting.remove(own)
                if held and self._waiting:
                    self._waiting[0].release()
