"""Lock files that prove which owner is alive: the kernel releases them when their process ends, however it ends."""

from __future__ import annotations

import hashlib
from pathlib import Path

from filelock import FileLock, Timeout

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
    """The right to serve one device out of one data folder. Its new owner knows that the last one is gone."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.path = folder / f"{device.replace(':', '-')}.lock"
        self._lock = FileLock(self.path, thread_local=False, poll_interval=_RETRY_SECONDS, fallback_to_soft=False)

    def acquire(self, owner: str, wait_seconds: float = 0.0) -> None:
        """Take the lock; ``owner`` is written into the file for people who look.

        Raises:
            DeviceTakenError: when another live process has it and does not give it up within ``wait_seconds``.
        """
        make_own(self.path.parent)
        try:
            self._lock.acquire(timeout=wait_seconds)
        except Timeout:
            holder = self.path.read_text(errors="replace").strip() or "another process"
            raise DeviceTakenError(
                f"{self.device} is served by {holder} already (lock file {self.path}): end that process, or serve "
                "other devices"
            ) from None
        self.path.write_text(owner)

    def release(self) -> None:
        """Give the device up. Idempotent."""
        self._lock.release()
