"""Keep no response under an idempotency key: a retry gets a document of the work as it is then."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the stored bodies; the work and the status of each response stay."""
    op.drop_column("idempotency_keys", "body")
