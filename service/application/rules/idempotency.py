"""Requests that may be sent twice and act once: the first answer is kept with what it created, and given again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus

from service.errors import IdempotencyKeyInFlightError, IdempotencyKeyReusedError
from service.store.interface import SubmissionStore
from service.store.models import AnsweredBeforeError, FirstAnswer, FirstTime, Idempotency, WorkItem


@dataclass(frozen=True)
class Submitted:
    """What a submission is answered with."""

    work_id: str
    body: str
    """The document, JSON."""
    queued: bool = True
    """Whether it waits now; else it was answered at once."""
    replayed: bool = False
    """Whether this is the answer that was given before under the same idempotency key."""

    @property
    def status(self) -> HTTPStatus:
        """The status of the answer."""
        return HTTPStatus.ACCEPTED if self.queued else HTTPStatus.OK

    def as_first(self, idempotency: Idempotency) -> FirstAnswer:
        """This answer as it is remembered."""
        return FirstAnswer(idempotency.digest, self.work_id, int(self.status), self.body)


Make = Callable[[], Submitted]


class OnceEach:
    """Answers a request that carries an idempotency key once. Safe to share between threads.

    Within this process, a second request with the key of one that is being answered is refused. Between processes the
    store decides: who comes second is given the first answer.
    """

    def __init__(self, submissions: SubmissionStore) -> None:
        self._submissions = submissions
        self._lock = threading.Lock()
        self._in_flight: set[tuple[str, str]] = set()

    def answer(self, idempotency: Idempotency | None, make: Make) -> Submitted:
        """What ``make`` answers, or what was answered before under this key. What it refuses is not remembered.

        Raises:
            IdempotencyKeyReusedError: when another request was answered under the key.
            IdempotencyKeyInFlightError: when a request with the key is being answered.
        """
        if idempotency is None:
            return make()
        with self._alone(idempotency):
            first = self._submissions.first_answer(idempotency.owner, idempotency.key)
            if first is not None:
                return _again(first, idempotency)
            try:
                return make()
            except AnsweredBeforeError as error:
                return _again(error.first, idempotency)

    @contextmanager
    def _alone(self, idempotency: Idempotency) -> Iterator[None]:
        name = idempotency.owner, idempotency.key
        with self._lock:
            if name in self._in_flight:
                raise IdempotencyKeyInFlightError(
                    f"Idempotency-Key {idempotency.key!r}: a request with this key is being answered; send it again"
                )
            self._in_flight.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight.discard(name)


def first_time(idempotency: Idempotency | None, answer: Callable[[WorkItem], Submitted]) -> FirstTime | None:
    """What the store keeps with what it creates; none without a key."""
    if idempotency is None:
        return None
    return FirstTime(idempotency, lambda item: answer(item).as_first(idempotency))


def _again(first: FirstAnswer, idempotency: Idempotency) -> Submitted:
    if first.digest != idempotency.digest:
        raise IdempotencyKeyReusedError(
            f"Idempotency-Key {idempotency.key!r} was used for another request; take a new key for each request"
        )
    answer = Submitted(first.work_id, first.body, queued=first.status == HTTPStatus.ACCEPTED)
    return replace(answer, replayed=True)
