"""Check free disk space before a large file is written, and name it when a write fails because the disk is full."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchwright.errors import StorageError
from batchwright.system.temporary_folders import is_in_temporary_folder
from batchwright.units import format_bytes

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the system allows (see `ulimit -f`)",
}
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
"""Error text of Rust libraries (safetensors), which report the errno only in the message."""


def free_bytes(path: Path) -> int | None:
    """Bytes that this process may still write to the disk of ``path``; None if the file system does not report them.

    Args:
        path: a file or a folder, which need not exist yet.
    """
    try:
        disk = os.statvfs(next((parent for parent in (path, *path.parents) if parent.exists()), path))
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def require_space(path: Path, needed_bytes: int) -> None:
    """Check that the disk of ``path`` has ``needed_bytes`` free.

    Raises:
        StorageError: naming the path, the space needed and the space free.
    """
    free = free_bytes(path)
    if free is not None and free < needed_bytes:
        raise _full_disk_error(path, errno.ENOSPC, needed_bytes)


@contextmanager
def translate_full_disk(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Translate errors caused by a full disk, those of libraries included, into a ``StorageError``.

    Args:
        path: the file that is written, by the name that the user knows.
        needed_bytes: its size, if known.

    Raises:
        StorageError: naming the path, the space needed and the space free.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        number = _full_disk_errno(error)
        if number is None:
            raise
        raise _full_disk_error(path, number, needed_bytes) from error


def _full_disk_errno(error: BaseException) -> int | None:
    """Return the errno if a full disk is the root cause of ``error``, else None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            number = cause.errno
        else:
            number = int(found[1]) if (found := _RUST_ERRNO.search(str(cause))) else None
        if number is not None:
            return number if number in _REASONS else None
        cause = cause.__cause__ or cause.__context__
    return None


def _full_disk_error(path: Path, number: int, needed_bytes: int | None) -> StorageError:
    free = free_bytes(path)
    figures = [] if needed_bytes is None else [f"{format_bytes(needed_bytes)} needed"]
    figures += [] if free is None else [f"{format_bytes(free)} free"]
    space = f" ({', '.join(figures)})" if figures else ""
    folder = "set TMPDIR to a folder" if is_in_temporary_folder(path) else "choose a folder"
    return StorageError(
        f"{path} cannot be written: {_REASONS[number]}{space}. Free some space, or {folder} on another disk",
        number,
        needed_bytes or 0,
    )
