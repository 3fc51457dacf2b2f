"""What ``chaos.py`` disturbs: a service and its workers as an operator runs them, and their database."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
from chaos_disk import RunsDisk
from chaos_processes import MARK_VARIABLE, Component, Found, below, marked, tasks, wait_until
from chaos_workload import FOLDER_VARIABLE
from sqlalchemy import make_url
from typing_extensions import override

LEASE_SECONDS = 6.0
TARGET = "chaos_workload:build"
_SETTLE_SECONDS = 5.0
"""How long processes may take to be gone: the kernel's signals take milliseconds, freeing memory longer."""


class Database(ABC):
    """A database that can be disturbed from outside."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def disturb(self, seconds: float) -> str:
        """Be unusable for a while; says what was done."""


class SqliteDatabase(Database):
    """A file; nobody can write while another holds its lock."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}")
        self._path = path

    @override
    def disturb(self, seconds: float) -> str:
        with closing(sqlite3.connect(self._path, timeout=30.0, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            connection.execute("ROLLBACK")
        return f"its file locked for {seconds:.1f} s"


class PostgresqlDatabase(Database):
    """A server; connections to it can be ended, again and again."""

    @override
    def disturb(self, seconds: float) -> str:
        ended = 0
        deadline = time.monotonic() + seconds
        address = make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(address, autocommit=True) as connection:
            while time.monotonic() < deadline:
                ended += connection.execute(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                ).fetchall()[0][0]
                time.sleep(0.05)
        return f"{ended} of its connections ended in {seconds:.1f} s"


class Deployment:
    """A service of the CPU on one database.

    Args:
        name: what it is called in the results.
        folder: everything it writes.
        database: its database.
        apart: whether the worker is a process of its own, beside the one that answers requests.
    """

    def __init__(self, name: str, folder: Path, database: Database, *, apart: bool) -> None:
        self.name = name
        self.folder = folder
        self.database = database
        self.mark = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self.runs_disk = RunsDisk(folder / "data" / "runs")
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        serve = ["serve", "--port", str(self._port), "--database-url", database.url]
        if apart:
            self.components = {
                "API": self._component("api", [*serve, "--no-worker"], "/livez"),
                "worker": self._component("worker", ["work", "--database-url", database.url], "/readyz"),
            }
        else:
            self.components = {"service": self._component("service", serve, "/livez")}

    def _component(self, log: str, command: list[str], ready: str) -> Component:
        whole = [sys.executable, "-m", "batchwright", *command]
        return Component(whole, self._environment(), self.folder / f"{log}.log", lambda: self.answers(ready))

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BATCHWRIGHT_")}
        here = Path(__file__).resolve().parent
        path = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return kept | {
            MARK_VARIABLE: self.mark,
            FOLDER_VARIABLE: str(self.folder),
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "BATCHWRIGHT_DATA_DIR": str(self.folder / "data"),
            "BATCHWRIGHT_NODE_NAME": "chaos",
            "BATCHWRIGHT_DEVICES": "cpu",
            "BATCHWRIGHT_LEASE_SECONDS": str(LEASE_SECONDS),
            "BATCHWRIGHT_POLL_SECONDS": "0.2",
            "BATCHWRIGHT_PYTHON_TARGETS": TARGET,
        }

    def answers(self, path: str) -> bool:
        """Whether a read of ``path`` succeeds."""
        try:
            return httpx.get(self.url + path, timeout=2.0).is_success
        except httpx.HTTPError:
            return False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Started; ended with the block."""
        with self.runs_disk.there():
            try:
                for component in self.components.values():
                    component.start()
                yield
            finally:
                for component in reversed(self.components.values()):
                    component.stop()

    # --- what its processes are, and did ---

    def processes(self) -> list[Found]:
        """Every process that comes from it."""
        return marked(self.mark)

    def strays(self) -> list[Found]:
        """Processes that come from it and belong to none of its living components."""
        found = self.processes()
        roots = {it.pid for it in self.components.values() if it.running}
        owned = {it.pid for root in roots for it in below(root, found)} | roots
        return [it for it in found if it.pid not in owned]

    def gone_seconds(self) -> float | None:
        """How long it takes until there are no strays; none when some stay."""
        began = time.monotonic()
        return time.monotonic() - began if wait_until(lambda: not self.strays(), _SETTLE_SECONDS) else None

    def idle(self) -> bool:
        """Whether nothing works on its device any more, within a moment."""
        return wait_until(lambda: not tasks(self.processes()), _SETTLE_SECONDS)

    def journal(self, since: float) -> list[dict[str, Any]]:
        """What its processes have noted since a time."""
        path = self.folder / "journal.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [entry for entry in entries if entry["at"] >= since]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
