"""Lists and the overview show what recommendations gain over the baselines that their submissions named."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0017_gain"
down_revision = "0016_search"
branch_labels = None
depends_on = None

_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "speedup": sa.Double(),
    "speed_source": sa.String(16),
    "memory_gain": sa.Double(),
}
_INDEX = "recommendations_gained"


def upgrade() -> None:
    """Add the columns, empty: no stored request has a baseline; and the index of the overview."""
    for name, kind in _COLUMNS.items():
        op.add_column("recommendations", sa.Column(name, kind))
    gained = sa.text("memory_gain IS NOT NULL")
    columns = ["created_at", "model", *_COLUMNS]
    op.create_index(_INDEX, "recommendations", columns, sqlite_where=gained, postgresql_where=gained)


def downgrade() -> None:
    """Drop the index and the columns."""
    op.drop_index(_INDEX, "recommendations")
    for name in _COLUMNS:
        op.drop_column("recommendations", name)
