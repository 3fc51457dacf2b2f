"""API keys: scopes, callers, and the parts of a key. Pure data, without a store or HTTP."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from batchwright.schemas.base import Document
from batchwright.schemas.field_errors import described_pattern

_KEY_ID = described_pattern(r"^[0-9a-f]{16}$", "must consist of 16 hexadecimal digits")


class Scope(StrEnum):
    """A permission of a key. `SECURITY.md` lists what each scope allows."""

    TUNINGS_READ = "tunings:read"
    """Read tunings, their evidence, recommendations, devices and GPUs."""
    TUNINGS_WRITE = "tunings:write"
    """Submit tunings and estimates, and cancel the key's own tunings."""
    JOBS_READ = "jobs:read"
    """Read jobs."""
    JOBS_RUN = "jobs:run"
    """Configure and run jobs, and cancel the key's own jobs."""
    ADMIN = "admin"
    """All of the above, cancellation of the work of other keys, and management of API keys."""


class ApiKey(Document):
    """An API key as it is stored and listed. Its secret is stored nowhere."""

    id: Annotated[str, Field(pattern=_KEY_ID)]
    """Public part of the key. Names the key in `revoke`, and the owner of work."""
    prefix: str
    """Start of the key, up to and including its id."""
    name: Annotated[str, Field(min_length=1, max_length=100)]
    """Name that the operator gave the key."""
    scopes: tuple[Scope, ...]
    """Scopes of the key."""
    created_at: datetime
    """Time of creation (UTC)."""
    expires_at: datetime | None = None
    """Time from which the key is refused. None if it never expires."""
    revoked_at: datetime | None = None
    """Time of revocation."""
    last_used_at: datetime | None = None
    """Time of the last use, to within about a minute."""


class KeyList(Document):
    """The API keys of the service."""

    items: tuple[ApiKey, ...]
    """All keys, revoked and expired ones included, oldest first."""


MAX_DAYS = 3650.0
_LONGEST_NAME = 100


def check_name(name: str) -> str:
    """Return the name of a key if it is valid.

    Raises:
        ValueError: when the name is empty, too long, or has characters that cannot be printed.
    """
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise ValueError(f"must have 1 to {_LONGEST_NAME} printable characters (got {name[:_LONGEST_NAME]!r})")
    return name


class KeySubmission(Document):
    """A key to create."""

    name: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), AfterValidator(check_name)]
    """Name of the key, in printable characters."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=len(Scope))]
    """Scopes of the key."""
    expires_in_days: Annotated[float, Field(gt=0.0, le=MAX_DAYS)] | None = None
    """Days until the key expires. Default: it does not expire."""


class CreatedKey(ApiKey):
    """A key that was just created. Only this response shows its text."""

    key: str = Field(repr=False)
    """Text of the key."""
