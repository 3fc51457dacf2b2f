"""The PostgreSQL of ``fleet_chaos.py``: a server that can be killed, and that comes back with what it had committed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import URL

from tests.support.service.postgres import binaries, reachable

_PATIENCE_SECONDS = 120.0


class Server:
    """A server on a Unix socket, with PostgreSQL's own settings of durability, as a child of this process.

    Its parent reaps it: a killed server that stays a zombie would hold the locks of its socket and of its data, and no
    other one would start.

    Args:
        home: a folder with a short path, for its data and its socket.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None  # it refuses to run as root
        self._programs = binaries()
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            self._programs = reachable(self._programs, home)
            os.chown(home, self._user.pw_uid, self._user.pw_gid)
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        if self._run("initdb", f"--pgdata={home}/data", *options).wait() != 0:
            raise RuntimeError(f"initdb failed: {(home / 'log').read_text()[-2000:]}")

    @property
    def url(self) -> URL:
        """The URL of its database."""
        return URL.create("postgresql+psycopg", "postgres", database="postgres", query={"host": str(self._home)})

    def start(self) -> None:
        """Start it, again and again while what is left of a killed one ends, and wait until it answers.

        Raises:
            RuntimeError: with the end of its log, when that takes too long.
        """
        options = ["-c", "listen_addresses=", "-c", "max_connections=300"]
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._answers():
            if self._process is None or self._process.poll() is not None:
                self._process = self._run("postgres", "-D", f"{self._home}/data", "-k", str(self._home), *options)
            if time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not answer: {(self._home / 'log').read_text()[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to its first process, whose children end with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End it at once, with its connections."""
        if self._process is not None:
            self._process.send_signal(3)  # SIGQUIT: an immediate shutdown
            self._process.wait()

    def held(self) -> list[str]:
        """The work that still has a lease."""
        with psycopg.connect(self._address(), autocommit=True) as connection:
            rows = connection.execute("SELECT id FROM work_items WHERE owner IS NOT NULL AND ended_at IS NULL")
            return [str(row[0]) for row in rows.fetchall()]

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._address(), connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True

    def _address(self) -> str:
        return self.url.set(drivername="postgresql").render_as_string(hide_password=False)

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._home / "log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - PostgreSQL's own programs
                [self._programs / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._home,
                user=self._user and self._user.pw_uid,
                group=self._user and self._user.pw_gid,
                extra_groups=self._user and [],
            )


@contextmanager
def server() -> Iterator[Server]:
    """A server that runs; it and its data are gone after the block."""
    home = Path(tempfile.mkdtemp(prefix="fleet-chaos-postgres-", dir="/tmp"))  # short, for a socket
    try:
        made = Server(home)
        try:
            made.start()
            yield made
        finally:
            made.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
