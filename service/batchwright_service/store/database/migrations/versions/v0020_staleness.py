"""Recommendations are marked where torch, the driver or the hardware changed since they were made."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0020_staleness"
down_revision = "0019_webhooks"
branch_labels = None
depends_on = None

_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {"conditions": sa.Text(), "request_digest": sa.String(100)}
_INDEXED = {"conditions": ["conditions", "id"], "request_digest": ["request_digest", "conditions", "id"]}
"""The columns of each index. The newest recommendation for a request is looked up among those of today's conditions."""
_BATCH_SIZE = 100
_NOT_OF_MEMORY = ("batchwright", "python")


def upgrade() -> None:
    """Add the columns with their indexes, and fill them from the stored documents and their tunings."""
    for name, kind in _COLUMNS.items():
        op.add_column("recommendations", sa.Column(name, kind))
    connection = op.get_bind()
    names = ("id", "tuning_id", "document", *_COLUMNS)
    table = sa.table("recommendations", *(sa.column(name, sa.Text()) for name in names))
    work = sa.table("work_items", *(sa.column(name, sa.Text()) for name in ("id", "slot", "request_fingerprint")))
    next_ones = (
        sa.select(table.c.id, table.c.document, work.c.slot, work.c.request_fingerprint)
        .select_from(table.outerjoin(work, work.c.id == table.c.tuning_id))
        .order_by(table.c.id)
        .limit(_BATCH_SIZE)
    )
    last = ""
    while rows := connection.execute(next_ones.where(table.c.id > last)).all():
        for row in rows:
            values = _values(json.loads(row.document), row.slot, row.request_fingerprint)
            connection.execute(sa.update(table).where(table.c.id == row.id).values(**values))
        last = rows[-1].id
    for name, columns in _INDEXED.items():
        op.create_index(f"recommendations_by_{name}", "recommendations", columns)


def downgrade() -> None:
    """Drop the indexes and the columns."""
    for name in _INDEXED:
        op.drop_index(f"recommendations_by_{name}", "recommendations")
    for name in _COLUMNS:
        op.drop_column("recommendations", name)


def _values(document: dict[str, Any], slot: str | None, request_fingerprint: str | None) -> dict[str, str | None]:
    """Return the values of the columns for a stored recommendation."""
    limit = document.get("request", {}).get("memory_limit_bytes")
    return {
        "conditions": _conditions(document, slot, limit) if "device" in document else None,
        "request_digest": request_fingerprint and f"{request_fingerprint}:{limit or ''}",
    }


def _conditions(document: dict[str, Any], slot: str | None, limit: int | None) -> str:
    device, versions = document["device"], document.get("versions", {})
    conditions = {
        "kind": device["kind"],
        "device": device["name"],
        "memory_bytes": device["total_bytes"] if device["kind"] != "cpu" or limit is None else None,
        "slot": slot,
        "versions": {name: versions[name] for name in versions if name not in _NOT_OF_MEMORY},
    }
    return json.dumps(conditions, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
