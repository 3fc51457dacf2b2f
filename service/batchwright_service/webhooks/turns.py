"""Which of the due messages are sent next, so that receivers that hang or are away delay no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import urlsplit

from cachetools import LRUCache

from batchwright_service.store.outbox.deliveries import MOST_TOGETHER, DueDelivery, LeasedDelivery

THREADS = 32
_PROMPT_SECONDS = 2.0
"""Longest time of a prompt answer. Receivers are to take a message at once, and to work on it later."""
_HOSTS_KNOWN = 10_000


class Conduct(IntEnum):
    """How a host answered the last attempt; the best first."""

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
