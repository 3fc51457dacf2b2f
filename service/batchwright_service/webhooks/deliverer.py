"""The deliverer: sends due messages from a few threads of the API's process."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import urlsplit

from cachetools import LRUCache

from batchwright_service.errors import StoreUnavailableError
from batchwright_service.store.outbox.deliveries import MOST_TOGETHER, DeliveryStore, DueDelivery, LeasedDelivery
from batchwright_service.webhooks.sending import Attempt

_log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_FACTOR = 4.0
"""Growth of the pause from one attempt to the next."""
_LONGEST_PAUSE_SECONDS = 21_600.0
_JITTER = 0.2
"""Share by which a pause is longer or shorter by chance: a receiver that was away does not get everything at once."""
_SLACK_SECONDS = 60.0
"""Time of a lease beyond that of an attempt: the name may take long to resolve."""
_PRUNED_EVERY_SECONDS = 3600.0
DELIVERED_KEPT_SECONDS = 7 * 86_400.0
"""Time for which a delivered message stays in the list."""
DEAD_KEPT_SECONDS = 30 * 86_400.0
"""Time for which a message that could not be delivered can be sent again."""


@dataclass(frozen=True)
class Schedule:
    """When failed messages are sent again.

    Attributes:
        attempts: attempts after which a message is dead.
        first_pause_seconds: the pause after the first attempt; each further one is ``_FACTOR`` times as long.
        timeout_seconds: the longest time of an attempt.
    """

    attempts: int
    first_pause_seconds: float
    timeout_seconds: float

    def pause_after(self, attempt: int) -> float | None:
        """Return the seconds from a failed attempt to the next one; None after the last."""
        if attempt >= self.attempts:
            return None
        longest = min(_LONGEST_PAUSE_SECONDS, self.first_pause_seconds * _FACTOR ** (attempt - 1))
        return longest * random.uniform(1 - _JITTER, 1 + _JITTER)


class Deliverer:
    """Deliver messages while it is started. Several services on one database share the messages between them.

    Args:
        store: the outbox.
        send: makes one attempt; an error that it raises is a failed attempt.
        schedule: the number and the times of attempts.
        observe: called with the result of each attempt and the seconds since the event.
    """

    def __init__(
        self,
        store: DeliveryStore,
        send: Callable[[LeasedDelivery], Attempt],
        schedule: Schedule,
        observe: Callable[[str, float], None],
    ) -> None:
        self._store = store
        self._send = send
        self._schedule = schedule
        self._observe = observe
        self._wake = threading.Condition()
        self._stopping = False
        self._turns = Turns()
        self._thread: threading.Thread | None = None
        self._prune_at = 0.0

    def start(self) -> None:
        """Start the thread. Does nothing when it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Begin no further attempt, and wait for those that are under way. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(THREADS, "webhook") as pool:
            while not self._stopping:
                leased = self._lease()
                for each in leased:
                    pool.submit(self._deliver, each)
                self._prune()
                with self._wake:
                    if not leased and not self._stopping:
                        self._wake.wait(_POLL_SECONDS)

    def _lease(self) -> list[LeasedDelivery]:
        with self._wake:
            if not self._turns.free:
                return []
        try:
            leased = self._store.lease(self._schedule.timeout_seconds + _SLACK_SECONDS, self._choose)
        except Exception as error:  # noqa: BLE001 - without this thread no message would be delivered any more
            _log.warning("no message is delivered to webhooks: %s", error)
            return []
        with self._wake:
            for each in leased:
                self._turns.begin(each)
        return leased

    def _choose(self, due: Sequence[DueDelivery]) -> list[str]:
        with self._wake:
            return self._turns.choose(due)

    def _deliver(self, leased: LeasedDelivery) -> None:
        began = time.monotonic()
        attempt = self._attempted(leased)
        seconds = time.monotonic() - began
        try:
            self._record(leased, attempt)
        except StoreUnavailableError as error:
            _log.warning("%s is sent again after its lease, as its result could not be stored: %s", leased.id, error)
        except Exception:  # noqa: BLE001 - the thread serves other messages too
            _log.exception("the result of sending %s could not be stored", leased.id)
        finally:
            with self._wake:
                self._turns.end(leased, answered=attempt.status is not None, seconds=seconds)
                self._wake.notify_all()

    def _attempted(self, leased: LeasedDelivery) -> Attempt:
        if leased.attempt > self._schedule.attempts:  # nothing could record the last attempts
            return Attempt(error="the last attempt was broken off")
        try:
            return self._send(leased)
        except Exception as error:  # noqa: BLE001 - an attempt that does not count would be repeated without an end
            _log.exception("%s could not be sent", leased.id)
            return Attempt(error=f"the message could not be sent: {type(error).__name__}")

    def _record(self, leased: LeasedDelivery, attempt: Attempt) -> None:
        if attempt.error is None and attempt.status is not None:
            self._store.delivered(leased, attempt.status)
            self._observe("delivered", leased.age_seconds)
            return
        pause = self._schedule.pause_after(leased.attempt)
        error = attempt.error or "there was no response"
        self._store.failed(leased, error, attempt.status, pause)
        self._observe("dead" if pause is None else "retried", leased.age_seconds)
        _log.warning("attempt %d to notify %s failed: %s", leased.attempt, leased.webhook_id, error)

    def _prune(self) -> None:
        if time.monotonic() < self._prune_at:
            return
        self._prune_at = time.monotonic() + _PRUNED_EVERY_SECONDS
        try:
            self._store.prune(DELIVERED_KEPT_SECONDS, DEAD_KEPT_SECONDS)
        except Exception as error:  # noqa: BLE001 - as above
            _log.warning("old messages to webhooks are not deleted: %s", error)


