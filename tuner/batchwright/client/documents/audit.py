"""The audit log: who submitted, cancelled or deleted work, changed keys or webhooks, or signed in. Pure data."""

from datetime import datetime
from enum import StrEnum

from batchwright.client.documents.work import CountedPage
from batchwright.schemas.base import Document, PositiveInt


class AuditAction(StrEnum):
    """A recorded act."""

    SUBMITTED = "submitted"
    """A tuning or job was submitted. Submissions that a stored tuning served made nothing, and are not recorded."""
    RESUMED = "resumed"
    """A job that had ended was queued again."""
    PRIORITIZED = "prioritized"
    """The priority of a waiting tuning or job was changed; `detail` has the new one."""
    CANCELLED = "cancelled"
    """A tuning or job was cancelled."""
    DELETED = "deleted"
    """A tuning or job was deleted."""
    PRUNED = "pruned"
    """Old tunings, jobs or recommendations were deleted by `batchwright admin prune`; `detail` counts them."""
    KEY_CREATED = "key-created"
    """An API key was created; `detail` has its name and scopes."""
    KEY_REVOKED = "key-revoked"
    """An API key was revoked; `detail` has its name."""
    WEBHOOK_CREATED = "webhook-created"
    """A webhook was registered; `detail` has its address."""
    WEBHOOK_ROTATED = "webhook-rotated"
    """A webhook got a new secret; `detail` has its address."""
    WEBHOOK_DELETED = "webhook-deleted"
    """A webhook was deleted; `detail` has its address."""
    SIGNED_IN = "signed-in"
    """A browser session was opened with an API key."""
    SIGNED_OUT = "signed-out"
    """A browser session was closed."""


class AuditEntry(Document):
    """An act, recorded in the transaction that made it. Entries are never changed."""

    id: PositiveInt
    """Number of the entry; rises with time, and may have gaps."""
    at: datetime
    """Time of the act (UTC)."""
    action: AuditAction
    """The act."""
    key_id: str | None = None
    """API key of the caller; none on a service without keys, and for the command line."""
    key_name: str | None = None
    """Name of that key."""
    object_id: str | None = None
    """Identifier of the tuning, job, key or webhook; none where there is none."""
    object_name: str | None = None
    """Name that the tuning or job has now; none where it has none, or is deleted."""
    address: str | None = None
    """Address from which the request came: that of a proxy, where there is one. None for the command line."""
    detail: str | None = None
    """Further words, such as the name of a key. Never a secret."""


class AuditPage(CountedPage[AuditEntry]):
    """A page of the audit log, newest first."""
