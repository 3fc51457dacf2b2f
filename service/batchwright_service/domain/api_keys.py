"""API keys: scopes, callers, and the parts of a key. Pure data, without a store or HTTP."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from batchwright.schemas.base import Document
from batchwright.schemas.field_errors import described_pattern
from batchwright_service.domain.audit import Actor

PREFIX = "bw"
"""Start of every key, by which scanners of leaked secrets can recognise it."""

_SECRET_BYTES = 32
_ID_BYTES = 8
_KEY_ID = described_pattern(r"^[0-9a-f]{16}$", "must consist of 16 hexadecimal digits")
_ID = re.compile(r"[0-9a-f]{16}")
_TOKEN = re.compile(rf"{PREFIX}_(?P<id>[0-9a-f]{{16}})_[0-9a-f]{{64}}")


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


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    key_id: str | None
    """Id of the API key of the request; none on a service that has no keys."""
    scopes: frozenset[Scope]
    """Scopes of the caller."""
    address: str | None = None
    """Address from which the request came, where a route may change something; none where that is not known."""

    @property
    def actor(self) -> Actor:
        """The caller as the audit log names it."""
        return Actor(self.key_id, self.address)

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has the scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_change(self, owner: str | None) -> bool:
        """Return whether the caller may change work of the key ``owner`` (none: work from before there were keys)."""
        return Scope.ADMIN in self.scopes or (owner is not None and owner == self.key_id)


KEYLESS = Caller(key_id=None, scopes=frozenset({Scope.ADMIN}))
"""Any caller on this machine, while the service has no keys."""


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
    """Time from which the key is refused. It does not expire when absent."""
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
        raise ValueError(f"must have 1 to {_LONGEST_NAME} printable characters; it has {len(name)}")
    return name


class KeySubmission(Document):
    """A key to create."""

    name: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), AfterValidator(check_name)]
    """Name of the key, in printable characters."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=len(Scope))]
    """Scopes of the key."""
    expires_in_days: Annotated[float, Field(gt=0.0, le=MAX_DAYS)] | None = None
    """Days until the key expires. It does not expire when absent."""


class CreatedKey(ApiKey):
    """A key that was just created. Only this response shows its text."""

    key: str = Field(repr=False)
    """Text of the key."""


@dataclass(frozen=True)
class NewKey:
    """A key to store. Of its text only the digest is stored."""

    id: str
    digest: str
    name: str
    scopes: tuple[Scope, ...]
    expires_in_seconds: float | None = None

    @property
    def prefix(self) -> str:
        """Start of the key, up to and including its id."""
        return f"{PREFIX}_{self.id}"


def make_key(name: str, scopes: tuple[Scope, ...], expires_in_seconds: float | None = None) -> tuple[NewKey, str]:
    """Create a key to store, and its text: prefix, id and a secret of 256 random bits."""
    key_id = secrets.token_hex(_ID_BYTES)
    text = f"{PREFIX}_{key_id}_{secrets.token_hex(_SECRET_BYTES)}"
    return NewKey(key_id, digest_of(text), name, tuple(dict.fromkeys(scopes)), expires_in_seconds), text


def key_from_text(text: str, name: str, scopes: tuple[Scope, ...]) -> NewKey | None:
    """Return a key to store whose text was chosen beforehand, or None when the text has not the format of a key."""
    key_id = id_in(text)
    return None if key_id is None else NewKey(key_id, digest_of(text), name, scopes)


def digest_of(text: str) -> str:
    """Return the SHA-256 of a key's text, in hexadecimal. Its 256 random bits make a slower hash unnecessary."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def is_key_id(text: str) -> bool:
    """Return whether ``text`` has the format of a key's id."""
    return _ID.fullmatch(text) is not None


def id_in(text: str) -> str | None:
    """Return the id in the text of a key, or None when the text has not the format of a key."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else found["id"]
