"""The database of a simulated fleet: its processes' time, its transactions, and the times of stored work."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import URL, create_engine, text
from sqlalchemy.pool import NullPool

_TICKS = os.sysconf("SC_CLK_TCK")
_PARENT, _OWN_TIME, _TIME_OF_ENDED = 1, slice(11, 13), slice(13, 15)
"""Fields of ``/proc/PID/stat`` behind the name of the program, proc(5): parent, user and system time, children's."""


class Observer:
    """Reads a PostgreSQL server on this machine from outside of the store.

    Args:
        url: the database of the fleet.
        server: another database of its server, so that readings are not counted with the fleet's transactions.
    """

    def __init__(self, url: URL, server: URL) -> None:
        self._name = url.database
        self._inside = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        self._outside = create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with self._outside.connect() as connection:
            folder = Path(connection.execute(text("SHOW data_directory")).scalar_one())
            self.version: str = connection.execute(text("SHOW server_version")).scalar_one()
        self._postmaster = int((folder / "postmaster.pid").read_text().split()[0])

    def transactions(self, what: str = "xact_commit + xact_rollback") -> int:
        """Transactions of the fleet's database so far, ended in either way. Backends report theirs once a second."""
        query = text(f"SELECT {what} FROM pg_stat_database WHERE datname = :name")  # noqa: S608 - ours
        with self._outside.connect() as connection:
            return int(connection.execute(query, {"name": self._name}).scalar_one())

    def connections(self) -> int:
        """Open connections to the fleet's database."""
        query = text("SELECT count(*) FROM pg_stat_activity WHERE datname = :name")
        with self._outside.connect() as connection:
            return int(connection.execute(query, {"name": self._name}).scalar_one())

    def cpu_seconds(self) -> float:
        """Processor time of the server and its backends so far, ended ones included."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            if int(path.parent.name) == self._postmaster:
                ticks += sum(int(field) for field in fields[_OWN_TIME] + fields[_TIME_OF_ENDED])
            elif int(fields[_PARENT]) == self._postmaster:
                ticks += sum(int(field) for field in fields[_OWN_TIME])
        return ticks / _TICKS

    def rows(self, statement: str, **values: Any) -> Sequence[Any]:  # noqa: ANN401 - values of parameters
        """Execute a statement on the fleet's database. Return its rows; none if it returns none."""
        with self._inside.connect() as connection:
            found = connection.execute(text(statement), values)
            return found.all() if found.returns_rows else ()
