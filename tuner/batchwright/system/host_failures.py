"""Recognise failures of the host, such as a full disk, as opposed to failures of the work itself. No torch.

This is the only module that recognises them, as ``batchwright.hardware.failures`` is the only one that recognises an
OOM.
"""

import errno
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from batchwright.errors import HostFailureError, HubUnavailableError, StorageError
from batchwright.units import format_bytes


class Cause(StrEnum):
    """Kinds of host failures. The values are stable."""

    DISK_FULL = "disk-full"
    READ_ONLY = "read-only"
    INPUT_OUTPUT = "input-output"
    PERMISSION = "permission"
    MISSING = "missing"
    DESCRIPTORS = "descriptors"
    PROCESSES = "processes"
    MEMORY = "memory"
    DEVICE = "device"
    HOST_LOST = "host-lost"
    HUB = "hub"


_CAUSE_BY_ERRNO = {
    errno.ENOSPC: Cause.DISK_FULL,
    errno.EDQUOT: Cause.DISK_FULL,
    errno.EROFS: Cause.READ_ONLY,
    errno.EIO: Cause.INPUT_OUTPUT,
    errno.ESTALE: Cause.INPUT_OUTPUT,  # an NFS file that the server no longer knows
    errno.EREMOTEIO: Cause.INPUT_OUTPUT,
    errno.ENXIO: Cause.INPUT_OUTPUT,
    errno.ENODEV: Cause.INPUT_OUTPUT,
    errno.ENOTCONN: Cause.INPUT_OUTPUT,  # a FUSE mount whose process has ended
    errno.EACCES: Cause.PERMISSION,
    errno.EPERM: Cause.PERMISSION,
    errno.ENOENT: Cause.MISSING,  # a folder or an interpreter that was removed or unmounted
    errno.ENOTDIR: Cause.MISSING,
    errno.EEXIST: Cause.MISSING,  # a file where a folder is expected
    errno.EMFILE: Cause.DESCRIPTORS,
    errno.ENFILE: Cause.DESCRIPTORS,
    errno.EAGAIN: Cause.PROCESSES,  # fork(2) at a limit on processes
    errno.ENOMEM: Cause.MEMORY,
}
_CAUSE_BY_MESSAGE = {
    "No space left on device": Cause.DISK_FULL,
    "Disk quota exceeded": Cause.DISK_FULL,
    "database or disk is full": Cause.DISK_FULL,  # SQLite
    "Not enough disk space": Cause.DISK_FULL,  # `datasets`
    "Read-only file system": Cause.READ_ONLY,
    "Input/output error": Cause.INPUT_OUTPUT,
    "Too many open files": Cause.DESCRIPTORS,
    "can't start new thread": Cause.PROCESSES,  # CPython's threading
    "Resource temporarily unavailable": Cause.PROCESSES,
}
"""Messages of errors without an errno: from safetensors, torch, or another process."""
_DISK_CAUSES = frozenset({Cause.DISK_FULL, Cause.READ_ONLY, Cause.INPUT_OUTPUT})


@dataclass(frozen=True)
class HostFailure:
    """A failure of the host: its cause, and a message that names it."""

    cause: Cause
    message: str
    needed_bytes: int = 0
    """Free disk space without which the work cannot continue, if known."""

    @property
    def is_disk_failure(self) -> bool:
        """True when a disk is at fault, which affects every process of the host, unlike a limit of one process."""
        return self.cause in _DISK_CAUSES

    def as_error(self) -> HostFailureError:
        """Return the error that reports it."""
        return HostFailureError(self.cause, self.message, self.needed_bytes)


def disk_failure_of(error: BaseException) -> HostFailureError | None:
    """Return the failure of a disk that ``error`` reports, which says nothing of what was read; None for any other."""
    found = host_failure_of(error)
    return found.as_error() if found is not None and found.is_disk_failure else None


