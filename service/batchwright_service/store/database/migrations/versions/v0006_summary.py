"""Columns and indexes of the summary: causes of failures, counted work, and cache hits and misses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006_summary"
down_revision = "0005_sessions"
branch_labels = None
depends_on = None

_FAILED = "state = 'FAILED'"
_CODE = {
    "sqlite": "json_extract(problem, '$.code')",
    "postgresql": "(problem::json) ->> 'code'",
}


def upgrade() -> None:
    """Add them; the causes of old failures are in their problems."""
    op.add_column("work_items", sa.Column("problem_code", sa.String(64)))
    code = _CODE[op.get_context().dialect.name]
    op.execute(f"UPDATE work_items SET problem_code = {code} WHERE {_FAILED} AND problem IS NOT NULL")  # noqa: S608 - ours
    op.create_index("work_items_counted", "work_items", ["kind", "state", "place", "ended_at", "device_ms"])
    where = sa.text(_FAILED)
    op.create_index(
        "work_items_failed",
        "work_items",
        ["kind", "problem_code", "ended_at", "id"],
        sqlite_where=where,
        postgresql_where=where,
    )
    op.create_table(
        "stored_answers",
        sa.Column("hour", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("hits", sa.BigInteger, nullable=False),
        sa.Column("misses", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Drop what was added."""
    op.drop_table("stored_answers")
    op.drop_index("work_items_failed", "work_items")
    op.drop_index("work_items_counted", "work_items")
    op.drop_column("work_items", "problem_code")
