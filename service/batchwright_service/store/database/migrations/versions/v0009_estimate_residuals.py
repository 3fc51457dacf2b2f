"""Tunings leave the residuals of their estimates, which correct later estimates on such a device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009_estimate_residuals"
down_revision = "0008_plain_names"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; tunings of before leave no residuals."""
    op.create_table(
        "estimate_residuals",
        sa.Column("tuning_id", sa.String(64), primary_key=True),
        sa.Column("hardware", sa.String(400), nullable=False),
        sa.Column("family", sa.String(1000), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_index("estimate_residuals_by_family", "estimate_residuals", ["hardware", "family", "tuning_id"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("estimate_residuals")
