"""Work may hold several slots of a host."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011_held_slots"
down_revision = "0010_notifications"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of the slots that work holds beside its own."""
    op.create_table(
        "held_slots",
        sa.Column("slot", sa.String(300), primary_key=True),
        sa.Column("work_id", sa.String(64), sa.ForeignKey("work_items.id", ondelete="CASCADE"), nullable=False),
    )
    op.create_index("held_slots_by_work", "held_slots", ["work_id"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("held_slots")
