"""Lists show the peak, the limit and the throughput of recommendations."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0015_answers"
down_revision = "0014_names"
branch_labels = None
depends_on = None

_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "peak_bytes": sa.BigInteger(),
    "limit_bytes": sa.BigInteger(),
    "samples_per_second": sa.Double(),
}
_BATCH_SIZE = 100


def upgrade() -> None:
    """Add the columns, and fill them from the stored documents."""
    for name, kind in _COLUMNS.items():
        op.add_column("recommendations", sa.Column(name, kind))
    connection = op.get_bind()
    table = sa.table(
        "recommendations",
        sa.column("id", sa.String),
        sa.column("document", sa.Text),
        *(sa.column(name, kind) for name, kind in _COLUMNS.items()),
    )
    next_ones = sa.select(table.c.id, table.c.document).order_by(table.c.id).limit(_BATCH_SIZE)
    last = ""
    while rows := connection.execute(next_ones.where(table.c.id > last)).all():
        for row in rows:
            values = _figures(json.loads(row.document))
            connection.execute(sa.update(table).where(table.c.id == row.id).values(**values))
        last = rows[-1].id


def downgrade() -> None:
    """Drop the columns."""
    for name in _COLUMNS:
        op.drop_column("recommendations", name)


def _figures(document: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the columns for a stored recommendation."""
    headroom = document.get("headroom") or {}
    alternatives = document.get("alternatives") or []
    rates = [plan.get("samples_per_second") for plan in alternatives if plan.get("chosen")]
    return {
        "peak_bytes": headroom.get("peak_bytes"),
        "limit_bytes": headroom.get("limit_bytes"),
        "samples_per_second": rates[0] if rates else None,
    }
