"""Authentication by API key: keys are verified against the store, and then trusted for a few seconds."""

import hmac
import logging
import time
from collections.abc import Callable

from batchwright_service.domain.callers import KEYLESS, Caller
from batchwright_service.domain.key_texts import digest_of, id_in
from batchwright_service.errors import NotAuthenticatedError, StoreUnavailableError
from batchwright_service.fast_path.trusted_callers import TRUST_SECONDS, TrustedCallers
from batchwright_service.store.api_keys import KeyStore
from batchwright_service.store.models import StoredKey

_log = logging.getLogger(__name__)

_USE_RECORDED_EVERY_SECONDS = 60.0
"""Minimum interval between two records of the use of a key."""
_NO_DIGEST = "0" * 64


class KeyAuthenticator:
    """Authenticate callers by API key. Instances are safe to share between threads, and services may share the store.

    A key costs one read in ``TRUST_SECONDS``, and one write a minute.

    Args:
        keys: the store of the keys.
        allow_keyless_local: whether callers on this machine need no key while the store has none.
        clock: monotonic, in seconds.
    """

    def __init__(
        self, keys: KeyStore, *, allow_keyless_local: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = keys
        self._allow_keyless_local = allow_keyless_local
        self._clock = clock
        self._trusted = TrustedCallers(clock)
        self._keys_exist = False
        self._keys_checked_at = -TRUST_SECONDS

    def cached_caller(self, key: str | None, *, local: bool) -> Caller | None:
        """Return the caller if it is known without a read of the store, else None. Never blocks."""
        if key is None:
            return KEYLESS if self._allow_keyless_local and local and self._keys_known_absent() else None
        return self._trusted.find(digest_of(key))

    def authenticate(self, key: str | None, *, local: bool) -> Caller:
        """Return the caller who sent ``key``, or no key. May read, and seldom write, the store.

        Args:
            key: the text of the key.
            local: whether the request comes from this machine.

        Raises:
            NotAuthenticatedError: when the key is missing, unknown, revoked or expired.
            StoreUnavailableError: when the store cannot be read.
        """
        if key is not None:
            return self.cached_caller(key, local=local) or self._verify(key)
        if self.is_open(local=local):
            return KEYLESS
        raise NotAuthenticatedError("send an API key: `Authorization: Bearer bw_...`", key_given=False)

    def is_open(self, *, local: bool) -> bool:
        """Return whether a caller needs no key. May read the store.

        Raises:
            StoreUnavailableError: when the store cannot be read.
        """
        return self._allow_keyless_local and local and not self._have_keys()

    def caller_for_key(self, stored: StoredKey) -> Caller:
        """Return the caller of a verified key, and record the use of the key.

        Raises:
            NotAuthenticatedError: when the key is revoked or expired.
        """
        _check_usable(stored)
        try:
            self._keys.touch(stored.key.id, _USE_RECORDED_EVERY_SECONDS)
        except StoreUnavailableError as error:
            _log.warning("the use of key %s is not recorded: %s", stored.key.id, error)
        return Caller(stored.key.id, frozenset(stored.key.scopes), key_name=stored.key.name)

    def _verify(self, key: str) -> Caller:
        began = self._clock()
        key_id, digest = id_in(key), digest_of(key)
        stored = None if key_id is None else self._keys.find(key_id)
        matches = hmac.compare_digest(_NO_DIGEST if stored is None else stored.digest, digest)
        if stored is None or not matches:
            raise NotAuthenticatedError("this API key is unknown to this service", key_given=True)
        caller = self.caller_for_key(stored)
        self._trusted.add(digest, caller, began, stored.seconds_left)
        return caller

    def _keys_known_absent(self) -> bool:
        """Return whether no key existed recently. The gain (``batchwright_service.fast_path``) is 1.7 without keys."""
        return not self._keys_exist and self._clock() - self._keys_checked_at < TRUST_SECONDS

    def _have_keys(self) -> bool:
        """Return whether any key exists. This stays true, because keys are never deleted."""
        if not self._keys_exist and not self._keys_known_absent():
            began = self._clock()
            self._keys_exist = self._keys.exist()
            self._keys_checked_at = began
        return self._keys_exist


def _check_usable(stored: StoredKey) -> None:
    """Refuse a revoked or expired key. Only a caller with the secret of the key learns that."""
    key = stored.key
    if key.revoked_at is not None:
        raise NotAuthenticatedError(
            f"API key {key.id} was revoked at {key.revoked_at:%Y-%m-%d %H:%M} UTC", key_given=True
        )
    if stored.seconds_left is not None and stored.seconds_left <= 0:
        raise NotAuthenticatedError(f"API key {key.id} expired at {key.expires_at:%Y-%m-%d %H:%M} UTC", key_given=True)
