"""The files of jobs on this host, read and removed within their folders only.

A job runs the code of its workload, which may replace any of its files by a symbolic link. No link is followed.
"""

import os
import re
import shutil
import stat
from datetime import UTC, datetime
from pathlib import Path

from batchwright.client.documents.work import Checkpoint
from batchwright.training.launching.run_directory import RunPaths
from batchwright_service.application.rules.bulkhead import Bulkhead
from batchwright_service.application.rules.device_checks import SLOT_FILE

_NAME = re.compile(r"\w+")
"""Names of runs' folders; excludes paths."""
_MAX_SLOT_BYTES = 300
_CHECKPOINT = re.compile(r"update-(\d{8,})")


class JobFiles:
    """The runs of jobs below one folder. Callers pass identifiers of jobs, never paths.

    The folder may be on a network file system that hangs: every method may raise ``DependencyBusyError``.
    """

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._bulkhead = Bulkhead("the file system of the runs", slots=12, queue=4, wait_seconds=5.0)

    def directory(self, job_id: str) -> Path:
        """Return the folder of a job's run, which need not exist."""
        return self._runs_dir / job_id

    def has_directory(self, job_id: str) -> bool:
        """Return whether the folder of a job's run is on this host."""
        with self._bulkhead.slot():
            return _is_folder(self.directory(job_id))

    def log_tail(self, job_id: str, max_bytes: int) -> bytes:
        """Return the end of a run's log; empty when there is no log."""
        with self._bulkhead.slot():
            return _end_of(RunPaths(self.directory(job_id)).log, max_bytes)

    def checkpoints(self, job_id: str) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of a run, oldest first."""
        folder = RunPaths(self.directory(job_id)).checkpoints
        with self._bulkhead.slot():
            found = [_checkpoint(entry) for entry in os.scandir(folder)] if _is_folder(folder) else []
        return tuple(sorted(filter(None, found), key=lambda checkpoint: checkpoint.update))

    def slot(self, job_id: str) -> str | None:
        """Return the slot of the last run in the folder on this host, or None when it is unknown."""
        with self._bulkhead.slot():
            slot = _end_of(self.directory(job_id) / SLOT_FILE, _MAX_SLOT_BYTES)
        return slot.decode(errors="replace") or None

    def remove(self, job_id: str) -> bool:
        """Remove a run's folder, if it is on this host, and return whether nothing of the folder is left."""
        directory = self.directory(job_id)
        with self._bulkhead.slot():
            if _NAME.fullmatch(job_id) and _is_folder(directory):
                shutil.rmtree(directory, ignore_errors=True)
                return not _is_folder(directory)
        return True


def _end_of(file: Path, max_bytes: int) -> bytes:
    """Return the end of a regular file; empty for anything else."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        status = os.fstat(descriptor)
        start = max(0, status.st_size - max_bytes)
        return os.pread(descriptor, max_bytes, start) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(descriptor)


def _is_folder(path: Path) -> bool:
    """Return whether the path is a folder, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _checkpoint(entry: os.DirEntry[str]) -> Checkpoint | None:
    """Return the checkpoint in a folder; None for anything else, and for a folder that is being removed."""
    matched = _CHECKPOINT.fullmatch(entry.name)
    try:
        if matched is None or not entry.is_dir(follow_symlinks=False):
            return None
        files = [file.stat(follow_symlinks=False) for file in os.scandir(entry.path)]
        modified = max((file.st_mtime for file in files), default=entry.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return None
    return Checkpoint(
        update=int(matched[1]),
        size_bytes=sum(file.st_size for file in files),
        modified_at=datetime.fromtimestamp(modified, tz=UTC),
    )
