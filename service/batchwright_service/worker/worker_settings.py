"""Settings that the workers of a process share."""

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from batchwright_service.folders import make_private_folder
from batchwright_service.observability.instruments import Instruments

_MAX_BEAT_SECONDS = 0.75
"""Longest interval of heartbeats, which see cancellations of other processes within the documented two seconds."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Assignment:
    """The one piece of work that a worker on a cluster's node is for."""

    work_id: str
    device: str
    """Name of the device on its host, where the engine has numbered the visible devices anew."""
    beside: tuple[str, ...] = ()
    """Ids of the other devices that the engine has assigned on this host, as this process sees them."""


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of every worker of a process."""

    node_name: str
    runs_dir: Path
    locks_dir: Path
    lease_seconds: float
    poll_seconds: float
    shutdown_grace_seconds: float
    fallback_poll_seconds: float = 5.0
    instruments: Instruments = field(default_factory=Instruments)
    assignment: Assignment | None = None
    """Without one, workers claim what is next in the queue, and announce their devices."""

    @property
    def beat_seconds(self) -> float:
        """Seconds between heartbeats."""
        return min(self.lease_seconds / 4, _MAX_BEAT_SECONDS)

    @property
    def polling_beat_seconds(self) -> float:
        """Seconds between heartbeats that look for work, since no notification arrives."""
        return min(self.beat_seconds, self.poll_seconds)

    @property
    def notified_beat_seconds(self) -> float:
        """Seconds between heartbeats while notifications arrive."""
        return min(self.lease_seconds / 4, self.fallback_poll_seconds)

    @property
    def owner_prefix(self) -> str:
        """Prefix of the names of all owners that used the lock files of this folder since the host was started."""
        return f"{self.node_name}:{_folder_identity(self.locks_dir)}:"

    def new_owner(self) -> str:
        """Create a name that no other process has or had."""
        return f"{self.owner_prefix}{os.getpid()}:{secrets.token_hex(4)}"


def _folder_identity(folder: Path) -> str:
    """Return a text that identifies a folder of a running host, and create the folder.

    A path would not do: two containers may each have a folder with the same path.
    """
    status = make_private_folder(folder).stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return hashlib.sha256(f"{boot}:{status.st_dev}:{status.st_ino}".encode()).hexdigest()[:8]
