"""Operators whose values no process of a session has computed: written by each process, read by the session."""

import atexit
import json
import os
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchwright.hardware.uncomputed_kernels import count_uncomputed
from batchwright.system.files import atomic_path

_FOLDER = "uncomputed"


@dataclass(frozen=True, order=True)
class Uncomputed:
    """An operator that was called and not computed.

    Attributes:
        operator: its name with the overload, such as ``aten::add.Tensor``.
        reason: why it was not computed.
        count: how often. A process that ended by ``os._exit`` or a signal has reported at least its first call.
    """

    operator: str
    reason: str
    count: int


def read_uncomputed(folder: Path) -> list[Uncomputed]:
    """Return what the processes of a session have reported in its folder, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    for path in (folder / _FOLDER).glob("*.json"):
        for operator, reason, count in json.loads(path.read_text()):
            counts[operator, reason] += count
    return [Uncomputed(*key, count) for key, count in counts.most_common()]


class UncomputedLog:
    """Count operators of this process, in a file that is rewritten at each new operator and at the end.

    Args:
        folder: the session's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        atexit.register(self._write)
        os.register_at_fork(after_in_child=self._start_child)

    def add(self, operator: str, reason: str) -> None:
        """Count one call."""
        count_uncomputed()
        with self._lock:
            self._counts[operator, reason] += 1
            if self._counts[operator, reason] == 1:
                self._write()

    def _start_child(self) -> None:
        self._counts.clear()
        self._lock = threading.Lock()

    def _write(self) -> None:
        if self._counts and self._folder.is_dir():
            with suppress(OSError), atomic_path(self._folder / _FOLDER / f"{os.getpid()}.json") as path:
                path.write_text(json.dumps([(*key, count) for key, count in self._counts.items()]))
