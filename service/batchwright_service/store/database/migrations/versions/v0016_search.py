"""Lists are searched by substrings, with an index of trigrams.

PostgreSQL indexes the searched text where the role may create the extension ``pg_trgm``, and reads the table elsewhere.
SQLite has a table of the module FTS5, kept by triggers. Its rows are numbered by ``search_entries``: ``VACUUM`` may
renumber the rows of tables without an integer primary key.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016_search"
down_revision = "0015_answers"
branch_labels = None
depends_on = None

_COLUMNS = {
    "work_items": ("name", "project", "labels", "model", "device", "hardware", "fingerprint", "id"),
    "recommendations": ("name", "project", "labels", "model", "device", "device_name", "fingerprint", "id"),
}


def upgrade() -> None:
    """Create the indexes, and fill them."""
    op.create_index("recommendations_sorted", "recommendations", ["id", "samples_per_second", "peak_bytes"])
    if op.get_bind().dialect.name == "postgresql":
        _upgrade_postgresql()
        return
    op.execute("CREATE TABLE search_entries (number INTEGER PRIMARY KEY, id VARCHAR(64) NOT NULL UNIQUE)")
    op.execute("CREATE VIRTUAL TABLE search_index USING fts5(text, tokenize = 'trigram')")
    for table, columns in _COLUMNS.items():
        for statement in _sqlite_statements(table, columns):
            op.execute(statement)


def downgrade() -> None:
    """Drop the indexes; the extension stays, since others may use it."""
    op.drop_index("recommendations_sorted", "recommendations")
    postgresql = op.get_bind().dialect.name == "postgresql"
    for table in _COLUMNS:
        if postgresql:
            op.execute(f"DROP INDEX IF EXISTS {table}_search")
            continue
        for event in ("insert", "update", "delete"):
            op.execute(f"DROP TRIGGER {table}_search_{event}")
    if not postgresql:
        op.execute("DROP TABLE search_index")
        op.execute("DROP TABLE search_entries")


def _upgrade_postgresql() -> None:
    connection = op.get_bind()
    try:
        with connection.begin_nested():
            connection.execute(sa.text("CREATE EXTENSION IF NOT EXISTS pg_trgm"))
    except sa.exc.DBAPIError:  # the role may not, or the server has no such extension
        return
    for table, columns in _COLUMNS.items():
        op.execute(f"CREATE INDEX {table}_search ON {table} USING gin (({_text(columns)}) gin_trgm_ops)")


def _text(columns: tuple[str, ...], row: str = "") -> str:
    """Return the searched text of a row; a searched word has no space, so that it lies within one column."""
    return "lower(" + " || ' ' || ".join(f"coalesce({row}{name}, '')" for name in columns) + ")"


def _sqlite_statements(table: str, columns: tuple[str, ...]) -> list[str]:
    """Return the statements that fill the index of a table, and create the triggers that keep it."""
    new, new_text = "(SELECT number FROM search_entries WHERE id = new.id)", _text(columns, "new.")
    return [
        f"INSERT INTO search_entries (id) SELECT id FROM {table}",  # noqa: S608 - constants, here and below
        (
            f"INSERT INTO search_index (rowid, text) SELECT number, {_text(columns)} "  # noqa: S608
            f"FROM {table} JOIN search_entries USING (id)"
        ),
        (
            f"CREATE TRIGGER {table}_search_insert AFTER INSERT ON {table} BEGIN "  # noqa: S608
            "INSERT INTO search_entries (id) VALUES (new.id); "
            f"INSERT INTO search_index (rowid, text) VALUES ({new}, {new_text}); END"
        ),
        (
            f"CREATE TRIGGER {table}_search_update AFTER UPDATE OF {', '.join(columns[:-1])} ON {table} BEGIN "  # noqa: S608
            f"UPDATE search_index SET text = {new_text} WHERE rowid = {new}; END"
        ),
        (
            f"CREATE TRIGGER {table}_search_delete AFTER DELETE ON {table} BEGIN "  # noqa: S608
            "DELETE FROM search_index WHERE rowid = (SELECT number FROM search_entries WHERE id = old.id); "
            "DELETE FROM search_entries WHERE id = old.id; END"
        ),
    ]
