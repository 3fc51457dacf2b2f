"""Room on a disk: looked up before a large file is written, and named where a write has failed for want of it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuner.errors import StorageError
from tuner.units import format_bytes

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the system allows (see `ulimit -f`)",
}
_FOREIGN = re.compile(r"\(os error (\d+)\)")
"""Of libraries in Rust (safetensors), which hand on the number of an error only in its text."""


def free_bytes(path: Path) -> int | None:
    """Bytes that this process may still write to the disk of ``path``; none where the file system does not tell.

    Args:
        path: a file or a folder, which need not exist yet.
    """
    try:
        disk = os.statvfs(_existing(path))
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def _existing(path: Path) -> Path:
    """The nearest folder above ``path`` that exists, or ``path`` itself."""
    return next((it for it in (path, *path.parents) if it.exists()), path)


def require_space(path: Path, needed_bytes: int) -> None:
    """Refuse to begin to write ``needed_bytes`` to ``path`` where the disk has no room for them.

    Raises:
        StorageError: naming the path, the space needed and the space free.
    """
    free = free_bytes(path)
    if free is not None and free < needed_bytes:
        raise _no_room(path, errno.ENOSPC, needed_bytes)


@contextmanager
def naming_full_disk(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Translate errors that mean a lack of room, a library's own included, into one that names the path and the space.

    Args:
        path: the file that is written, as the user knows its name.
        needed_bytes: its size, where that is known.

    Raises:
        StorageError: naming the path, the space needed and the space free.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        number = _lacks_room(error)
        if number is None:
            raise
        raise _no_room(path, number, needed_bytes) from error


def _lacks_room(error: BaseException) -> int | None:
    """The number of the system's error if a lack of room is at the bottom of ``error``."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else _number_in(str(cause))
        if number is not None:
            return number if number in _CAUSES else None
        cause = cause.__cause__ or cause.__context__
    return None


def _number_in(text: str) -> int | None:
    found = _FOREIGN.search(text)
    return int(found[1]) if found else None


def _no_room(path: Path, number: int, needed_bytes: int | None) -> StorageError:
    free = free_bytes(path)
    figures = [] if needed_bytes is None else [f"{format_bytes(needed_bytes)} needed"]
    figures += [] if free is None else [f"{format_bytes(free)} free"]
    space = f" ({', '.join(figures)})" if figures else ""
    return StorageError(
        f"{path} cannot be written: {_CAUSES[number]}{space}. Make room there, or name a folder on another disk",
        number,
        needed_bytes or 0,
    )
