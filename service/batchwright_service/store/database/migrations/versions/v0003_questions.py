"""Add the question of tunings, and the recommendation that warm-starts them.

Existing tunings get no question, so that they warm-start no other tuning.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003_questions"
down_revision = "0002_keys"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add what may be null, and the index by which answers to a question are found."""
    op.add_column("work_items", sa.Column("question", sa.String(64)))
    op.add_column("work_items", sa.Column("earlier_recommendation_id", sa.String(64)))
    op.create_index("work_items_by_question", "work_items", ["question", "id"])


def downgrade() -> None:
    """Forget it."""
    op.drop_index("work_items_by_question", "work_items")
    op.drop_column("work_items", "earlier_recommendation_id")
    op.drop_column("work_items", "question")
