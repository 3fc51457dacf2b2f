"""The first reading of data, before the first probe of a tuning: it ends within a minute or so.

All samples are read where there is time. Else a sample of them is: as many as the time allows, spread over the data; or
the first rows, where rows are encoded in order or the files are large.
"""

import os
import shutil
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from batchwright.errors import BatchwrightError
from batchwright.system.reading_progress import ReadingProgress
from batchwright.training.data.base import place_of
from batchwright.workloads.base import Samples

LARGEST_BYTES = 2**30
"""Bytes of files that are read: `datasets` copies as many in 10 to 20 s."""
_SHARE_OF_DISK = 4
"""The copies may take this part of the free space."""
_STRIDE = 61
"""Samples are read at this distance, from the first on, then from the second on, and so on."""


class TimeIsUpError(BatchwrightError):
    """The time of a first reading is up, or its files are too large to read a part of them."""


@dataclass
class FirstReading:
    """The bounds of a first reading, and how far it has come."""

    deadline: float
    """End of its time, on the monotonic clock."""
    progress: Path
    """File of a ``ReadingProgress``."""
    read: int = 0
    """Samples, rows or bytes that have been read."""
    total: int | None = None
    """Number of all; None if it is not known."""
    unit: str = "samples"
    """What is counted: `samples`, `rows` or `bytes`."""
    is_partial: bool = False
    """True if only the first rows of the files are read."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, at least one."""
        return max(1.0, self.deadline - time.monotonic())

    def count(self, read: int, total: int, unit: str) -> None:
        """Record how many have been read of all.

        Raises:
            TimeIsUpError: when some are left, and the time is up.
        """
        self.read, self.total, self.unit = read, None if self.is_partial else total, unit
        self.progress.write_bytes(ReadingProgress(-1, read, total).packed())
        if read < total and time.monotonic() > self.deadline:
            raise TimeIsUpError("the time of the reading was up")

    def read_samples(self, parts: Sequence[Samples]) -> None:
        """Read the samples of all parts, until the time is up."""
        total = sum(map(len, parts))
        self.count(0, total, "samples")
        with self.progress.open("r+b", buffering=0) as stream:
            for number in (number for first in range(_STRIDE) for number in range(first, total, _STRIDE)):
                if time.monotonic() > self.deadline:
                    return
                os.pwrite(stream.fileno(), ReadingProgress(number, self.read, total).packed(), 0)
                part, index = _at(parts, number)
                part[index]
                self.read += 1

    def first_bytes(self, paths: Sequence[Path], folder: Path, *, of_lines: bool) -> dict[Path, Path]:
        """The files, or where they are too large the first ones, and a copy of the first lines of another.

        Args:
            paths: the files.
            folder: where a copy is made.
            of_lines: whether each line is a row.

        Returns:
            The paths of the files by those to read.

        Raises:
            TimeIsUpError: when the first file is too large to be read in part.
        """
        folder.mkdir(parents=True, exist_ok=True)
        room = min(LARGEST_BYTES, shutil.disk_usage(folder).free // _SHARE_OF_DISK)
        found: dict[Path, Path] = {}
        for path in paths:
            size = path.stat().st_size
            if size > room:
                self.is_partial = True
                if of_lines and (head := _head(path, room)):
                    copy = folder / f"first-{path.name}"
                    copy.write_bytes(head)
                    found[copy] = path
                break
            found[path] = path
            room -= size
        if not found:
            raise TimeIsUpError(f"{paths[0]} is too large")
        return found


def _head(path: Path, size: int) -> bytes:
    """Whole lines at the begin of a file; none of a JSON array."""
    with path.open("rb") as stream:
        content = stream.read(size)
    return b"" if content.startswith(b"[") else content[: content.rfind(b"\n") + 1]


def place_in(parts: Sequence[Samples], number: int) -> str:
    """Name the sample with a number among those of all parts."""
    part, index = _at(parts, number)
    return place_of(part, index)


def _at(parts: Sequence[Samples], number: int) -> tuple[Samples, int]:
    ends = list(accumulate(map(len, parts)))
    part = bisect_right(ends, number)
    return parts[part], number - (ends[part - 1] if part else 0)
