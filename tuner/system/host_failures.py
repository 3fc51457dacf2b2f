"""Trouble of a host: system errors that are no fault of the work, distinguished from the work's own. No torch.

The only place that knows them, as ``tuner.hardware.failures`` is the only place that knows an OOM.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tuner.errors import HostTroubleError, StorageError
from tuner.units import format_bytes


class Cause(StrEnum):
    """Kinds of trouble: stable words."""

    DISK_FULL = "disk-full"
    READ_ONLY = "read-only"
    INPUT_OUTPUT = "input-output"
    PERMISSION = "permission"
    MISSING = "missing"
    DESCRIPTORS = "descriptors"
    PROCESSES = "processes"
    MEMORY = "memory"
    DEVICE = "device"


_BY_NUMBER = {
    errno.ENOSPC: Cause.DISK_FULL,
    errno.EDQUOT: Cause.DISK_FULL,
    errno.EROFS: Cause.READ_ONLY,
    errno.EIO: Cause.INPUT_OUTPUT,
    errno.ESTALE: Cause.INPUT_OUTPUT,  # a file of NFS whose server has forgotten it
    errno.EREMOTEIO: Cause.INPUT_OUTPUT,
    errno.ENXIO: Cause.INPUT_OUTPUT,
    errno.ENODEV: Cause.INPUT_OUTPUT,
    errno.ENOTCONN: Cause.INPUT_OUTPUT,  # a FUSE mount whose process has ended
    errno.EACCES: Cause.PERMISSION,
    errno.EPERM: Cause.PERMISSION,
    errno.ENOENT: Cause.MISSING,  # a folder or an interpreter that was removed or unmounted
    errno.ENOTDIR: Cause.MISSING,
    errno.EEXIST: Cause.MISSING,  # a file in the place of a folder
    errno.EMFILE: Cause.DESCRIPTORS,
    errno.ENFILE: Cause.DESCRIPTORS,
    errno.EAGAIN: Cause.PROCESSES,  # fork(2) at a limit on processes
    errno.ENOMEM: Cause.MEMORY,
}
_BY_MESSAGE = {
    "No space left on device": Cause.DISK_FULL,
    "Disk quota exceeded": Cause.DISK_FULL,
    "database or disk is full": Cause.DISK_FULL,  # SQLite
    "Read-only file system": Cause.READ_ONLY,
    "Input/output error": Cause.INPUT_OUTPUT,
    "Too many open files": Cause.DESCRIPTORS,
    "can't start new thread": Cause.PROCESSES,  # CPython's threading
    "Resource temporarily unavailable": Cause.PROCESSES,
}
"""Words of errors that carry no number: of safetensors, of torch, or of another process."""
_OF_DISKS = frozenset({Cause.DISK_FULL, Cause.READ_ONLY, Cause.INPUT_OUTPUT})


@dataclass(frozen=True)
class Trouble:
    """A lack of a host: its cause, and a message that names the lack."""

    cause: Cause
    message: str
    needed_bytes: int = 0
    """Room on the disk without which the work cannot go on, where that is known."""

    @property
    def of_disk(self) -> bool:
        """Return whether a disk is at fault. Every process of a host meets that, unlike a limit of one process."""
        return self.cause in _OF_DISKS


def trouble_of(error: BaseException | None) -> Trouble | None:
    """The trouble of the host that ``error``, or what it was raised from, tells of; none for any other error."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if (found := _trouble_of_one(error)) is not None:
            return found
        seen.append(error)
        error = error.__cause__
    return None


def _trouble_of_one(error: BaseException) -> Trouble | None:
    if isinstance(error, HostTroubleError):
        return Trouble(Cause(error.cause), str(error), error.needed_bytes)
    cause = _cause_of(error)
    needed = error.needed_bytes if isinstance(error, StorageError) else 0
    return None if cause is None else Trouble(cause, _in_words(error), needed)


