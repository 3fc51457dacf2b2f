"""The first schema: work with leases, probes, events, recommendations, workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_OPEN = "state IN ('QUEUED', 'CANCELLING', 'RUNNING')"
_HELD = "state IN ('CANCELLING', 'RUNNING')"


def upgrade() -> None:
    """Create everything."""
    _create_work_items()
    _create_evidence()
    _create_recommendations()
    _create_workers()


def downgrade() -> None:
    """Drop everything."""
    for table in ("health", "workers", "recommendations", "events", "probes", "work_items"):
        op.drop_table(table)


def _create_work_items() -> None:
    op.create_table(
        "work_items",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("device", sa.String(32), nullable=False),
        sa.Column("place", sa.String(300)),
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sa.Column("model", sa.String(300), nullable=False),
        sa.Column("effective_batch_size", sa.BigInteger, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("recommendation_id", sa.String(64)),
        sa.Column("owner", sa.String(300)),
        sa.Column("token", sa.Integer, nullable=False, server_default="0"),
        sa.Column("lease_expires_at", sa.BigInteger),
        sa.Column("lost_leases", sa.Integer, nullable=False, server_default="0"),
        sa.Column("probe_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("event_count", sa.Integer, nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("progress", sa.Text),
        sa.Column("result", sa.Text),
        sa.Column("problem", sa.Text),
    )
    op.create_index("work_items_by_kind", "work_items", ["kind", "id"])
    _create_partial_index("work_items_open", ["device", "state"], _OPEN, unique=False)
    _create_partial_index("one_run_per_device", ["place"], _HELD, unique=True)


def _create_partial_index(name: str, columns: list[str], condition: str, *, unique: bool) -> None:
    where = sa.text(condition)
    op.create_index(name, "work_items", columns, unique=unique, sqlite_where=where, postgresql_where=where)


def _work_id() -> sa.Column[str]:
    return sa.Column("work_id", sa.String(64), sa.ForeignKey("work_items.id", ondelete="CASCADE"), primary_key=True)


def _create_evidence() -> None:
    op.create_table(
        "probes",
        _work_id(),
        sa.Column("ordinal", sa.Integer, primary_key=True),
        sa.Column("recorded_at", sa.BigInteger, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_table(
        "events",
        _work_id(),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )


def _create_recommendations() -> None:
    op.create_table(
        "recommendations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tuning_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("model", sa.String(300), nullable=False),
        sa.Column("device", sa.String(32), nullable=False),
        sa.Column("device_name", sa.String(300), nullable=False),
        sa.Column("feasible", sa.Boolean, nullable=False),
        sa.Column("micro_batch_size", sa.BigInteger),
        sa.Column("gradient_accumulation_steps", sa.BigInteger),
        sa.Column("world_size", sa.Integer, nullable=False),
        sa.Column("effective_batch_size", sa.BigInteger, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    for column in ("fingerprint", "model", "device", "device_name"):
        op.create_index(f"recommendations_by_{column}", "recommendations", [column, "id"])


def _create_workers() -> None:
    op.create_table(
        "workers",
        sa.Column("place", sa.String(300), primary_key=True),
        sa.Column("owner", sa.String(300), nullable=False),
        sa.Column("heartbeat_at", sa.BigInteger, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_table(
        "health",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("checked_at", sa.BigInteger, nullable=False),
    )
