"""Tunings, jobs and recommendations have names, projects and labels; recommendations know their key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014_names"
down_revision = "0012_fleets"
branch_labels = None
depends_on = None

_NAMES = {"name": sa.String(120), "project": sa.String(63), "labels": sa.Text()}


def upgrade() -> None:
    """Add the columns; a stored recommendation gets the key of its tuning."""
    for table in ("work_items", "recommendations"):
        for name, kind in _NAMES.items():
            op.add_column(table, sa.Column(name, kind))
    op.add_column("recommendations", sa.Column("key_id", sa.String(16)))
    op.execute(
        "UPDATE recommendations SET key_id = "
        "(SELECT key_id FROM work_items WHERE work_items.id = recommendations.tuning_id)"
    )


def downgrade() -> None:
    """Drop the columns."""
    op.drop_column("recommendations", "key_id")
    for table in ("recommendations", "work_items"):
        for name in _NAMES:
            op.drop_column(table, name)
