"""The processes and databases that ``chaos.py`` starts, disturbs and kills. Children inherit a mark."""

import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psycopg
from reporting import wait_until
from sqlalchemy import URL, NullPool, create_engine, text

from tests.support.service.postgres import binaries, reachable

MARK_VARIABLE = "CHAOS_MARK"
_START_SECONDS = 180.0
_STOP_SECONDS = 30.0
_DATABASE_SECONDS = 120.0
_ROLES = {
    "batchwright.probing.child.fork_server": "fork server",
    "batchwright.training.worker": "training",
    "batchwright work": "worker",
    "batchwright node run": "worker",
    "batchwright_service.entrypoints.hosted_worker": "worker",
    "batchwright_service.entrypoints.hosted_dispatcher": "dispatcher",
}


@dataclass(frozen=True)
class Found:
    """A process with the mark."""

    pid: int
    parent: int
    command: str
    role: str
    """Role by its command, which a forked process shares with its parent; empty if none is known."""

    def __str__(self) -> str:
        return f"{self.pid} {self.role or self.command[:200]}"


def marked(mark: str) -> list[Found]:
    """Return every live process that was started, however indirectly, with ``mark`` in its environment."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    processes = (_read(path, wanted) for path in Path("/proc").glob("[0-9]*"))
    return [found for found in processes if found is not None and found.pid != os.getpid()]


def _read(path: Path, wanted: bytes) -> Found | None:
    """Return a process, or None if it lacks the mark or has ended."""
    try:
        if wanted not in (path / "environ").read_bytes().split(b"\0"):
            return None
        state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        is_python = "python" in (path / "exe").readlink().name  # and no shell that starts one
    except OSError:
        return None
    role = next((role for words, role in _ROLES.items() if words in command and is_python), "")
    return None if state in "ZX" else Found(int(path.name), int(parent), command, role)


def below(pid: int, processes: list[Found]) -> list[Found]:
    """Return the processes that descend from ``pid``."""
    known = {pid}
    while new := {process.pid for process in processes if process.parent in known} - known:
        known |= new
    return [process for process in processes if process.pid in known - {pid}]


def of_role(role: str, processes: list[Found]) -> list[Found]:
    """Return the processes of a role that were not forked from one of the same role."""
    found = {process.pid: process for process in processes if process.role == role}
    return [process for process in found.values() if process.parent not in found]


def probes(processes: list[Found]) -> list[Found]:
    """Return what the fork servers have forked, each below a subreaper of its own."""
    forked = [process for process in processes if process.role == "fork server"]
    servers = [process.pid for process in of_role("fork server", processes)]
    subreapers = [process.pid for process in forked if process.parent in servers]
    return [process for process in forked if process.parent in subreapers]


def tasks(processes: list[Found]) -> list[Found]:
    """Return the processes that work on a device now."""
    return probes(processes) + of_role("training", processes)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal. Return False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Component:
    """A process of a deployment that can be killed and started again: the service, the API or a worker."""

    name: str
    """Its name; several workers share one."""
    command: list[str]
    environment: Mapping[str, str]
    """Variables in addition to those of this process."""
    log: Path
    """File of its output, over all of its lives."""
    ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None
    """Its present or last life."""

    @property
    def pid(self) -> int:
        """Its process id, or that of its last life."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """True while it lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, and wait until it is ready.

        Raises:
            RuntimeError: with the end of its log, when it ends or does not become ready.
        """
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own command line
                self.command, env={**os.environ, **self.environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(lambda: self.ready() or not self.running, _START_SECONDS, 0.02)
        if not self.running or not self.ready():
            self.kill()
            raise RuntimeError(f"{' '.join(self.command)} did not start:\n{self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """Send SIGKILL, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL when that takes too long."""
        if self.running:
            kill(self.pid, signal.SIGTERM)
            wait_until(lambda: not self.running, _STOP_SECONDS)
        self.kill()


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
        deadline = time.monotonic() + _DATABASE_SECONDS
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
