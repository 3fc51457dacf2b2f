"""The databases of ``chaos.py``: a file of SQLite that can be locked, and a PostgreSQL that can be killed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeAlias

import psycopg
from sqlalchemy import URL, NullPool, create_engine, text

from tests.support.service.postgres import binaries, reachable

_START_SECONDS = 120.0


class SqliteDatabase:
    """A file. Nobody can write while another process holds its lock."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        self._path = path

    def disturb(self, seconds: float) -> str:
        """Lock the file for a while. Return what was done."""
        with closing(sqlite3.connect(self._path, timeout=30.0, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            connection.execute("ROLLBACK")
        return f"file locked for {seconds:.1f} s"


class PostgresqlServer:
    """A server on a Unix socket, with PostgreSQL's own settings of durability.

    It is a child of this process, which reaps it. A killed server that stayed a zombie would hold the locks of its
    socket and of its data, so that it could not be started again.

    Args:
        home: a folder with a short path, for its data and its socket.
    """

    def __init__(self, home: Path) -> None:
        address = URL.create("postgresql+psycopg", "postgres", database="postgres", query={"host": str(home)})
        self.url = address.render_as_string(hide_password=False)
        self._address = address.set(drivername="postgresql").render_as_string(hide_password=False)
        self._home = home
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None  # it refuses to run as root
        self._programs = binaries()
        if self._user is not None:
            self._programs = reachable(self._programs, home)
            os.chown(home, self._user.pw_uid, self._user.pw_gid)
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        self._process = self._run("initdb", f"--pgdata={home}/data", *options)
        self._process.wait()

    def disturb(self, seconds: float) -> str:
        """End all connections for a while. Return what was done."""
        ended = 0
        deadline = time.monotonic() + seconds
        with psycopg.connect(self._address, autocommit=True) as connection:
            while time.monotonic() < deadline:
                ended += connection.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                ).fetchall()[0][0]
                time.sleep(0.05)
        return f"{ended} connections ended in {seconds:.1f} s"

    def start(self) -> None:
        """Start the server, again if the remains of a killed one prevent it, and wait until it answers.

        Raises:
            RuntimeError: with the end of its log, when that takes too long.
        """
        options = ["-c", "listen_addresses=", "-c", "max_connections=300"]
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None:
                self._process = self._run("postgres", "-D", f"{self._home}/data", "-k", str(self._home), *options)
            if time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not answer: {(self._home / 'log').read_text()[-2000:]}")
            time.sleep(0.1)

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the first process of the server, and wait for its end."""
        self._process.send_signal(number)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._address, connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._home / "log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - PostgreSQL's own programs
                [self._programs / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._home,
                env={"PATH": os.environ["PATH"]},  # without the mark of the service's processes
                user=self._user and self._user.pw_uid,
                group=self._user and self._user.pw_gid,
                extra_groups=self._user and [],
            )


Database: TypeAlias = SqliteDatabase | PostgresqlServer


def leases(database: Database) -> list[str]:
    """Return the ids of the work that has a lease."""
    with create_engine(database.url, poolclass=NullPool).connect() as connection:
        rows = connection.execute(text("SELECT id FROM work_items WHERE owner IS NOT NULL AND ended_at IS NULL"))
        return [str(row[0]) for row in rows]


@contextmanager
def postgresql() -> Iterator[PostgresqlServer]:
    """Run a server for the block, and delete its data."""
    home = Path(tempfile.mkdtemp(prefix="chaos-postgres-", dir="/tmp"))  # short, for a socket
    try:
        server = PostgresqlServer(home)
        try:
            server.start()
            yield server
        finally:
            server.end(signal.SIGQUIT)  # an immediate shutdown
    finally:
        shutil.rmtree(home, ignore_errors=True)