def _cause_of(error: BaseException) -> Cause | None:
    if isinstance(error, MemoryError):
        return Cause.MEMORY
    if isinstance(error, OSError) and error.errno is not None:
        return _BY_NUMBER.get(error.errno)
    if any(base.__name__ == "NVMLError" for base in type(error).__mro__):
        return Cause.DEVICE
    if isinstance(error, (OSError, RuntimeError)) or type(error).__name__ == "SafetensorError":
        return cause_in(str(error))
    return None


def cause_in(message: str) -> Cause | None:
    """The trouble that the words of an error tell of; none when they tell of something else."""
    return next((cause for words, cause in _BY_MESSAGE.items() if words.lower() in message.lower()), None)


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, StorageError):
        place = f" ({error.filename})" if error.filename else ""
        return f"{os.strerror(error.errno)}{place}"
    return str(error).strip() or type(error).__name__


# --- disks ---


@dataclass(frozen=True)
class Room:
    """How full the disk of a folder is, and how much of that the folder itself takes. Bytes."""

    total: int
    free: int
    own: int

    @property
    def used_by_others(self) -> int:
        """Bytes on the disk beside the folder."""
        return self.total - self.free - self.own


def room_of(folder: Path) -> Room:
    """Measure the disk of a folder that exists.

    Raises:
        OSError: when it cannot be read.
    """
    disk = shutil.disk_usage(folder)
    return Room(total=disk.total, free=disk.free, own=_size_of(folder))


def _size_of(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk; files that vanish meanwhile count for nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += 512 * os.lstat(os.path.join(root, name)).st_blocks  # noqa: PTH118 - there may be thousands
            except FileNotFoundError:
                continue
    return total


def filled_by_itself(before: Room, now: Room, needed_bytes: int) -> bool:
    """Tell a run that filled its disk with its own files from one whose disk others have filled.

    A run is at fault when the disk is too small for what it writes at once, or when it would have had room without
    its earlier files and took more since its start than everyone else did; where nobody took any, when most of the disk
    is its own. Anything else is the host's trouble: a run that starts on a full disk, or beside something that grows,
    fails for no reason of its own.
    """
    if needed_bytes > now.total:
        return True
    if now.own + now.free < max(1, needed_bytes):
        return False
    own_growth = now.own - before.own
    lost_otherwise = before.free - now.free - own_growth  # to other files, or to a disk or quota that has shrunk
    if own_growth <= 0 and lost_otherwise <= 0:  # a run that was resumed without room
        return now.own > now.used_by_others
    return own_growth > lost_otherwise


# --- a check ---

_CHECK_BYTES = 64 * 1024
"""Written to a disk to prove that it takes writes: what the small files of a probe or run need."""
_CHECK_DESCRIPTORS = 24
"""As many as the start of a fork server and of a run's processes take together, and some more."""
_CHECK_SECONDS = 60.0


def check_host(folders: list[Path], needed_bytes: int = 0) -> Trouble | None:
    """Find what this process lacks to run work: room to write, descriptors, a thread, a process. Some 20 ms.

    Args:
        folders: where work writes; made if they are not there. The first is where runs are.
        needed_bytes: room that must be free on the disk of the first.
    """
    try:
        _check_descriptors()
        for folder in folders:
            _check_writable(folder)
        _check_room(folders[0], needed_bytes)
        _check_thread()
        _check_process()
    except Exception as error:  # noqa: BLE001 - under want of descriptors or memory anything may be raised
        return trouble_of(error) or Trouble(Cause.PROCESSES, f"{type(error).__name__}: {error}")
    return None


def _check_descriptors() -> None:
    opened: list[int] = []
    try:
        while len(opened) < _CHECK_DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _check_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".check-{os.getpid()}-{threading.get_ident()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            written = os.write(descriptor, bytes(_CHECK_BYTES))
            if written < _CHECK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None
    finally:
        path.unlink(missing_ok=True)


def _check_room(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        message = f"the disk of {folder} has {format_bytes(free)} free, and work needs {format_bytes(needed_bytes)}"
        raise HostTroubleError(Cause.DISK_FULL, message, needed_bytes)


def _check_thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


def _check_process() -> None:
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", ""],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_CHECK_SECONDS,
        check=True,
    )