THREADS = 32
_PROMPT_SECONDS = 2.0
"""Longest time of a prompt answer. Receivers are to take a message at once, and to work on it later."""
_HOSTS_KNOWN = 10_000


class Conduct(IntEnum):
    """The answer of a host to the last attempt; the best first."""

    PROMPT = 0
    UNKNOWN = 1
    LATE = 2
    """It answered late or not at all."""


_THREADS_FROM = {Conduct.LATE: 4, Conduct.UNKNOWN: 24, Conduct.PROMPT: THREADS}
"""Threads that hosts of this conduct and of a worse one may hold together: the rest is kept for the better ones."""
_TOGETHER_AT_HOST = {Conduct.PROMPT: 4, Conduct.UNKNOWN: 1, Conduct.LATE: 1}
"""Attempts at once at a host, however many webhooks it has."""


@dataclass(frozen=True)
class _Target:
    webhook_id: str
    host: str


class Turns:
    """The attempts under way, and the conduct of hosts. The caller's lock protects it."""

    def __init__(self) -> None:
        self._under_way: Counter[_Target] = Counter()
        self._conduct: LRUCache[str, Conduct] = LRUCache(_HOSTS_KNOWN)

    @property
    def free(self) -> int:
        """Return the number of threads without an attempt."""
        return THREADS - self._under_way.total()

    def choose(self, due: Sequence[DueDelivery]) -> list[str]:
        """Return the ids of the messages to send now, those to prompt hosts first, else in the order of ``due``."""
        planned = self._under_way.copy()
        chosen = []
        for message in sorted(due, key=lambda message: self._conduct_of(host_of(message.url))):
            attempt = _Target(message.webhook_id, host_of(message.url))
            if self._has_room(attempt, planned):
                planned[attempt] += 1
                chosen.append(message.id)
        return chosen

    def begin(self, leased: LeasedDelivery) -> None:
        """Count an attempt."""
        self._under_way[_Target(leased.webhook_id, host_of(leased.url))] += 1

    def end(self, leased: LeasedDelivery, *, answered: bool, seconds: float) -> None:
        """Record the end of an attempt after some seconds, with an answer of any status or without."""
        host = host_of(leased.url)
        self._under_way[_Target(leased.webhook_id, host)] -= 1
        self._under_way += Counter()  # without those at 0
        self._conduct[host] = Conduct.PROMPT if answered and seconds <= _PROMPT_SECONDS else Conduct.LATE

    def _has_room(self, attempt: _Target, planned: Counter[_Target]) -> bool:
        conduct = self._conduct_of(attempt.host)
        same_webhook = sum(count for other, count in planned.items() if other.webhook_id == attempt.webhook_id)
        same_host = sum(count for other, count in planned.items() if other.host == attempt.host)
        if same_webhook >= MOST_TOGETHER or same_host >= _TOGETHER_AT_HOST[conduct]:
            return False
        held = [(self._conduct_of(other.host), count) for other, count in planned.items()]
        shared = (best for best in _THREADS_FROM if best <= conduct)
        return all(sum(count for kind, count in held if kind >= best) < _THREADS_FROM[best] for best in shared)

    def _conduct_of(self, host: str) -> Conduct:
        return self._conduct.get(host, Conduct.UNKNOWN)


def host_of(url: str) -> str:
    """Return the host and port of the address of a webhook, which has both a scheme and a host."""
    return urlsplit(url).netloc.lower()
