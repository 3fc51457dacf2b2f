"""API keys, the owner of work, and the time work took on devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002_keys"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table, and what work items tell of their keys."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("prefix", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("scopes", sa.String(200), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
        sa.Column("last_used_at", sa.BigInteger),
    )
    op.add_column("work_items", sa.Column("key_id", sa.String(16)))
    op.add_column("work_items", sa.Column("claimed_at", sa.BigInteger))
    op.add_column("work_items", sa.Column("device_ms", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index("work_items_by_key", "work_items", ["key_id", "ended_at"])


def downgrade() -> None:
    """Drop what was added."""
    op.drop_index("work_items_by_key", "work_items")
    for column in ("device_ms", "claimed_at", "key_id"):
        op.drop_column("work_items", column)
    op.drop_table("api_keys")
