"""Access by API key: keys are verified against the store, and trusted for a moment."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable

from service.domain.api_keys import KEYLESS, Caller, digest_of, id_in
from service.errors import NotAuthenticatedError, StoreUnavailableError
from service.fast_path.trusted_callers import TRUST_SECONDS, TrustedCallers
from service.store.interface import KeyStore
from service.store.models import StoredKey

_log = logging.getLogger(__name__)

_NOTED_EVERY_SECONDS = 60.0
"""How often the use of a key is written down, at most."""
_NO_DIGEST = "0" * 64


class Access:
    """Verify keys. Safe to share between threads; several services may share the store.

    A key costs one read when it was not seen for ``TRUST_SECONDS``, and one write a minute.

    Args:
        keys: the store of the keys.
        keyless_here: whether callers of this machine need no key while the store has none.
        clock: seconds that only rise.
    """

    def __init__(self, keys: KeyStore, *, keyless_here: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._keyless_here = keyless_here
        self._clock = clock
        self._trusted = TrustedCallers(clock)
        self._keys_exist = False
        self._keys_looked_up = -TRUST_SECONDS

    def remembered(self, key: str | None, *, local: bool) -> Caller | None:
        """Return the caller, where the store need not be read. Never blocks."""
        if key is None:
            return KEYLESS if self._keyless_here and local and self._keys_known_absent() else None
        return self._trusted.find(digest_of(key))

    def admit(self, key: str | None, *, local: bool) -> Caller:
        """Return the caller who sends ``key``, or no key at all. May read, and seldom write, the store.

        Args:
            key: the text of the key.
            local: whether the request comes from this machine.

        Raises:
            NotAuthenticatedError: when there is no key, or it is unknown, revoked or expired.
            StoreUnavailableError: when the store cannot be read.
        """
        if key is not None:
            return self.remembered(key, local=local) or self._verify(key)
        if self.is_open(local=local):
            return KEYLESS
        raise NotAuthenticatedError("send an API key: `Authorization: Bearer bw_...`", key_given=False)

    def is_open(self, *, local: bool) -> bool:
        """Tell whether a caller needs no key. May read the store.

        Raises:
            StoreUnavailableError: when the store cannot be read.
        """
        return self._keyless_here and local and not self._look_for_keys()

    def caller_with(self, stored: StoredKey) -> Caller:
        """Return the caller with a key that is known to be theirs, and record the use of the key.

        Raises:
            NotAuthenticatedError: when it is revoked or expired.
        """
        _check_standing(stored)
        self._note_use(stored.key.id)
        return Caller(stored.key.id, frozenset(stored.key.scopes))

    def _verify(self, key: str) -> Caller:
        began = self._clock()
        key_id, digest = id_in(key), digest_of(key)
        stored = None if key_id is None else self._keys.find(key_id)
        same = hmac.compare_digest(_NO_DIGEST if stored is None else stored.digest, digest)
        if stored is None or not same:
            raise NotAuthenticatedError("this API key is not one of this service's", key_given=True)
        caller = self.caller_with(stored)
        self._trusted.add(digest, caller, began, stored.seconds_left)
        return caller

    def _note_use(self, key_id: str) -> None:
        """Record the use of a key for the operator; no request fails for that."""
        try:
            self._keys.touch(key_id, _NOTED_EVERY_SECONDS)
        except StoreUnavailableError as error:
            _log.warning("the use of key %s is not noted: %s", key_id, error)

    def _keys_known_absent(self) -> bool:
        """Tell whether there was no key a moment ago. Gain, as `service.fast_path` defines it: 1.4 without keys."""
        return not self._keys_exist and self._clock() - self._keys_looked_up < TRUST_SECONDS

    def _look_for_keys(self) -> bool:
        """Tell whether there are keys. Once there are, that stays so: rows of keys are never deleted."""
        if not self._keys_exist and not self._keys_known_absent():
            began = self._clock()
            self._keys_exist = self._keys.exist()
            self._keys_looked_up = began
        return self._keys_exist


def _check_standing(stored: StoredKey) -> None:
    """Refuse a key that was good once. Only a caller who has the key learns that.

    Raises:
        NotAuthenticatedError: with the time of the end.
    """
    key = stored.key
    if key.revoked_at is not None:
        raise NotAuthenticatedError(
            f"API key {key.id} was revoked at {key.revoked_at:%Y-%m-%d %H:%M} UTC", key_given=True
        )
    if stored.seconds_left is not None and stored.seconds_left <= 0:
        raise NotAuthenticatedError(f"API key {key.id} expired at {key.expires_at:%Y-%m-%d %H:%M} UTC", key_given=True)
