"""Fair order, filters, idempotency keys, deletion; work names the hardware it needs and the trace it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004_scheduling"
down_revision = "0003_questions"
branch_labels = None
depends_on = None

_OPEN = "state IN ('QUEUED', 'CANCELLING', 'RUNNING')"
_QUEUED = "state = 'QUEUED'"
_INDEXES = {
    "work_items_by_state": ["kind", "state", "id"],
    "work_items_by_device": ["kind", "device", "id"],
    "work_items_by_model": ["kind", "model", "id"],
    "work_items_by_state_device": ["kind", "state", "device", "id"],
    "work_items_by_state_model": ["kind", "state", "model", "id"],
    "work_items_by_device_model": ["kind", "device", "model", "id"],
    "work_items_by_fingerprint": ["fingerprint", "id"],
    "work_items_by_recommendation_id": ["recommendation_id"],
    "work_items_by_earlier_recommendation_id": ["earlier_recommendation_id"],
    "work_items_by_ended_at": ["ended_at"],
}


def upgrade() -> None:
    """Add the tables and columns; whoever has submitted work gets a turn."""
    op.add_column("work_items", sa.Column("hardware", sa.String(400)))
    op.add_column("work_items", sa.Column("trace_parent", sa.String(64)))
    for name, columns in _INDEXES.items():
        op.create_index(name, "work_items", columns)
    op.drop_index("work_items_open", "work_items")
    lane: list[str | sa.TextClause] = [
        "device",
        "hardware",
        "key_id",
        sa.text("priority DESC"),
        "created_at",
        "id",
        "updated_at",
    ]
    _create_partial_index("work_items_queued", lane, _QUEUED)
    _create_submitters()
    _create_idempotency_keys()
    _create_used_time()


def downgrade() -> None:
    """Drop what was added."""
    for table in ("used_time", "idempotency_keys", "submitters"):
        op.drop_table(table)
    for name in ("work_items_queued", *_INDEXES):
        op.drop_index(name, "work_items")
    _create_partial_index("work_items_open", ["device", "state"], _OPEN)
    for column in ("trace_parent", "hardware"):
        op.drop_column("work_items", column)


def _create_partial_index(name: str, columns: Sequence[Any], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, "work_items", list(columns), sqlite_where=where, postgresql_where=where)


def _create_submitters() -> None:
    op.create_table(
        "submitters",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("turn", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.execute("INSERT INTO submitters (id) SELECT DISTINCT coalesce(key_id, '') FROM work_items")


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(16), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("work_id", sa.String(64), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_index("idempotency_keys_by_age", "idempotency_keys", ["created_at"])


def _create_used_time() -> None:
    op.create_table(
        "used_time",
        sa.Column("work_id", sa.String(64), primary_key=True),
        sa.Column("key_id", sa.String(16), nullable=False),
        sa.Column("ended_at", sa.BigInteger, nullable=False),
        sa.Column("device_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("used_time_by_key", "used_time", ["key_id", "ended_at"])
