"""People who are signed in: a session rests on an API key, ends with it, and is carried by a cookie."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable

from service.auth.api_keys import Access, Trusted
from service.domain.api_keys import Caller, digest_of
from service.errors import NotAuthenticatedError
from service.store.interface import SessionStore

SESSION_SECONDS = 12 * 3600
"""How long a session lasts, used or not."""

_TOKEN_BYTES = 32
_TOKEN = re.compile(r"[0-9a-f]{64}")


class Sessions:
    """Opens, verifies and closes sessions. Safe to share between threads; several services may share the store.

    A session is trusted as long as a key is: closed elsewhere, or its key revoked, it works for that long at most.

    Args:
        store: where the sessions are.
        access: what verifies the keys they rest on.
        clock: seconds that only rise.
    """

    def __init__(self, store: SessionStore, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._access = access
        self._clock = clock
        self._trusted = Trusted(clock)

    def open(self, key: str) -> str:
        """Sign in with an API key; the session's token, of which only a digest is stored.

        Raises:
            NotAuthenticatedError: when the key is unknown, revoked or expired.
            StoreUnavailableError: when the store cannot be used.
        """
        caller = self._access.admit(key, local=False)
        token = secrets.token_hex(_TOKEN_BYTES)
        self._store.open(digest_of(token), str(caller.key_id), SESSION_SECONDS)
        return token

    def remembered(self, token: str) -> Caller | None:
        """The caller, where no look into the store is needed. Never blocks."""
        return self._trusted.find(digest_of(token))

    def admit(self, token: str) -> Caller:
        """Who is signed in with this session. May read, and seldom write, the store.

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
    """What pages of a session show when they act, and pages of others cannot know."""
    return hmac.new(token.encode("utf-8", "surrogateescape"), b"batchwright csrf", hashlib.sha256).hexdigest()
