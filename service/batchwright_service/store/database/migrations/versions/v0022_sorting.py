"""Lists of tunings and jobs are sorted by the figures of recommendations through an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022_sorting"
down_revision = "0021_course"
branch_labels = None
depends_on = None

_COLUMNS: dict[str, tuple[str, sa.types.TypeEngine[float] | sa.types.TypeEngine[int]]] = {
    "sorted_rate": ("samples_per_second", sa.Double()),
    "sorted_peak": ("peak_bytes", sa.BigInteger()),
}


def upgrade() -> None:
    """Add the columns, fill them from the recommendations, and index them."""
    for name, (figure, kind) in _COLUMNS.items():
        op.add_column("work_items", sa.Column(name, kind, nullable=False, server_default="-1"))
        found = f"SELECT {figure} FROM recommendations WHERE recommendations.id = work_items.recommendation_id"  # noqa: S608 - columns
        op.execute(f"UPDATE work_items SET {name} = coalesce(({found}), -1) WHERE recommendation_id IS NOT NULL")  # noqa: S608 - as above
        op.create_index(f"work_items_by_{name}", "work_items", ["kind", name, "id"])


def downgrade() -> None:
    """Drop the indexes and the columns."""
    for name in _COLUMNS:
        op.drop_index(f"work_items_by_{name}", "work_items")
        op.drop_column("work_items", name)
