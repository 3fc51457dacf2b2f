"""Identifiers that sort by creation time: a prefix, then a UUID version 7 as 32 hexadecimal digits."""

import secrets
import threading
import time
from collections.abc import Callable

_RANDOM_BITS = 62
_VERSION_AND_VARIANT = (7 << 76) | (2 << 62)


class IdentifierSource:
    """Create identifiers. Those of one source sort by creation, also within a millisecond."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = 0

    def new(self, prefix: str) -> str:
        """Create ``tun_0192f3...``: ``prefix``, an underscore and 32 hexadecimal digits.

        They are 48 bits of milliseconds, 12 bits of a millisecond's fraction (RFC 9562, method 3), and 62 random bits.
        """
        with self._lock:
            ticks = (self._clock() << 12) // 1_000_000
            self._last = max(ticks, self._last + 1)
            milliseconds, fraction = divmod(self._last, 1 << 12)
        number = (milliseconds << 80) | _VERSION_AND_VARIANT | (fraction << 64) | secrets.randbits(_RANDOM_BITS)
        return f"{prefix}_{number:032x}"
