"""Sessions of people who are signed in: each rests on an API key, ends with the key, and is carried by a cookie."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable

from service.auth.api_keys import Access
from service.domain.api_keys import Caller, digest_of
from service.errors import NotAuthenticatedError
from service.fast_path.trusted_callers import TrustedCallers
from service.store.interface import SessionStore

SESSION_SECONDS = 12 * 3600
"""How long a session lasts, used or not."""

_TOKEN_BYTES = 32
_TOKEN = re.compile(r"[0-9a-f]{64}")


class Sessions:
    """Open, verify and close sessions. Safe to share between threads; several services may share the store.

    A session is trusted as long as a key is: closed elsewhere, or its key revoked, it works for that long at most.

    Args:
        store: the store of the sessions.
        access: verifies the keys that the sessions rest on.
        clock: seconds that only rise.
    """

    def __init__(self, store: SessionStore, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._access = access
        self._clock = clock
        self._trusted = TrustedCallers(clock)

    def open(self, key: str) -> str:
        """Sign in with an API key, and return the token of the session; only a digest of the token is stored.

        Raises:
            NotAuthenticatedError: when the key is unknown, revoked or expired.
            StoreUnavailableError: when the store cannot be used.
        """
        caller = self._access.admit(key, local=False)
        token = secrets.token_hex(_TOKEN_BYTES)
        self._store.open(digest_of(token), str(caller.key_id), SESSION_SECONDS)
        return token

    def remembered(self, token: str) -> Caller | None:
        """Return the caller, where the store need not be read. Never blocks."""
        return self._trusted.find(digest_of(token))

    def admit(self, token: str) -> Caller:
        """Return the caller who is signed in with this session. May read, and seldom write, the store.

        Raises:
            NotAuthenticatedError: when it is over, was closed or never was, or its key is no longer good.
            StoreUnavailableError: when the store cannot be read.
        """
        began, digest = self._clock(), digest_of(token)
        found = self._store.find(digest) if _TOKEN.fullmatch(token) else None
        if found is None:
            raise NotAuthenticatedError("this session is over: sign in again", key_given=True)
        caller = self._access.caller_with(found.stored)
        self._trusted.add(digest, caller, began, found.seconds_left, found.stored.seconds_left)
        return caller

    def close(self, token: str) -> None:
        """Sign out.

        Raises:
            StoreUnavailableError: when the store cannot be written.
        """
        digest = digest_of(token)
        self._trusted.forget(digest)
        self._store.close(digest)


def csrf_token_of(token: str) -> str:
    """Return the token that pages of a session send with every change, and that no other page can know."""
    return hmac.new(token.encode("utf-8", "surrogateescape"), b"batchwright csrf", hashlib.sha256).hexdigest()
