"""The tables, indexes and triggers of Batchwright 0.1.0.

Lists are searched by substrings, with an index of trigrams. PostgreSQL indexes the searched text where the role may
create the extension ``pg_trgm``, and reads the table elsewhere. SQLite has a table of the module FTS5, kept by
triggers. Its rows are numbered by ``search_entries``: ``VACUUM`` may renumber the rows of tables without an integer
primary key.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_tables = sa.MetaData()
sa.Table(
    "work_items",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("device", sa.String(32), nullable=False),
    sa.Column("slot", sa.String(300)),
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    sa.Column("model", sa.String(300), nullable=False),
    sa.Column("effective_batch_size", sa.BigInteger, nullable=False),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("request_fingerprint", sa.String(64)),
    sa.Column("recommendation_id", sa.String(64)),
    sa.Column("warm_start_from", sa.String(64)),
    sa.Column("key_id", sa.String(16)),
    sa.Column("hardware", sa.String(400)),
    sa.Column("trace_parent", sa.String(64)),
    sa.Column("owner", sa.String(300)),
    sa.Column("token", sa.Integer, nullable=False, server_default="0"),
    sa.Column("claimed_at", sa.BigInteger),
    sa.Column("lease_expires_at", sa.BigInteger),
    sa.Column("expiry_check_at", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("lost_leases", sa.Integer, nullable=False, server_default="0"),
    sa.Column("probe_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("event_count", sa.Integer, nullable=False, server_default="0"),
    sa.Column("device_ms", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.BigInteger),
    sa.Column("ended_at", sa.BigInteger),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("progress", sa.Text),
    sa.Column("result", sa.Text),
    sa.Column("problem", sa.Text),
    sa.Column("problem_code", sa.String(64)),
    sa.Column("name", sa.String(120)),
    sa.Column("project", sa.String(63)),
    sa.Column("labels", sa.Text),
    sa.Column("course", sa.Text),
    sa.Column("sorted_rate", sa.Double, nullable=False, server_default="-1"),
    sa.Column("sorted_peak", sa.BigInteger, nullable=False, server_default="-1"),
)
sa.Table(
    "held_slots",
    _tables,
    sa.Column("slot", sa.String(300), primary_key=True),
    sa.Column("work_id", sa.String(64), sa.ForeignKey("work_items.id", ondelete="CASCADE"), nullable=False),
)
sa.Table(
    "submitters",
    _tables,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("turn", sa.BigInteger, nullable=False, server_default="0"),
)
sa.Table(
    "idempotency_keys",
    _tables,
    sa.Column("owner", sa.String(16), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("work_id", sa.String(64), nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
sa.Table(
    "used_time",
    _tables,
    sa.Column("work_id", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.String(16), nullable=False),
    sa.Column("ended_at", sa.BigInteger, nullable=False),
    sa.Column("device_ms", sa.BigInteger, nullable=False),
)
sa.Table(
    "probes",
    _tables,
    sa.Column("work_id", sa.String(64), sa.ForeignKey("work_items.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("ordinal", sa.Integer, primary_key=True),
    sa.Column("recorded_at", sa.BigInteger, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
sa.Table(
    "events",
    _tables,
    sa.Column("work_id", sa.String(64), sa.ForeignKey("work_items.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
sa.Table(
    "recommendations",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tuning_id", sa.String(64), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("model", sa.String(300), nullable=False),
    sa.Column("device", sa.String(32), nullable=False),
    sa.Column("device_name", sa.String(300), nullable=False),
    sa.Column("feasible", sa.Boolean, nullable=False),
    sa.Column("largest_micro_batch_size", sa.BigInteger),
    sa.Column("gradient_accumulation_steps", sa.BigInteger),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("effective_batch_size", sa.BigInteger, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("precision", sa.String(16), nullable=False, server_default="fp32"),
    sa.Column("objective", sa.String(16), nullable=False, server_default="largest"),
    sa.Column("micro_batch_size", sa.BigInteger),
    sa.Column("name", sa.String(120)),
    sa.Column("project", sa.String(63)),
    sa.Column("labels", sa.Text),
    sa.Column("key_id", sa.String(16)),
    sa.Column("peak_bytes", sa.BigInteger),
    sa.Column("limit_bytes", sa.BigInteger),
    sa.Column("samples_per_second", sa.Double),
    sa.Column("speedup", sa.Double),
    sa.Column("speed_source", sa.String(16)),
    sa.Column("memory_gain", sa.Double),
    sa.Column("conditions", sa.Text),
    sa.Column("request_digest", sa.String(100)),
)
sa.Table(
    "estimate_residuals",
    _tables,
    sa.Column("tuning_id", sa.String(64), primary_key=True),
    sa.Column("hardware", sa.String(400), nullable=False),
    sa.Column("family", sa.String(1000), nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
sa.Table(
    "workers",
    _tables,
    sa.Column("slot", sa.String(300), primary_key=True),
    sa.Column("owner", sa.String(300), nullable=False),
    sa.Column("heartbeat_at", sa.BigInteger, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
    sa.Column("device", sa.String(32)),
    sa.Column("hardware", sa.String(400)),
    sa.Column("lease_ms", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("waits", sa.Boolean, nullable=False, server_default=sa.false()),
)
sa.Table(
    "fleets",
    _tables,
    sa.Column("name", sa.String(400), primary_key=True),
    sa.Column("reported_at", sa.BigInteger, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
sa.Table(
    "api_keys",
    _tables,
    sa.Column("id", sa.String(16), primary_key=True),
    sa.Column("prefix", sa.String(32), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("scopes", sa.String(200), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("revoked_at", sa.BigInteger),
    sa.Column("last_used_at", sa.BigInteger),
)
sa.Table(
    "recommendation_hits",
    _tables,
    sa.Column("hour", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("hits", sa.BigInteger, nullable=False),
    sa.Column("misses", sa.BigInteger, nullable=False),
)
sa.Table(
    "sessions",
    _tables,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.String(16), nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
)
sa.Table(
    "audit_log",
    _tables,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("action", sa.String(16), nullable=False),
    sa.Column("key_id", sa.String(16)),
    sa.Column("key_name", sa.String(100)),
    sa.Column("object_id", sa.String(64)),
    sa.Column("address", sa.String(45)),
    sa.Column("detail", sa.String(300)),
    sqlite_autoincrement=True,
)
sa.Table(
    "webhooks",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("events", sa.String(400), nullable=False),
    sa.Column("project", sa.String(63)),
    sa.Column("secret", sa.String(100), nullable=False),
    sa.Column("previous_secret", sa.String(100)),
    sa.Column("previous_until", sa.BigInteger),
    sa.Column("created_at", sa.BigInteger, nullable=False),
)
sa.Table(
    "webhook_deliveries",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("webhook_id", sa.String(64), nullable=False),
    sa.Column("event", sa.String(32), nullable=False),
    sa.Column("work_id", sa.String(64)),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("next_attempt_at", sa.BigInteger, nullable=False),
    sa.Column("ended_at", sa.BigInteger),
    sa.Column("last_status", sa.Integer),
    sa.Column("last_error", sa.String(500)),
)
sa.Table(
    "health",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("checked_at", sa.BigInteger, nullable=False),
)

_INDEXES = {
    "work_items": {
        "work_items_by_kind": ["kind", "id"],
        "work_items_by_slot": ["kind", "slot", "id"],
        "work_items_by_state": ["kind", "state", "id"],
        "work_items_by_device": ["kind", "device", "id"],
        "work_items_by_model": ["kind", "model", "id"],
        "work_items_by_state_device": ["kind", "state", "device", "id"],
        "work_items_by_state_model": ["kind", "state", "model", "id"],
        "work_items_by_device_model": ["kind", "device", "model", "id"],
        "work_items_by_sorted_rate": ["kind", "sorted_rate", "id"],
        "work_items_by_sorted_peak": ["kind", "sorted_peak", "id"],
        "work_items_by_fingerprint": ["fingerprint", "id"],
        "work_items_by_request_fingerprint": ["request_fingerprint", "id"],
        "work_items_by_recommendation_id": ["recommendation_id"],
        "work_items_by_warm_start_from": ["warm_start_from"],
        "work_items_by_ended_at": ["ended_at"],
        "work_items_by_key": ["key_id", "ended_at"],
        "work_items_counted": ["kind", "state", "slot", "ended_at", "device_ms"],
    },
    "held_slots": {"held_slots_by_work": ["work_id"]},
    "idempotency_keys": {"idempotency_keys_by_age": ["created_at"]},
    "used_time": {"used_time_by_key": ["key_id", "ended_at"]},
    "recommendations": {
        "recommendations_by_fingerprint": ["fingerprint", "id"],
        "recommendations_by_precision_objective": ["precision", "objective", "id"],
        "recommendations_by_model_precision_objective": ["model", "precision", "objective", "id"],
        "recommendations_by_device_precision_objective": ["device", "precision", "objective", "id"],
        "recommendations_by_device_name_precision_objective": ["device_name", "precision", "objective", "id"],
        "recommendations_by_device_model_precision_objective": ["device", "model", "precision", "objective", "id"],
        "recommendations_by_device_name_model_precision_objective": [
            "device_name",
            "model",
            "precision",
            "objective",
            "id",
        ],
        "recommendations_sorted": ["id", "samples_per_second", "peak_bytes"],
        "recommendations_by_conditions": ["conditions", "id"],
        "recommendations_by_request_digest": ["request_digest", "conditions", "id"],
    },
    "estimate_residuals": {"estimate_residuals_by_family": ["hardware", "family", "tuning_id"]},
    "sessions": {"sessions_by_end": ["expires_at"]},
    "audit_log": {
        "audit_log_by_at": ["at"],
        "audit_log_by_action": ["action", "id"],
        "audit_log_by_key_id": ["key_id", "id"],
        "audit_log_by_object_id": ["object_id", "id"],
    },
    "webhook_deliveries": {
        "webhook_deliveries_by_webhook": ["webhook_id", "state", "id"],
        "webhook_deliveries_by_end": ["ended_at"],
    },
}
_QUEUE = ("device", "hardware", "key_id", sa.text("priority DESC"), "created_at", "id", "updated_at")
_GAINS = ["created_at", "model", "speedup", "speed_source", "memory_gain"]
_QUEUED, _HELD, _FAILED = "state = 'QUEUED'", "state IN ('CANCELLING', 'RUNNING')", "state = 'FAILED'"
_AUDIT_REFUSAL = "entries of the audit log are never changed"
_SEARCHED = {
    "work_items": ("name", "project", "labels", "model", "device", "hardware", "fingerprint", "id"),
    "recommendations": ("name", "project", "labels", "model", "device", "device_name", "fingerprint", "id"),
}


def upgrade() -> None:
    """Create everything."""
    _tables.create_all(op.get_bind(), checkfirst=False)
    for table, indexes in _INDEXES.items():
        for name, columns in indexes.items():
            op.create_index(name, table, columns)
    _create_partial_index("work_items_failed", "work_items", ["kind", "problem_code", "ended_at", "id"], _FAILED)
    _create_partial_index("work_items_queued", "work_items", _QUEUE, _QUEUED)
    _create_partial_index("work_items_expiring", "work_items", ["device", "expiry_check_at"], _HELD)
    _create_partial_index("one_run_per_device", "work_items", ["slot"], _HELD, unique=True)
    _create_partial_index("recommendations_gained", "recommendations", _GAINS, "memory_gain IS NOT NULL")
    _create_partial_index("workers_waiting", "workers", ["device", "hardware", "slot"], "waits")
    due = ["next_attempt_at", "webhook_id"]
    _create_partial_index("webhook_deliveries_due", "webhook_deliveries", due, "state = 'pending'")
    if op.get_bind().dialect.name == "sqlite":
        _create_parts_of_sqlite()
    else:
        _create_parts_of_postgresql()


def _create_partial_index(
    name: str, table: str, columns: Sequence[str | sa.TextClause], condition: str, *, unique: bool = False
) -> None:
    where = sa.text(condition)
    op.create_index(name, table, list(columns), unique=unique, sqlite_where=where, postgresql_where=where)


def _create_parts_of_postgresql() -> None:
    """Refuse changes of entries of the audit log, though not their deletion by age; index the searched text."""
    op.execute(
        "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_AUDIT_REFUSAL}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_log_unchanged BEFORE UPDATE ON audit_log "
        "FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()"
    )
    connection = op.get_bind()
    try:
        with connection.begin_nested():
            connection.execute(sa.text("CREATE EXTENSION IF NOT EXISTS pg_trgm"))
    except sa.exc.DBAPIError:  # the role may not, or the server has no such extension
        return
    for table, columns in _SEARCHED.items():
        op.execute(f"CREATE INDEX {table}_search ON {table} USING gin (({_text(columns)}) gin_trgm_ops)")


def _create_parts_of_sqlite() -> None:
    """Refuse changes of entries of the audit log, though not their deletion by age; index the searched text."""
    refusal = f"BEGIN SELECT RAISE(ABORT, '{_AUDIT_REFUSAL}'); END"
    op.execute(f"CREATE TRIGGER audit_log_unchanged BEFORE UPDATE ON audit_log {refusal}")
    op.execute("CREATE TABLE search_entries (number INTEGER PRIMARY KEY, id VARCHAR(64) NOT NULL UNIQUE)")
    op.execute("CREATE VIRTUAL TABLE search_index USING fts5(text, tokenize = 'trigram')")
    for table, columns in _SEARCHED.items():
        new, new_text = "(SELECT number FROM search_entries WHERE id = new.id)", _text(columns, "new.")
        op.execute(
            f"CREATE TRIGGER {table}_search_insert AFTER INSERT ON {table} BEGIN "  # noqa: S608 - constants, here and below
            "INSERT INTO search_entries (id) VALUES (new.id); "
            f"INSERT INTO search_index (rowid, text) VALUES ({new}, {new_text}); END"
        )
        op.execute(
            f"CREATE TRIGGER {table}_search_update AFTER UPDATE OF {', '.join(columns[:-1])} ON {table} BEGIN "  # noqa: S608
            f"UPDATE search_index SET text = {new_text} WHERE rowid = {new}; END"
        )
        op.execute(
            f"CREATE TRIGGER {table}_search_delete AFTER DELETE ON {table} BEGIN "  # noqa: S608
            "DELETE FROM search_index WHERE rowid = (SELECT number FROM search_entries WHERE id = old.id); "
            "DELETE FROM search_entries WHERE id = old.id; END"
        )


def _text(columns: tuple[str, ...], row: str = "") -> str:
    """Return the searched text of a row; a searched word has no space, so that it lies within one column."""
    return "lower(" + " || ' ' || ".join(f"coalesce({row}{name}, '')" for name in columns) + ")"
