"""Lock files that prove who is alive: the kernel releases them when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path

from service.errors import DeviceTakenError
from service.folders import make_own

_RETRY_SECONDS = 0.1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def folder_identity(folder: Path) -> str:
    """A text that only processes with the same folder of the same running host share; the folder is made.

    A path would not do: two containers can have a folder of the same name each, and locks in one say nothing about the
    other.
    """
    status = make_own(folder).stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return hashlib.sha256(f"{boot}:{status.st_dev}:{status.st_ino}".encode()).hexdigest()[:8]


class DeviceLock:
    """The right to serve one device out of one data folder. Whoever gets it knows that the earlier owner is dead."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.path = folder / f"{device.replace(':', '-')}.lock"
        self._descriptor: int | None = None

    def acquire(self, owner: str, wait_seconds: float = 0.0) -> None:
        """Take it; ``owner`` is written into the file for people who wonder.

        Raises:
            DeviceTakenError: when another live process has it and does not give it up within ``wait_seconds``.
        """
        make_own(self.path.parent)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_seconds
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise DeviceTakenError(
                    f"{self.device} is served by {holder} already (lock file {self.path}): end that process, or serve "
                    "other devices"
                )
            time.sleep(_RETRY_SECONDS)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give it up. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
