"""Idempotent requests: retries get the work of the first request, in its present state."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from batchwright_service.errors import IdempotencyKeyInFlightError, IdempotencyKeyReusedError
from batchwright_service.store.models import DuplicateRequestError, Idempotency, StoredRequest
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


Respond = Callable[[], SubmissionResponse]
Replay = Callable[[StoredRequest], SubmissionResponse]


class IdempotentRequests:
    """Process each request with an idempotency key once. Safe to share between threads.

    Within this process, a request whose key belongs to a request in progress is refused. Between processes the store
    decides: the second request gets the work of the first.
    """

    def __init__(self, submissions: SubmissionStore) -> None:
        self._submissions = submissions
        self._lock = threading.Lock()
        self._in_flight: set[tuple[str, str]] = set()

    def respond(self, idempotency: Idempotency | None, respond: Respond, replay: Replay) -> SubmissionResponse:
        """Return the response of ``respond``, or that of ``replay`` to the stored request under this key.

        Errors are not stored.

        Raises:
            IdempotencyKeyReusedError: when the key belongs to another request.
            IdempotencyKeyInFlightError: when a request with the key is in progress.
        """
        if idempotency is None:
            return respond()
        with self._exclusive(idempotency):
            first = self._submissions.find_request(idempotency.owner, idempotency.key)
            if first is None:
                try:
                    return respond()
                except DuplicateRequestError as error:
                    first = error.first
            if first.digest != idempotency.digest:
                raise IdempotencyKeyReusedError(
                    f"Idempotency-Key {idempotency.key!r} was used for another request; use a new key for each request"
                )
            return replay(first)

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
