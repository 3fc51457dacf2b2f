"""API keys: making, listing and revoking them. The API and the command line do it alike."""

from __future__ import annotations

import logging

from service.domain.api_keys import ApiKey, Caller, CreatedKey, KeyList, KeySubmission, is_key_id, make_key
from service.errors import FirstKeyError, NotFoundError, OwnKeyError
from service.store.interface import KeyStore

_log = logging.getLogger(__name__)

_SECONDS_PER_DAY = 86_400.0


class KeyCases:
    """What callers can do with keys. Safe to share between threads.

    An operator who can write to the database has no key to show: ``caller`` is left out then, and nothing refused.
    """

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    def create(self, submission: KeySubmission, caller: Caller | None = None) -> CreatedKey:
        """Make a key: the answer is the only place where its text ever is.

        Raises:
            FirstKeyError: when the caller has none: whoever is on this machine would keep the key for good.
        """
        if caller is not None and caller.key_id is None:
            raise FirstKeyError(
                "the first API key is made on the machine of the service, with `batchwright keys create NAME --scope "
                "admin`; from then on every caller needs a key"
            )
        days = submission.expires_in_days
        new, text = make_key(submission.name, submission.scopes, None if days is None else days * _SECONDS_PER_DAY)
        made = self._keys.add(new)
        _log.info("key %s was made %s", made.id, _by(caller))
        return CreatedKey(**dict(made), key=text)

    def list(self) -> KeyList:
        """Every key there ever was."""
        return KeyList(items=tuple(self._keys.list()))

    def revoke(self, key_id: str, caller: Caller | None = None) -> ApiKey:
        """End a key for good; one that is revoked stays as it is. Services refuse it within five seconds.

        Raises:
            NotFoundError: when there is none with this id.
            OwnKeyError: when it is the caller's own.
        """
        if not is_key_id(key_id):
            raise NotFoundError(f"there is no API key {key_id!r}")
        if caller is not None and caller.key_id == key_id:
            raise OwnKeyError(
                f"{key_id} is the key of this call: revoke it with another one, or with `batchwright keys revoke`"
            )
        ended = self._keys.revoke(key_id)
        _log.info("key %s was revoked %s", key_id, _by(caller))
        return ended


def _by(caller: Caller | None) -> str:
    return "by the command" if caller is None else f"by key {caller.key_id or '(none)'}"
