"""Write files and folders atomically, lock folders, and read the end of long files."""

import errno
import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from filelock import BaseFileLock, FileLock, Timeout

from batchwright.system.disk_space import require_space, translate_full_disk

_LOCK = ".lock"
_LOCKS_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Errors of a file system without file locks."""
_OVERWRITTEN = re.compile(r"^[^\n]*\r(?![\r\n])", re.MULTILINE)
"""The part of a line that a carriage return goes back over. Only looked for once a line: lines may be long."""


@contextmanager
def atomic_path(path: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; its file replaces ``path`` durably when the block succeeds.

    A reader, or a restart after a kill at any moment, sees the old file or the new one, never a part. Temporary files
    that killed processes left behind are removed.

    Args:
        path: the file.
        needed_bytes: its size, if known; nothing is written unless the disk has that much free.

    Raises:
        StorageError: when the disk is full, with the path, the space needed and the space free.
    """
    with translate_full_disk(path, needed_bytes or None):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            writer = leftover.name.split(".")[-2]
            if writer.isdecimal() and not Path("/proc", writer).exists():
                leftover.unlink(missing_ok=True)
        require_space(path, needed_bytes)
        temporary = _temporary_path(path)
        try:
            yield temporary
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)


def check_writable(path: Path) -> None:
    """Check that ``path`` can be written with ``atomic_path``, leaving nothing behind.

    Raises:
        OSError: when it cannot be written.
    """
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary_path(path)
        temporary.open("wb").close()
        temporary.unlink()
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextmanager
def atomic_writer(path: Path, needed_bytes: int = 0) -> Iterator[BinaryIO]:
    """Yield a stream whose content replaces ``path`` as with ``atomic_path``."""
    with atomic_path(path, needed_bytes) as temporary, temporary.open("wb") as stream:
        yield stream


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace ``path`` with a file of this content, durably. A device or a pipe is written to: /dev/null stays one.

    Raises:
        StorageError: when the disk is full, with the path, the space needed and the space free.
    """
    encoded = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with translate_full_disk(path, len(encoded)):
            path.write_bytes(encoded)
        return
    with atomic_writer(path, len(encoded)) as stream:
        stream.write(encoded)


@contextmanager
def atomic_folder(path: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yield a temporary folder to write files into; it becomes ``path`` durably when the block succeeds.

    Args:
        path: an existing folder of this name is replaced. A kill at that moment leaves neither, so nothing may rely on
            the old one.
        needed_bytes: the size of its files; nothing is written unless the disk has that much free.

    Raises:
        StorageError: when the disk is full, with the path, the space needed and the space free.
    """
    with translate_full_disk(path, needed_bytes or None):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        shutil.rmtree(temporary, ignore_errors=True)
        require_space(path, needed_bytes)
        temporary.mkdir()
        try:
            yield temporary
            for file in temporary.iterdir():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            sync_directory(temporary)
        except BaseException:  # such as a full disk, where a partial folder would only take more space
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename inside ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_directory(directory: Path, timeout_seconds: float) -> Iterator[bool]:
    """Lock ``directory`` for this process during the block; yields False if another process keeps the lock.

    The kernel releases the lock when a process ends in any way. That may take a moment, hence ``timeout_seconds``. A
    process that is forked during the block does not hold the lock.
    """
    lock = FileLock(directory / _LOCK, timeout=timeout_seconds, fallback_to_soft=False)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield _acquire(lock)
    finally:
        lock.release()


def _acquire(lock: BaseFileLock) -> bool:
    try:
        lock.acquire()
    except Timeout:
        return False
    except OSError as error:
        if error.errno not in _LOCKS_UNSUPPORTED:  # without locks there is nothing to wait on
            raise
    return True


class _HasDirectory(Protocol):
    @property
    def directory(self) -> Path: ...


class PathBelow:
    """A path below the ``directory`` of the object that has it as an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: _HasDirectory, _: object = None) -> Path:
        return paths.directory / self._name


def tail(path: Path, length_bytes: int) -> str:
    """Read the end of a program's output, without the rest.

    Bytes that are not UTF-8 are replaced. Of a progress bar the last state is left, as on a terminal.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - length_bytes))
        return _OVERWRITTEN.sub("", stream.read(length_bytes).decode(errors="replace").strip())
