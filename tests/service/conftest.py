"""What the tests of the service share: documents, stores, and a probe runner that answers from a formula."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

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


from tests.service import standin

standin.install()
