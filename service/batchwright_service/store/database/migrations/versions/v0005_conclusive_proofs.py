"""Keep with a recommendation whether its proof is conclusive, so that one without hides none that has such a proof."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_INCONCLUSIVE = ("timeout", "error", "lost", "interrupted", "quick")


def upgrade() -> None:
    """Add the column, and fill it from the documents."""
    op.add_column("recommendations", sa.Column("conclusive", sa.Boolean, nullable=False, server_default=sa.true()))
    stored = sa.table("recommendations", sa.column("conclusive", sa.Boolean), sa.column("document", sa.Text))
    stops = (stored.c.document.contains(f'"stopped_by":"{stop}"') for stop in _INCONCLUSIVE)
    op.execute(stored.update().where(sa.or_(*stops)).values(conclusive=sa.false()))
