"""Use cases of API keys: create, list and revoke. The API and the command line share them."""

from __future__ import annotations

import logging

from service.domain.api_keys import ApiKey, Caller, CreatedKey, KeyList, KeySubmission, is_key_id, make_key
from service.errors import FirstKeyError, NotFoundError, OwnKeyError
from service.store.interface import KeyStore

_log = logging.getLogger(__name__)

_SECONDS_PER_DAY = 86_400.0


class KeyCases:
    """Use cases of API keys. Safe to share between threads.

    The command line calls without a ``caller``: operators who can write to the database may do everything.
    """

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys

    def create(self, submission: KeySubmission, caller: Caller | None = None) -> CreatedKey:
        """Create a key. Only the returned document has its text.

        Raises:
            FirstKeyError: when the caller has no key: any user of this machine could create a lasting key otherwise.
        """
        if caller is not None and caller.key_id is None:
            raise FirstKeyError(
                "create the first API key on the machine of the service, with `batchwright keys create NAME --scope "
                "admin`; from then on every caller needs a key"
            )
        days = submission.expires_in_days
        new, text = make_key(submission.name, submission.scopes, None if days is None else days * _SECONDS_PER_DAY)
        created = self._keys.add(new)
        _log.info("key %s was created %s", created.id, _by(caller))
        return CreatedKey(**dict(created), key=text)

    def list(self) -> KeyList:
        """Return all keys, revoked and expired ones included."""
        return KeyList(items=tuple(self._keys.list()))

    def revoke(self, key_id: str, caller: Caller | None = None) -> ApiKey:
        """Revoke a key. A revoked key stays unchanged. Services refuse the key within five seconds.

        Raises:
            NotFoundError: when no key has this id.
            OwnKeyError: when it is the key of the caller.
        """
        if not is_key_id(key_id):
            raise NotFoundError(f"there is no API key {key_id!r}")
        if caller is not None and caller.key_id == key_id:
            raise OwnKeyError(
                f"{key_id} is the key of this request: revoke it with another key, or with `batchwright keys revoke`"
            )
        ended = self._keys.revoke(key_id)
        _log.info("key %s was revoked %s", key_id, _by(caller))
        return ended


def _by(caller: Caller | None) -> str:
    return "by the command line" if caller is None else f"by key {caller.key_id or '(none)'}"
