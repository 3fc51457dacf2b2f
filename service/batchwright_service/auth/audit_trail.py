"""Read the audit log, and delete its entries after their retention."""

import logging
import re
import threading

from batchwright.client.documents.audit import AuditPage
from batchwright_service.errors import InvalidCursorError, StoreUnavailableError
from batchwright_service.store.database.audit_log import AuditStore
from batchwright_service.store.models import AuditFilter

_log = logging.getLogger(__name__)
_CURSOR = re.compile(r"a([1-9][0-9]{0,17})")
_PRUNED_EVERY_SECONDS = 3600.0
_SECONDS_PER_DAY = 86_400.0


class AuditTrail:
    """The audit log as administrators read it. Safe to share between threads."""

    def __init__(self, store: AuditStore) -> None:
        self._store = store

    def page(self, wanted: AuditFilter, limit: int, cursor: str | None = None, *, total: bool = False) -> AuditPage:
        """Return a page of the matching entries, newest first, with their number where ``total`` asks for it.

        Raises:
            InvalidCursorError: when the cursor is not of this list.
        """
        found = None if cursor is None else _CURSOR.fullmatch(cursor)
        if cursor is not None and found is None:
            raise InvalidCursorError("cursor: pass `next_cursor` of the previous page, unchanged")
        entries = self._store.newest(wanted, limit + 1, None if found is None else int(found[1]))
        following = f"a{entries[limit - 1].id}" if len(entries) > limit else None
        count = self._store.count(wanted) if total else None
        return AuditPage(items=tuple(entries[:limit]), next_cursor=following, total=count)


class AuditRetention:
    """Delete old entries every hour, in a thread of its own. Several services on one database may do so at once."""

    def __init__(self, store: AuditStore, days: float) -> None:
        self._store = store
        self._days = days
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Does nothing when it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="audit-retention", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for the deletion that it is in. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                if deleted := self._store.prune(self._days * _SECONDS_PER_DAY):
                    _log.info("%s entries of the audit log were deleted: older than %s days", deleted, self._days)
            except StoreUnavailableError as error:
                _log.warning("old entries of the audit log are not deleted: %s", error)
            if self._stopping.wait(_PRUNED_EVERY_SECONDS):
                return
