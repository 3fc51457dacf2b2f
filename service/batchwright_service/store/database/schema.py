"""The tables, in column types that SQLite and PostgreSQL share. Times are integers: milliseconds since 1970 (UTC)."""

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TextClause,
    TypeDecorator,
    false,
    select,
    text,
    true,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import FunctionElement
from typing_extensions import override

from batchwright.client.documents.states import HELD_STATES, State
from batchwright.client.documents.webhooks import DeliveryState
from batchwright_service.errors import NewerDocumentError

DOCUMENT_VERSION = 1
"""Version of stored documents. A release whose documents the release before cannot read raises it (a new field is
enough, since documents forbid unknown fields), and converts those of lower versions in ``StoredDocument``."""
DOCUMENT_HEAD = f'{{"version":{DOCUMENT_VERSION},"document":'
DOCUMENT_TAIL = "}"
"""What stands before and after the JSON of a stored document, for statements that make a document in the database."""


class StoredDocument(TypeDecorator[str]):
    """The JSON of a document, which the database holds with a version.

    Every column of a document has this type, so that statements take and return the JSON alone. Responses and messages
    that are only sent again have none, and neither has ``hardware``, which statements compare with texts of theirs.
    """

    impl = Text
    cache_ok = True

    @override
    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else DOCUMENT_HEAD + value + DOCUMENT_TAIL

    @override
    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else document_in(value)


def document_in(stored: str) -> str:
    """Return the JSON of a stored document.

    Raises:
        NewerDocumentError: when a newer version of Batchwright has stored it.
    """
    if not stored.startswith(DOCUMENT_HEAD):
        raise NewerDocumentError(
            f"the database holds a document of version {json.loads(stored)['version']}, which a newer Batchwright has "
            f"stored; this one reads version {DOCUMENT_VERSION}. Update this installation"
        )
    return stored[len(DOCUMENT_HEAD) : -len(DOCUMENT_TAIL)]


metadata = MetaData()

held_states = sorted(HELD_STATES)
_held = "state IN ({})".format(", ".join(f"'{state}'" for state in held_states))
_queued = f"state = '{State.QUEUED}'"
_failed = f"state = '{State.FAILED}'"

