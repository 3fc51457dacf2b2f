"""Callers that were verified a moment ago, so that not each request reads the store for its API key or session.

Gain: 3.6 for recommendations that are read with an API key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cachetools import TLRUCache

from service.domain.api_keys import Caller

TRUST_SECONDS = 3.0
"""How long an answer of the store is trusted: a revoked key works no longer than this."""
_MAX_CALLERS = 1024
"""The keys, or sessions, that are trusted at a time; further ones are verified each time."""


class TrustedCallers:
    """Verified callers, by the digests of their keys or tokens. Safe to share between threads.

    Args:
        clock: seconds that only rise.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._callers: TLRUCache[str, tuple[Caller, float]] = TLRUCache(
            _MAX_CALLERS, ttu=lambda _digest, trusted, _now: trusted[1], timer=clock
        )

    def find(self, digest: str) -> Caller | None:
        """Return the caller with this digest, while it is trusted."""
        with self._lock:
            found = self._callers.get(digest)
        return None if found is None else found[0]

    def add(self, digest: str, caller: Caller, began: float, *seconds_left: float | None) -> None:
        """Trust a caller from ``began`` on, for ``TRUST_SECONDS`` or the least of ``seconds_left``."""
        until = began + min([TRUST_SECONDS, *(left for left in seconds_left if left is not None)])
        with self._lock:
            self._callers[digest] = caller, until

    def forget(self, digest: str) -> None:
        """Trust the caller no more."""
        with self._lock:
            self._callers.pop(digest, None)
