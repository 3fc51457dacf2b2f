"""API keys as words: scopes, who calls, and what a key is made of. Pure; no store, no HTTP."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from tuner.schemas.base import Document
from tuner.schemas.field_errors import described_pattern

PREFIX = "bw"
"""What every key begins with, so that scanners of leaked secrets can know it."""

_SECRET_BYTES = 32
_ID_BYTES = 8
_KEY_ID = described_pattern(r"^[0-9a-f]{16}$", "must consist of 16 hexadecimal digits")
_ID = re.compile(r"[0-9a-f]{16}")
_TOKEN = re.compile(rf"{PREFIX}_(?P<id>[0-9a-f]{{16}})_[0-9a-f]{{64}}")


class Scope(StrEnum):
    """What a key may be used for. `SECURITY.md` says what each allows."""

    TUNINGS_READ = "tunings:read"
    """Read tunings, their evidence, recommendations, devices and GPUs."""
    TUNINGS_WRITE = "tunings:write"
    """Submit tunings and estimates, and cancel one's own tunings."""
    JOBS_READ = "jobs:read"
    """Read jobs."""
    JOBS_RUN = "jobs:run"
    """Configure and run jobs, and cancel one's own."""
    ADMIN = "admin"
    """All of the above, cancelling what others submitted, and API keys."""


@dataclass(frozen=True)
class Caller:
    """Who a request comes from."""

    key_id: str | None
    """The key it was made with; none on a service that has no keys."""
    scopes: frozenset[Scope]
    """What it may do."""

    def may(self, scope: Scope) -> bool:
        """Whether the scope was given to it."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_change(self, owner: str | None) -> bool:
        """Whether it may cancel what the key ``owner`` made (none: what was made before there were keys)."""
        return Scope.ADMIN in self.scopes or (owner is not None and owner == self.key_id)


KEYLESS = Caller(key_id=None, scopes=frozenset({Scope.ADMIN}))
"""Anyone on this machine, while the service has no keys."""


class ApiKey(Document):
    """A key as it is stored and listed. What it was made from is nowhere."""

    id: Annotated[str, Field(pattern=_KEY_ID)]
    """Its public part: what `revoke` takes, and what names the owner of work."""
    prefix: str
    """What the key begins with, its id included."""
    name: Annotated[str, Field(min_length=1, max_length=100)]
    """Who or what it is for, in the operator's words."""
    scopes: tuple[Scope, ...]
    """What it may be used for."""
    created_at: datetime
    """When it was made (UTC)."""
    expires_at: datetime | None = None
    """From when on it is refused; never when absent."""
    revoked_at: datetime | None = None
    """When it was revoked."""
    last_used_at: datetime | None = None
    """When it was last used, to within a minute or so."""


class KeyList(Document):
    """The API keys of the service."""

    items: tuple[ApiKey, ...]
    """Every key there ever was, oldest first."""


LONGEST_DAYS = 3650.0
_LONGEST_NAME = 100


def check_name(name: str) -> str:
    """The name of a key, if it can be one.

    Raises:
        ValueError: when it is empty, too long, or would not show as it is.
    """
    if not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise ValueError(f"must have 1 to {_LONGEST_NAME} printable characters; it has {len(name)}")
    return name


class KeySubmission(Document):
    """A key to make."""

    name: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), AfterValidator(check_name)]
    """Who or what it is for, in printable characters."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1, max_length=len(Scope))]
    """What it may be used for."""
    expires_in_days: Annotated[float, Field(gt=0.0, le=LONGEST_DAYS)] | None = None
    """Days until it expires; never when absent."""


class CreatedKey(ApiKey):
    """A key that has just been made: the only time its text is shown."""

    key: str = Field(repr=False)
    """The key itself."""


@dataclass(frozen=True)
class NewKey:
    """A key to store. ``digest`` is all that is kept of its text."""

    id: str
    digest: str
    name: str
    scopes: tuple[Scope, ...]
    expires_in_seconds: float | None = None

    @property
    def prefix(self) -> str:
        """What the key begins with, its id included."""
        return f"{PREFIX}_{self.id}"


def make_key(name: str, scopes: tuple[Scope, ...], expires_in_seconds: float | None = None) -> tuple[NewKey, str]:
    """A key to store, and its text: prefix, id and a secret of 256 random bits."""
    key_id = secrets.token_hex(_ID_BYTES)
    text = f"{PREFIX}_{key_id}_{secrets.token_hex(_SECRET_BYTES)}"
    return NewKey(key_id, digest_of(text), name, tuple(dict.fromkeys(scopes)), expires_in_seconds), text


def digest_of(text: str) -> str:
    """SHA-256 of a key's text, in hexadecimal. With 256 random bits in it no slower hash is needed."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def is_key_id(text: str) -> bool:
    """Whether this service could have made a key with that id."""
    return _ID.fullmatch(text) is not None


def id_in(text: str) -> str | None:
    """The id in the text of a key; none when it has not the shape of one."""
    found = _TOKEN.fullmatch(text)
    return None if found is None else found["id"]