work_items = Table(
    "work_items",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("device", String(32), nullable=False),
    Column("slot", String(300)),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("model", String(300), nullable=False),
    Column("effective_batch_size", BigInteger, nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("request_fingerprint", String(64)),
    Column("recommendation_id", String(64)),
    Column("warm_start_from", String(64)),
    Column("key_id", String(16)),
    Column("hardware", String(400)),
    Column("trace_parent", String(64)),
    Column("owner", String(300)),
    Column("token", Integer, nullable=False, server_default="0"),
    Column("claimed_at", BigInteger),
    Column("lease_expires_at", BigInteger),
    Column("expiry_check_at", BigInteger, nullable=False, server_default="0"),
    Column("lost_leases", Integer, nullable=False, server_default="0"),
    Column("probe_count", Integer, nullable=False, server_default="0"),
    Column("event_count", Integer, nullable=False, server_default="0"),
    Column("device_ms", BigInteger, nullable=False, server_default="0"),
    Column("created_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("ended_at", BigInteger),
    Column("updated_at", BigInteger, nullable=False),
    Column("payload", StoredDocument, nullable=False),
    Column("progress", StoredDocument),
    Column("result", StoredDocument),
    Column("problem", StoredDocument),
    Column("problem_code", String(64)),
    Column("name", String(120)),
    Column("project", String(63)),
    Column("labels", Text),
    Column("course", StoredDocument),
    Column("fresh", Boolean, nullable=False, server_default=false()),
    Column("sorted_rate", Double, nullable=False, server_default="-1"),
    Column("sorted_peak", BigInteger, nullable=False, server_default="-1"),
)
"""Tunings and jobs. The fencing token rises with every claim, so it counts attempts too; ``device_ms`` is the time on
devices of every claim but one that holds, and ``key_id`` the API key that submitted the work (not a foreign key, which
might prevent work from being stored). Work that needs hardware has an empty ``device``, and its lane in ``hardware``. A
lease has not expired before ``expiry_check_at``, which is indexed and changes less often than ``lease_expires_at``:
most renewals change no index. ``sorted_rate`` and ``sorted_peak`` are the samples per second and the peak of the
recommendation, by which lists are sorted, or -1. ``progress`` is the newest update of a job, and what a tuning does now
(a text)."""

is_queued = text(_queued)
is_held = text(_held)
is_failed = text(_failed)
"""Conditions in the text of the indexes below: a database uses a partial index only for a condition with the same text,
not for one with bound parameters."""


def _partial_index(name: str, condition: TextClause, *columns: ColumnElement[Any], unique: bool = False) -> None:
    Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


Index("work_items_by_kind", work_items.c.kind, work_items.c.id)
Index("work_items_by_slot", work_items.c.kind, work_items.c.slot, work_items.c.id)
for _columns in (["state"], ["device"], ["model"], ["state", "device"], ["state", "model"], ["device", "model"]):
    Index("work_items_by_" + "_".join(_columns), *(work_items.c[name] for name in ["kind", *_columns, "id"]))
for _column in ("sorted_rate", "sorted_peak"):
    Index(f"work_items_by_{_column}", work_items.c.kind, work_items.c[_column], work_items.c.id)
for _column in ("fingerprint", "request_fingerprint"):
    Index(f"work_items_by_{_column}", work_items.c[_column], work_items.c.id)
for _column in ("recommendation_id", "warm_start_from", "ended_at"):
    Index(f"work_items_by_{_column}", work_items.c[_column])
Index("work_items_counted", *(work_items.c[name] for name in ("kind", "state", "slot", "ended_at", "device_ms")))
_partial_index(
    "work_items_failed", is_failed, *(work_items.c[name] for name in ("kind", "problem_code", "ended_at", "id"))
)
Index("work_items_by_key", work_items.c.key_id, work_items.c.ended_at)
_partial_index(
    "work_items_queued",
    is_queued,
    work_items.c.device,
    work_items.c.hardware,
    work_items.c.key_id,
    work_items.c.priority.desc(),
    work_items.c.created_at,
    work_items.c.id,
    work_items.c.updated_at,
)
_partial_index("work_items_expiring", is_held, work_items.c.device, work_items.c.expiry_check_at)
_partial_index("one_run_per_device", is_held, work_items.c.slot, unique=True)

held_slots = Table(
    "held_slots",
    metadata,
    Column("slot", String(300), primary_key=True),
    Column("work_id", String(64), ForeignKey("work_items.id", ondelete="CASCADE"), nullable=False),
)
"""The slots that work holds beside its own, while it has several devices of a host: all are taken in one transaction,
and released with the work's lease."""

Index("held_slots_by_work", held_slots.c.work_id)

submitters = Table(
    "submitters",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("turn", BigInteger, nullable=False, server_default="0"),
)
"""Submitters of queued work: ids of API keys, and the empty id for callers without one. Starts of work are numbered
over all submitters; ``turn`` is the number of the submitter's last start, or 0. The least turn is next."""

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("owner", String(16), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("work_id", String(64), nullable=False),
    Column("status", Integer, nullable=False),
)
"""The first request by idempotency key; its work may have been deleted since."""

Index("idempotency_keys_by_age", idempotency_keys.c.created_at)

used_time = Table(
    "used_time",
    metadata,
    Column("work_id", String(64), primary_key=True),
    Column("key_id", String(16), nullable=False),
    Column("ended_at", BigInteger, nullable=False),
    Column("device_ms", BigInteger, nullable=False),
)
"""Device time of deleted work, which still counts towards the quota of its key."""

Index("used_time_by_key", used_time.c.key_id, used_time.c.ended_at)

probes = Table(
    "probes",
    metadata,
    Column("work_id", String(64), ForeignKey("work_items.id", ondelete="CASCADE"), primary_key=True),
    Column("ordinal", Integer, primary_key=True),
    Column("recorded_at", BigInteger, nullable=False),
    Column("document", StoredDocument, nullable=False),
)
"""Results of probes, one per tuning and ordinal."""

events = Table(
    "events",
    metadata,
    Column("work_id", String(64), ForeignKey("work_items.id", ondelete="CASCADE"), primary_key=True),
    Column("id", Integer, primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("document", StoredDocument, nullable=False),
)
"""Events. Ids are numbered per work item under its row lock, so that they become visible in order."""

recommendations = Table(
    "recommendations",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tuning_id", String(64), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("model", String(300), nullable=False),
    Column("device", String(32), nullable=False),
    Column("device_name", String(300), nullable=False),
    Column("feasible", Boolean, nullable=False),
    Column("largest_micro_batch_size", BigInteger),
    Column("gradient_accumulation_steps", BigInteger),
    Column("world_size", Integer, nullable=False),
    Column("effective_batch_size", BigInteger, nullable=False),
    Column("document", StoredDocument, nullable=False),
    Column("precision", String(16), nullable=False, server_default="fp32"),
    Column("objective", String(16), nullable=False, server_default="largest"),
    Column("micro_batch_size", BigInteger),
    Column("name", String(120)),
    Column("project", String(63)),
    Column("labels", Text),
    Column("key_id", String(16)),
    Column("peak_bytes", BigInteger),
    Column("limit_bytes", BigInteger),
    Column("samples_per_second", Double),
    Column("speedup", Double),
    Column("speed_source", String(16)),
    Column("memory_gain", Double),
    Column("conditions", StoredDocument),
    Column("request_digest", String(100)),
    Column("conclusive", Boolean, nullable=False, server_default=true()),
)
"""Recommendations: the documents, and the columns of searches and lists. They may outlive their tuning. ``conditions``
are those under which they hold (``Conditions.text``), ``request_digest`` is of the request without versions, and
``conclusive`` says whether the proof is (``Proof.is_conclusive``)."""

Index("recommendations_by_fingerprint", recommendations.c.fingerprint, recommendations.c.id)
for _columns in ([], ["model"], ["device"], ["device_name"], ["device", "model"], ["device_name", "model"]):
    _walked = [*_columns, "precision", "objective"]
    Index("recommendations_by_" + "_".join(_walked), *(recommendations.c[name] for name in [*_walked, "id"]))

Index("recommendations_sorted", *(recommendations.c[name] for name in ("id", "samples_per_second", "peak_bytes")))
for _columns in (["conditions"], ["request_digest", "conditions"]):
    Index(f"recommendations_by_{_columns[0]}", *(recommendations.c[name] for name in [*_columns, "id"]))
is_infeasible = text("NOT feasible")
_partial_index("recommendations_infeasible", is_infeasible, recommendations.c.id)
is_gained = text("memory_gain IS NOT NULL")
_partial_index(
    "recommendations_gained",
    is_gained,
    *(recommendations.c[name] for name in ("created_at", "model", "speedup", "speed_source", "memory_gain")),
)

estimate_residuals = Table(
    "estimate_residuals",
    metadata,
    Column("tuning_id", String(64), primary_key=True),
    Column("hardware", String(400), nullable=False),
    Column("family", String(1000), nullable=False),
    Column("document", StoredDocument, nullable=False),
)
"""Residuals of estimates, the newest of each hardware and family. They may outlive their tuning."""

Index("estimate_residuals_by_family", *(estimate_residuals.c[name] for name in ("hardware", "family", "tuning_id")))

workers = Table(
    "workers",
    metadata,
    Column("slot", String(300), primary_key=True),
    Column("owner", String(300), nullable=False),
    Column("heartbeat_at", BigInteger, nullable=False),
    Column("document", StoredDocument, nullable=False),
    Column("device", String(32)),
    Column("hardware", String(400)),
    Column("lease_ms", BigInteger, nullable=False, server_default="0"),
    Column("waits", Boolean, nullable=False, server_default=false()),
)
"""Served devices, with the last heartbeats of their workers. A worker that ``waits`` is notified of one piece of queued
work, unless its last heartbeat is older than ``lease_ms``."""

is_waiting = text("waits")
_partial_index("workers_waiting", is_waiting, *(workers.c[name] for name in ("device", "hardware", "slot")))

fleets = Table(
    "fleets",
    metadata,
    Column("name", String(400), primary_key=True),
    Column("reported_at", BigInteger, nullable=False),
    Column("document", StoredDocument, nullable=False),
)
"""The last report of the dispatcher of each cluster; the name is that of the engine with its address."""

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("prefix", String(32), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("name", String(100), nullable=False),
    Column("scopes", String(200), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("revoked_at", BigInteger),
    Column("last_used_at", BigInteger),
)
"""API keys: SHA-256 of their text, never the text. Rows are never deleted: they name the owners of work."""

recommendation_hits = Table(
    "recommendation_hits",
    metadata,
    Column("hour", Integer, primary_key=True, autoincrement=False),
    Column("hits", BigInteger, nullable=False),
    Column("misses", BigInteger, nullable=False),
)
"""Submitted tunings that were served a stored recommendation (hits) or queued (misses), by hours since 1970."""

sessions = Table(
    "sessions",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("key_id", String(16), nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
"""Browser sessions: SHA-256 of the token, never the token, and the API key of the session."""

Index("sessions_by_end", sessions.c.expires_at)

audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=True),
    Column("at", BigInteger, nullable=False),
    Column("action", String(16), nullable=False),
    Column("key_id", String(16)),
    Column("key_name", String(100)),
    Column("object_id", String(64)),
    Column("address", String(45)),
    Column("detail", String(300)),
    sqlite_autoincrement=True,
)
"""Who did what, written in the transaction of the act. A trigger refuses changes of rows (revision 0001)."""

for _columns in (["at"], ["action", "id"], ["key_id", "id"], ["object_id", "id"]):
    Index(f"audit_log_by_{_columns[0]}", *(audit_log.c[name] for name in _columns))

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("url", Text, nullable=False),
    Column("name", String(100), nullable=False),
    Column("events", String(400), nullable=False),
    Column("project", String(63)),
    Column("secret", String(100), nullable=False),
    Column("previous_secret", String(100)),
    Column("previous_until", BigInteger),
    Column("created_at", BigInteger, nullable=False),
)
"""Webhooks. ``events`` are separated by spaces, all of them when empty. The secrets are stored as they are, since they
sign."""

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("webhook_id", String(64), nullable=False),
    Column("event", String(32), nullable=False),
    Column("work_id", String(64)),
    Column("body", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("created_at", BigInteger, nullable=False),
    Column("next_attempt_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("last_status", Integer),
    Column("last_error", String(500)),
)
"""The outbox: messages to webhooks, written in the transaction of the change that they report. ``next_attempt_at`` is
also the end of the lease of an attempt, and ``attempts`` its fencing token. ``webhook_id`` is no foreign key: work ends
also while its webhook is deleted."""

is_pending = text(f"state = '{DeliveryState.PENDING}'")
is_dead = text(f"state = '{DeliveryState.DEAD}'")
_partial_index(
    "webhook_deliveries_due", is_pending, webhook_deliveries.c.next_attempt_at, webhook_deliveries.c.webhook_id
)
Index("webhook_deliveries_by_webhook", *(webhook_deliveries.c[name] for name in ("webhook_id", "state", "id")))
Index("webhook_deliveries_by_end", webhook_deliveries.c.ended_at)

health = Table(
    "health",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("checked_at", BigInteger, nullable=False),
)
"""One row that the readiness check writes."""


class now_ms(FunctionElement[int], ColumnElement[int]):  # noqa: N801 - used like an SQL function
    """The database's own clock, in milliseconds since 1970: hosts need not agree on the time."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _sqlite_now(_element: now_ms, _compiler: SQLCompiler, **_options: object) -> str:
    """Julian days to milliseconds; 2440587.5 is 1970-01-01 (``unixepoch('subsec')`` needs SQLite 3.42)."""
    return "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"


@compiles(now_ms, "postgresql")
def _postgresql_now(_element: now_ms, _compiler: SQLCompiler, **_options: object) -> str:
    """``clock_timestamp`` goes on within a transaction, unlike ``now``."""
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


def now_once() -> ColumnElement[int]:
    """Return the time for comparisons with an indexed column: read once for a statement, so that an index serves.

    PostgreSQL compares ``now_ms`` itself with every row, as its value changes while a statement runs.
    """
    return select(now_ms()).scalar_subquery()
