"""The texts of API keys: made, recognised and digested. Pure functions, without a store or HTTP."""

import hashlib
import re
import secrets
from dataclasses import dataclass

from batchwright.client.documents.api_keys import Scope

PREFIX = "bw"
"""Start of every key, by which scanners of leaked secrets can recognise it."""


_SECRET_BYTES = 32


_ID_BYTES = 8


_ID = re.compile(r"[0-9a-f]{16}")


_TOKEN = re.compile(rf"{PREFIX}_(?P<id>[0-9a-f]{{16}})_[0-9a-f]{{64}}")


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
