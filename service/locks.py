"""Lock files that prove who is alive: the kernel releases them when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from service.errors import DeviceTakenError

_RETRY_SECONDS = 0.1


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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_seconds
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
                os.close(descriptor)
                raise DeviceTakenError(f"{self.device} is served by {holder} already (lock file {self.path})")
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
