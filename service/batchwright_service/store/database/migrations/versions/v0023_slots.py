"""The work of a slot is found through an index: the page of a device asks for it every few seconds."""

from __future__ import annotations

from alembic import op

revision = "0023_slots"
down_revision = "0022_sorting"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Index the slots of tunings and jobs."""
    op.create_index("work_items_by_slot", "work_items", ["kind", "slot", "id"])


def downgrade() -> None:
    """Drop the index."""
    op.drop_index("work_items_by_slot", "work_items")
