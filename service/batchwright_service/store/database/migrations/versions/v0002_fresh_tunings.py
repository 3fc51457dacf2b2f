"""Keep with a tuning whether it is to be measured although an equal one may have ended when it is claimed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Tunings that wait already may be answered by an equal one."""
    op.add_column("work_items", sa.Column("fresh", sa.Boolean, nullable=False, server_default=sa.false()))
