"""Sessions of people who signed in with an API key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005_sessions"
down_revision = "0004_scheduling"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add their table."""
    op.create_table(
        "sessions",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
    )
    op.create_index("sessions_by_end", "sessions", ["expires_at"])


def downgrade() -> None:
    """Drop it: everybody signs in anew."""
    op.drop_table("sessions")
