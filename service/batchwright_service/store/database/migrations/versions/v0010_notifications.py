"""Waiting workers are notified of queued work, and expired leases are found by an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010_notifications"
down_revision = "0009_estimate_residuals"
branch_labels = None
depends_on = None

_HELD = sa.text("state IN ('CANCELLING', 'RUNNING')")
_WAITS = sa.text("waits")


def upgrade() -> None:
    """Add the columns and indexes; a lease of before may have expired at any time, so that it is checked always."""
    op.add_column("work_items", sa.Column("expiry_check_at", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index(
        "work_items_expiring",
        "work_items",
        ["device", "expiry_check_at"],
        sqlite_where=_HELD,
        postgresql_where=_HELD,
    )
    op.add_column("workers", sa.Column("device", sa.String(32)))
    op.add_column("workers", sa.Column("hardware", sa.String(400)))
    op.add_column("workers", sa.Column("lease_ms", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("workers", sa.Column("waits", sa.Boolean, nullable=False, server_default=sa.false()))
    op.create_index(
        "workers_waiting",
        "workers",
        ["device", "hardware", "slot"],
        sqlite_where=_WAITS,
        postgresql_where=_WAITS,
    )


def downgrade() -> None:
    """Drop the columns and indexes."""
    op.drop_index("workers_waiting", "workers")
    op.drop_index("work_items_expiring", "work_items")
    for table, column in (
        ("workers", "waits"),
        ("workers", "lease_ms"),
        ("workers", "hardware"),
        ("workers", "device"),
        ("work_items", "expiry_check_at"),
    ):
        op.drop_column(table, column)
