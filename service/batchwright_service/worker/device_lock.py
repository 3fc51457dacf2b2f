"""Lock files that prove which owner is alive: the kernel releases them at any end of their process."""

from __future__ import annotations

import hashlib
from pathlib import Path

from filelock import FileLock, Timeout

from batchwright_service.errors import DeviceTakenError
from batchwright_service.folders import make_private_folder

_RETRY_SECONDS = 0.1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def folder_identity(folder: Path) -> str:
    """Return a text that identifies a folder of a running host, and create the folder.

    A path would not do: two containers may each have a folder with the same path.
    """
    status = make_private_folder(folder).stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return hashlib.sha256(f"{boot}:{status.st_dev}:{status.st_ino}".encode()).hexdigest()[:8]


class DeviceLock:
    """The exclusive right to serve one device from one data folder. A new owner knows that the last one has ended."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = device
        self.path = folder / f"{device.replace(':', '-').replace('/', '-')}.lock"
        self._lock = FileLock(self.path, thread_local=False, poll_interval=_RETRY_SECONDS, fallback_to_soft=False)

    def acquire(self, owner: str, wait_seconds: float = 0.0) -> None:
        """Acquire the lock; ``owner`` is written into the file as information for people.

        Raises:
            DeviceTakenError: when another live process does not release the lock within ``wait_seconds``.
        """
        make_private_folder(self.path.parent)
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
        """Release the lock. Idempotent."""
        self._lock.release()
