"""Jobs show their progress, pace and losses in lists."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021_course"
down_revision = "0020_staleness"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, empty: a running job fills it at its next update."""
    op.add_column("work_items", sa.Column("course", sa.Text()))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("work_items", "course")
