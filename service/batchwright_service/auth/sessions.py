"""Sessions of the dashboard: each is opened with an API key, ends with the key, and is carried by a cookie."""

import hashlib
import hmac
import re
import secrets
import time

from batchwright_service.auth.api_keys import KeyAuthenticator
from batchwright_service.domain.callers import Caller
from batchwright_service.domain.key_texts import digest_of
from batchwright_service.errors import NotAuthenticatedError
from batchwright_service.fast_path.trusted_callers import TrustedCallers
from batchwright_service.store.sessions import SessionStore

SESSION_SECONDS = 12 * 3600
"""Duration of a session, used or not."""

_TOKEN_BYTES = 32
_TOKEN = re.compile(r"[0-9a-f]{64}")


class Sessions:
    """Open, verify and close sessions. Instances are safe to share between threads, and services may share the store.

    A verified session is trusted for ``TRUST_SECONDS``, even if it is closed elsewhere or its key is revoked.
    """

    def __init__(self, store: SessionStore, key_authenticator: KeyAuthenticator) -> None:
        self._store = store
        self._key_authenticator = key_authenticator
        self._trusted = TrustedCallers(time.monotonic)

    def open(self, key: str, address: str | None = None) -> str:
        """Open a session with an API key, and return its token. Only a digest of the token is stored.

        Raises:
            NotAuthenticatedError: when the key is unknown, revoked or expired.
            StoreUnavailableError: when the store cannot be read or written.
        """
        caller = self._key_authenticator.authenticate(key, local=False)
        token = secrets.token_hex(_TOKEN_BYTES)
        self._store.open(digest_of(token), str(caller.key_id), SESSION_SECONDS, address)
        return token

    def cached_caller(self, token: str) -> Caller | None:
        """Return the caller if it is known without a read of the store, else None. Never blocks."""
        return self._trusted.find(digest_of(token))

    def authenticate(self, token: str) -> Caller:
        """Return the caller of this session. May read, and seldom write, the store.

        Raises:
            NotAuthenticatedError: when the session is unknown, closed or expired, or its key is revoked or expired.
            StoreUnavailableError: when the store cannot be read.
        """
        began, digest = time.monotonic(), digest_of(token)
        found = self._store.find(digest) if _TOKEN.fullmatch(token) else None
        if found is None:
            raise NotAuthenticatedError("this session has ended; sign in again", key_given=True)
        caller = self._key_authenticator.caller_for_key(found.stored)
        self._trusted.add(digest, caller, began, found.seconds_left, found.stored.seconds_left)
        return caller

    def close(self, token: str, address: str | None = None) -> None:
        """Close a session.

        Raises:
            StoreUnavailableError: when the store cannot be written.
        """
        digest = digest_of(token)
        self._trusted.remove(digest)
        self._store.close(digest, address)


def csrf_token_of(token: str) -> str:
    """Return the CSRF token of a session, which its pages send with every change and other sites cannot know."""
    return hmac.new(token.encode("utf-8", "surrogateescape"), b"batchwright csrf", hashlib.sha256).hexdigest()
