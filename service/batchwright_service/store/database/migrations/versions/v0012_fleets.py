"""Dispatchers report the state of their clusters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012_fleets"
down_revision = "0011_held_slots"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "fleets",
        sa.Column("name", sa.String(400), primary_key=True),
        sa.Column("reported_at", sa.BigInteger, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("fleets")
