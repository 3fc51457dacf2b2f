"""Webhooks, and the outbox of their messages."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019_webhooks"
down_revision = "0018_audit"
branch_labels = None
depends_on = None

_PENDING = sa.text("state = 'pending'")


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("events", sa.String(400), nullable=False),
        sa.Column("project", sa.String(63)),
        sa.Column("secret", sa.String(100), nullable=False),
        sa.Column("previous_secret", sa.String(100)),
        sa.Column("previous_until", sa.BigInteger()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("webhook_id", sa.String(64), nullable=False),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("work_id", sa.String(64)),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("next_attempt_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger()),
        sa.Column("last_status", sa.Integer()),
        sa.Column("last_error", sa.String(500)),
    )
    op.create_index(
        "webhook_deliveries_due",
        "webhook_deliveries",
        ["next_attempt_at", "webhook_id"],
        sqlite_where=_PENDING,
        postgresql_where=_PENDING,
    )
    op.create_index("webhook_deliveries_by_webhook", "webhook_deliveries", ["webhook_id", "state", "id"])
    op.create_index("webhook_deliveries_by_end", "webhook_deliveries", ["ended_at"])


def downgrade() -> None:
    """Drop both tables, with the messages that were not delivered."""
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