def host_failure_of(error: BaseException | None) -> HostFailure | None:
    """Return the host failure that ``error`` or its chain of causes reports; None for any other error."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if (found := _classify_one(error)) is not None:
            return found
        seen.append(error)
        error = error.__cause__
    return None


def _classify_one(error: BaseException) -> HostFailure | None:
    if isinstance(error, HostFailureError):
        return HostFailure(Cause(error.cause), str(error), error.needed_bytes)
    if isinstance(error, HubUnavailableError):
        return HostFailure(Cause.HUB, "; ".join(problem.message for problem in error.problems))
    cause = _cause_of(error)
    needed = error.needed_bytes if isinstance(error, StorageError) else 0
    return None if cause is None else HostFailure(cause, _describe(error), needed)


def _cause_of(error: BaseException) -> Cause | None:
    if isinstance(error, MemoryError):
        return Cause.MEMORY
    if isinstance(error, OSError) and error.errno is not None:
        return _CAUSE_BY_ERRNO.get(error.errno)
    if any(base.__name__ == "NVMLError" for base in type(error).__mro__):
        return Cause.DEVICE
    if isinstance(error, (OSError, RuntimeError)) or type(error).__name__ == "SafetensorError":
        message = str(error)
        return next((cause for words, cause in _CAUSE_BY_MESSAGE.items() if words.lower() in message.lower()), None)
    return None


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, StorageError):
        place = f" ({error.filename})" if error.filename else ""
        return f"{os.strerror(error.errno)}{place}"
    return str(error).strip() or type(error).__name__


# --- disks ---


@dataclass(frozen=True)
class DiskUsage:
    """Usage of the disk of a folder: its size, its free space, and the folder's own share. Bytes."""

    total: int
    free: int
    own: int

    @property
    def used_by_others(self) -> int:
        """Bytes used on the disk outside the folder."""
        return self.total - self.free - self.own


def disk_usage_of(folder: Path) -> DiskUsage:
    """Measure the disk of an existing folder.

    Raises:
        OSError: when the disk or the folder cannot be read.
    """
    disk = shutil.disk_usage(folder)
    # Files that vanish meanwhile are skipped.
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += 512 * os.lstat(os.path.join(root, name)).st_blocks  # noqa: PTH118 - there may be thousands
            except FileNotFoundError:
                continue
    return DiskUsage(total=disk.total, free=disk.free, own=total)


def is_filled_by_run(before: DiskUsage, now: DiskUsage, needed_bytes: int) -> bool:
    """Return whether a run filled its disk with its own files, as opposed to the files of others.

    A run is at fault in three cases. The disk is too small for a single write of the run. Or the run would have had
    space without its own files, and grew more since its start than everything else. Or nothing grew, and most of the
    disk is the run's own. Otherwise it is a host failure: the run started on a full disk, or others filled it.

    Args:
        before: the usage when the run started.
        now: the usage when a write failed.
        needed_bytes: the size of the write that failed, 0 if unknown.
    """
    if needed_bytes > now.total:
        return True
    if now.own + now.free < max(1, needed_bytes):
        return False
    growth_of_run = now.own - before.own
    growth_of_others = before.free - now.free - growth_of_run  # to other files, or to a disk or quota that has shrunk
    if growth_of_run <= 0 and growth_of_others <= 0:  # a run that was resumed without room
        return now.own > now.used_by_others
    return growth_of_run > growth_of_others


# --- a check ---

_CHECK_BYTES = 64 * 1024
"""Bytes written to prove that a disk accepts writes: as many as the small files of a probe or run need."""
_CHECK_DESCRIPTORS = 24
"""Somewhat more than the start of a fork server and of a run's processes takes."""
_CHECK_SECONDS = 60.0


def check_host(folders: list[Path], needed_bytes: int = 0) -> HostFailure | None:
    """Check that this process can write files, open descriptors, and start a thread and a process. Takes some 20 ms.

    Args:
        folders: folders that work writes to, created if missing. The first one contains the runs.
        needed_bytes: space that must be free on the disk of the first folder.

    Returns:
        The first failure, or None.
    """
    try:
        opened: list[int] = []
        try:
            while len(opened) < _CHECK_DESCRIPTORS:
                opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        finally:
            for descriptor in opened:
                os.close(descriptor)
        for folder in folders:
            _check_writable(folder)
        _check_space(folders[0], needed_bytes)
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", ""],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_CHECK_SECONDS,
            check=True,
        )
    except Exception as error:  # noqa: BLE001 - without descriptors or memory anything may be raised
        return host_failure_of(error) or HostFailure(Cause.PROCESSES, f"{type(error).__name__}: {error}")
    return None


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


def _check_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        message = f"the disk of {folder} has {format_bytes(free)} free, and work needs {format_bytes(needed_bytes)}"
        raise HostFailureError(Cause.DISK_FULL, message, needed_bytes)
