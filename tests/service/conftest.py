"""What the tests of the service share: documents, stores, and a probe runner that answers from a formula."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path

import httpx._transports.default
import pytest

from batchwright.client import Client
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.store.database.transactions import open_engine
from batchwright_service.store.store import Store
from tests.support.service.forked_processes import forked_processes
from tests.support.service.postgres import Databases, databases
from tests.support.service.running import Running, StartService, migrated, running
from tests.support.service.scripted import ScriptedRunner, Trainer

_BACKENDS = ["sqlite", "postgresql"]

# No test asks another certificate of a peer, and each new context reads all of them.
vars(httpx._transports.default)["create_ssl_context"] = cache(httpx.create_ssl_context)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A service that was started in this process leaves its level of logging to no other test."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Databases]:
    """Databases of a PostgreSQL server; one server for each process of the tests. Where there is none, tests fail."""
    with databases() as opened:
        yield opened


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite database with our tables, to copy."""
    path = tmp_path_factory.mktemp("migrated") / "store.db"
    path.write_bytes(migrated())
    return path


@pytest.fixture(params=_BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each backend: with our tables for a test that takes ``store``, else with nothing in it."""
    for_store = "store" in request.fixturenames
    if request.param == "postgresql":
        made: Databases = request.getfixturevalue("postgresql")
        return made.migrated() if for_store else made.empty()
    if for_store:
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "store.db")
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """An empty store of each backend."""
    opened = Store(open_engine(database_url))
    yield opened
    opened.close()


@pytest.fixture
def new_id() -> Callable[[str], str]:
    """Makes identifiers."""
    return IdentifierSource().new


@pytest.fixture(scope="module", params=["forked", pytest.param("started", marks=pytest.mark.thorough)])
def starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """How processes of the service start: forked from this one; in thorough tests as new interpreters too."""
    with forked_processes() if request.param == "forked" else nullcontext():
        yield


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[StartService]:
    """Starts services in this process, around a runner and a trainer; settings may be given."""
    with ExitStack() as stack:
        yield lambda runner=None, trainer=None, **given: stack.enter_context(
            running(tmp_path / "data", runner or ScriptedRunner(37), trainer or Trainer(), **given)
        )


@pytest.fixture
def service(start_service: StartService) -> Running:
    """A service in which 37 samples fit."""
    return start_service()


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service for the tests of a module that leave nothing behind that another would mind."""
    with running(tmp_path_factory.mktemp("shared"), ScriptedRunner(37), Trainer()) as started:
        yield started


@pytest.fixture
def client(service: Running) -> Iterator[Client]:
    """A client of ``batchwright_service``."""
    with service.client as opened:
        yield opened
