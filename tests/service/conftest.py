"""What the tests of the service share: documents, stores, and a probe runner that answers from a formula."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from running import Running, StartService, running
from sqlalchemy import text

from scripted import ScriptedRunner, Trainer
from service.client import Client
from service.identifiers import IdentifierSource
from service.store.base import Store
from service.store.engine import open_engine, writing
from service.store.sql import open_store

POSTGRES_URL = os.environ.get("BATCHWRIGHT_TEST_POSTGRES_URL")
_BACKENDS = ["sqlite", *(["postgresql"] if POSTGRES_URL else [])]
"""PostgreSQL where BATCHWRIGHT_TEST_POSTGRES_URL names a database that the tests may empty."""


def _empty_postgresql(url: str) -> str:
    """The given database with nothing in it."""
    engine = open_engine(url)
    with writing(engine) as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return url


@pytest.fixture(params=_BACKENDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each backend."""
    if request.param == "postgresql":
        return _empty_postgresql(str(POSTGRES_URL))
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """An empty store of each backend."""
    opened = open_store(database_url)
    yield opened
    opened.close()


@pytest.fixture
def new_id() -> Callable[[str], str]:
    """Makes identifiers."""
    return IdentifierSource().new


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
    """A client of ``service``."""
    with service.client as opened:
        yield opened
