"""An audit log that is only added to: who submitted, cancelled, deleted, made or revoked keys, and signed in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018_audit"
down_revision = "0017_gain"
branch_labels = None
depends_on = None

_REFUSED = "entries of the audit log are never changed"


def upgrade() -> None:
    """Create the table, with a trigger that refuses changes of its rows; deletion by age stays possible."""
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("key_id", sa.String(16)),
        sa.Column("key_name", sa.String(100)),
        sa.Column("object_id", sa.String(64)),
        sa.Column("address", sa.String(45)),
        sa.Column("detail", sa.String(300)),
        sqlite_autoincrement=True,
    )
    for columns in (["at"], ["action", "id"], ["key_id", "id"], ["object_id", "id"]):
        op.create_index(f"audit_log_by_{columns[0]}", "audit_log", columns)
    if op.get_bind().dialect.name == "sqlite":
        refusal = f"BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"
        op.execute(f"CREATE TRIGGER audit_log_unchanged BEFORE UPDATE ON audit_log {refusal}")
        return
    op.execute(
        "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSED}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_log_unchanged BEFORE UPDATE ON audit_log "
        "FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()"
    )


def downgrade() -> None:
    """Drop the table and what refuses its changes."""
    op.drop_table("audit_log")
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION refuse_audit_change()")
