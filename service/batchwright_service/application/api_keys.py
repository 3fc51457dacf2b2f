"""Use cases of API keys: create, list and revoke. The API and the command line share them."""

import hmac
import logging
from pathlib import Path

from batchwright.client.documents.api_keys import ApiKey, CreatedKey, KeyList, KeySubmission, Scope
from batchwright_service.domain.callers import COMMAND_LINE, Caller
from batchwright_service.domain.key_texts import is_key_id, key_from_text, make_key
from batchwright_service.errors import ConfigurationError, ConflictError, FirstKeyError, NotFoundError, OwnKeyError
from batchwright_service.store.api_keys import KeyStore

_log = logging.getLogger(__name__)

_SECONDS_PER_DAY = 86_400.0
_LONGEST_FILE = 1024
_FORMAT = "`bw_`, 16 hexadecimal digits, `_` and 64 hexadecimal digits (BATCHWRIGHT_ADMIN_KEY_FILE)"


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
                "create the first API key on the machine of the service, with `batchwright admin keys create NAME "
                "--scope admin`; from then on every caller needs a key"
            )
        days = submission.expires_in_days
        new, text = make_key(submission.name, submission.scopes, None if days is None else days * _SECONDS_PER_DAY)
        created = self._keys.add(new, caller or COMMAND_LINE)
        _log.info("key %s was created %s", created.id, _by(caller))
        return CreatedKey(**dict(created), key=text)

    def store_admin_key(self, file: Path) -> None:
        """Store the key in a file with the scope `admin`, unless it is stored. Several services may do so at once.

        A revoked key stays revoked.

        Raises:
            ConfigurationError: when the file cannot be read or has no key, or its id is that of another key; the text
                of the key is in no message.
        """
        new = key_from_text(_first_line(file), "admin key file", (Scope.ADMIN,))
        if new is None:
            raise ConfigurationError(f"{file} has no API key in its first line; a key consists of {_FORMAT}")
        try:
            self._keys.add(new)
            _log.info("key %s was stored from %s", new.id, file)
        except ConflictError:
            stored = self._keys.find(new.id)
            if stored is None or not hmac.compare_digest(stored.digest, new.digest):
                raise ConfigurationError(
                    f"the API key in {file} has the id {new.id} of another key: make a new one"
                ) from None

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
                f"{key_id} is the key of this request: revoke it with another key, or with "
                "`batchwright admin keys revoke`"
            )
        ended = self._keys.revoke(key_id, caller or COMMAND_LINE)
        _log.info("key %s was revoked %s", key_id, _by(caller))
        return ended


def _by(caller: Caller | None) -> str:
    return "by the command line" if caller is None else f"by key {caller.key_id or '(none)'}"


def _first_line(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            text = opened.read(_LONGEST_FILE).decode("ascii", "replace")
    except OSError as error:
        raise ConfigurationError(f"the API key in {file} cannot be read: {error.strerror}") from None
    return text.partition("\n")[0].strip()
