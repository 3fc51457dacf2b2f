"""Files that appear whole or not at all, folders that one process holds, and the ends of long files."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import BaseFileLock, FileLock, Timeout

from tuner.system.disk_space import naming_full_disk, require_space

_LOCK = ".lock"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Errors of a file system that has no locks."""


@contextmanager
def replacing(path: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """A path beside ``path`` to write to: what is there when the block ends well becomes ``path`` in one durable step.

    A reader, or a restart after a kill at any moment, sees the old file or the new one, never a part. What a killed
    process left of its own attempt at the same file is removed.

    Args:
        path: the file.
        needed_bytes: its size, where that is known beforehand: nothing is written unless the disk has room for it.

    Raises:
        StorageError: when the disk has no room, with the path, the space needed and the space free.
    """
    with naming_full_disk(path, needed_bytes or None):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        require_space(path, needed_bytes)
        beside = _beside(path)
        try:
            yield beside
            with beside.open("rb") as stream:
                os.fsync(stream.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        sync_directory(path.parent)


def try_writing(path: Path) -> None:
    """Find out whether ``path`` could be written with ``replacing``; nothing is left of the attempt.

    Raises:
        OSError: when it could not.
    """
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = _beside(path)
        beside.open("wb").close()
        beside.unlink()
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _remove_leftovers(path: Path) -> None:
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        writer = left.name.split(".")[-2]
        if writer.isdecimal() and not Path("/proc", writer).exists():
            left.unlink(missing_ok=True)


@contextmanager
def appearing_whole(path: Path, needed_bytes: int = 0) -> Iterator[BinaryIO]:
    """A stream whose content becomes ``path`` as with ``replacing``."""
    with replacing(path, needed_bytes) as beside, beside.open("wb") as stream:
        yield stream


def write_atomically(path: Path, content: bytes | str) -> None:
    """Make ``content`` the content of ``path`` in one durable step.

    Raises:
        StorageError: when the disk has no room, with the path, the space needed and the space free.
    """
    encoded = content.encode() if isinstance(content, str) else content
    with appearing_whole(path, len(encoded)) as stream:
        stream.write(encoded)


@contextmanager
def folder_appearing_whole(path: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """A folder to write files into, which becomes ``path`` in one durable step when the block ends well.

    Args:
        path: a folder of this name is replaced; a kill at that moment leaves neither, so name one nothing relies on.
        needed_bytes: the size of its files: nothing is written unless the disk has room for them.

    Raises:
        StorageError: when the disk has no room, with the path, the space needed and the space free.
    """
    with naming_full_disk(path, needed_bytes or None):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.part")
        shutil.rmtree(beside, ignore_errors=True)
        require_space(path, needed_bytes)
        beside.mkdir()
        try:
            yield beside
            _sync_files(beside)
        except BaseException:  # a full disk, say: what there is of it would only take more room
            shutil.rmtree(beside, ignore_errors=True)
            raise
    shutil.rmtree(path, ignore_errors=True)
    beside.rename(path)
    sync_directory(path.parent)


def _sync_files(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    sync_directory(folder)


def sync_directory(directory: Path) -> None:
    """Make a rename inside ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def holding(directory: Path, patience_seconds: float) -> Iterator[bool]:
    """Hold ``directory`` for this process alone during the block, which gets false when another one holds it.

    The kernel lets go when a process ends in whatever way, which may take it a while: that is what the patience is for.
    A process that is forked during the block does not hold the folder.
    """
    lock = FileLock(directory / _LOCK, timeout=patience_seconds, fallback_to_soft=False)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield _acquired(lock)
    finally:
        lock.release()


def _acquired(lock: BaseFileLock) -> bool:
    try:
        lock.acquire()
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # without locks there is nothing to wait for
            raise
    return True


def tail(path: Path, length_bytes: int) -> str:
    """The end of a text file, however long the file is; bytes that are no text are replaced."""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - length_bytes))
        return stream.read(length_bytes).decode(errors="replace").strip()
