"""Idempotent requests: the first response is stored with the work that it created, which retries get again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from batchwright_service.errors import IdempotencyKeyInFlightError, IdempotencyKeyReusedError
from batchwright_service.store.models import (
    DuplicateRequestError,
    Idempotency,
    PendingResponse,
    StoredResponse,
    WorkItem,
)
from batchwright_service.store.submissions import SubmissionStore


@dataclass(frozen=True)
class SubmissionResponse:
    """The response to a submission."""

    work_id: str
    body: str
    """The document, as JSON."""
    queued: bool = True
    """True when the work was queued; false when a stored recommendation served the submission."""
    replayed: bool = False
    """True when this repeats the response to an earlier request with the same idempotency key."""

    @property
    def status(self) -> HTTPStatus:
        """The HTTP status."""
        return HTTPStatus.ACCEPTED if self.queued else HTTPStatus.OK

    def as_stored(self, idempotency: Idempotency) -> StoredResponse:
        """Return the response as it is stored."""
        return StoredResponse(idempotency.digest, self.work_id, int(self.status), self.body)


Respond = Callable[[], SubmissionResponse]


class IdempotentRequests:
    """Process each request with an idempotency key once. Safe to share between threads.

    Within this process, a request whose key belongs to a request in progress is refused. Between processes the store
    decides: the second request gets the response to the first.
    """

    def __init__(self, submissions: SubmissionStore) -> None:
        self._submissions = submissions
        self._lock = threading.Lock()
        self._in_flight: set[tuple[str, str]] = set()

    def respond(self, idempotency: Idempotency | None, respond: Respond) -> SubmissionResponse:
        """Return the response of ``respond``, or the stored one under this key. Errors are not stored.

        Raises:
            IdempotencyKeyReusedError: when the key belongs to another request.
            IdempotencyKeyInFlightError: when a request with the key is in progress.
        """
        if idempotency is None:
            return respond()
        with self._exclusive(idempotency):
            stored = self._submissions.find_response(idempotency.owner, idempotency.key)
            if stored is not None:
                return _replayed(stored, idempotency)
            try:
                return respond()
            except DuplicateRequestError as error:
                return _replayed(error.response, idempotency)

    @contextmanager
    def _exclusive(self, idempotency: Idempotency) -> Iterator[None]:
        name = idempotency.owner, idempotency.key
        with self._lock:
            if name in self._in_flight:
                raise IdempotencyKeyInFlightError(
                    f"Idempotency-Key {idempotency.key!r}: a request with this key is in progress; retry later"
                )
            self._in_flight.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight.discard(name)


def pending_response(
    idempotency: Idempotency | None, respond: Callable[[WorkItem], SubmissionResponse]
) -> PendingResponse | None:
    """Return the response to store with the work that it describes, or None without a key."""
    if idempotency is None:
        return None
    return PendingResponse(idempotency, lambda item: respond(item).as_stored(idempotency))


def _replayed(stored: StoredResponse, idempotency: Idempotency) -> SubmissionResponse:
    if stored.digest != idempotency.digest:
        raise IdempotencyKeyReusedError(
            f"Idempotency-Key {idempotency.key!r} was used for another request; use a new key for each request"
        )
    queued = stored.status == HTTPStatus.ACCEPTED
    return SubmissionResponse(stored.work_id, stored.body, queued=queued, replayed=True)
