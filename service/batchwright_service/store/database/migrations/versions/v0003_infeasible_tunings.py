"""Count the tunings that found no plan without a read of every recommendation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index."""
    where = sa.text("NOT feasible")
    op.create_index("recommendations_infeasible", "recommendations", ["id"], sqlite_where=where, postgresql_where=where)
