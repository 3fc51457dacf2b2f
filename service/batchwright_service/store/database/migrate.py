"""Bring a database to the newest revision of the schema, safely when several processes try at the same time."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, text

from batchwright_service.errors import ConfigurationError
from batchwright_service.store.database.engine import write_transaction

_MIGRATIONS = Path(__file__).parent / "migrations"
_ADVISORY_LOCK = 0x62617463
"""An arbitrary number that no other lock of the database uses: "batc"."""


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Apply missing revisions, all in one transaction.

    Raises:
        StoreUnavailableError: when the database cannot be reached or written.
        ConfigurationError: when a newer version has migrated it to a revision that this version does not know.
    """
    with write_transaction(engine) as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL lock_timeout = 0"))  # another may be migrating a large database
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        try:
            command.upgrade(configuration(connection), revision)
        except CommandError as error:
            raise ConfigurationError(
                f"a newer Batchwright has migrated the database: update this installation ({error})"
            ) from None


def configuration(connection: Connection) -> Config:
    """Return Alembic's configuration for the packaged migrations, on an open connection."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
