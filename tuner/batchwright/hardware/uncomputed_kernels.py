"""Count the kernels of this process whose values nobody computes: a virtual card leaves out those of large tensors.

On any other device the count stays 0.
"""

import threading


class _Count:
    """A number that several threads raise."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def raise_by_one(self) -> None:
        with self._lock:
            self.value += 1


_count = _Count()


def count_uncomputed() -> None:
    """Count one call of a kernel without values."""
    _count.raise_by_one()


def uncomputed_kernels() -> int:
    """Return how many calls were counted so far, in this process and in those that it was forked from."""
    return _count.value
