"""The files that jobs leave on this host, read and removed without ever leaving their folder.

A job runs the code of its workload, which may put a link in the place of any of its files: none is followed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from datetime import UTC, datetime
from pathlib import Path

from service.application.rules.placement import SLOT_FILE
from service.domain.work import Checkpoint
from tuner.training.launching.run_directory import RunPaths

_NAME = re.compile(r"\w+")
"""Of a run's folder: nothing that leads elsewhere."""
_LONGEST_SLOT = 300
_CHECKPOINT = re.compile(r"update-(\d{8,})")


class RunFiles:
    """The runs of the jobs below one folder. Callers pass identifiers of jobs, never paths."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir

    def directory(self, job_id: str) -> Path:
        """The folder of a job's run, whether or not it is there."""
        return self._runs_dir / job_id

    def are_here(self, job_id: str) -> bool:
        """Whether the run's folder is on this host."""
        return _is_folder(self.directory(job_id))

    def log_tail(self, job_id: str, most_bytes: int) -> bytes:
        """The end of a run's log; empty when it has none."""
        return _end_of(RunPaths(self.directory(job_id)).log, most_bytes)

    def checkpoints(self, job_id: str) -> tuple[Checkpoint, ...]:
        """The checkpoints of a run, from the oldest to the newest."""
        folder = RunPaths(self.directory(job_id)).checkpoints
        if not _is_folder(folder):
            return ()
        found = [it for entry in os.scandir(folder) if (it := _checkpoint(entry)) is not None]
        return tuple(sorted(found, key=lambda checkpoint: checkpoint.update))

    def slot(self, job_id: str) -> str | None:
        """Return the slot on which the run whose folder is on this host ran last; none where that is not known."""
        told = _end_of(self.directory(job_id) / SLOT_FILE, _LONGEST_SLOT)
        return told.decode(errors="replace") or None

    def remove(self, job_id: str) -> bool:
        """Remove a run's folder, if it is on this host; whether nothing of it is left."""
        directory = self.directory(job_id)
        if _NAME.fullmatch(job_id) and _is_folder(directory):
            shutil.rmtree(directory, ignore_errors=True)
            return not _is_folder(directory)
        return True


def _end_of(file: Path, most_bytes: int) -> bytes:
    """The end of a file; empty when there is none, or something else in its place."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        told = os.fstat(descriptor)
        start = max(0, told.st_size - most_bytes)
        return os.pread(descriptor, most_bytes, start) if stat.S_ISREG(told.st_mode) else b""
    finally:
        os.close(descriptor)


def _is_folder(path: Path) -> bool:
    """Whether it is a folder, and no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _checkpoint(entry: os.DirEntry[str]) -> Checkpoint | None:
    """What a checkpoint's folder tells; none for anything else, or when it is removed just now."""
    named = _CHECKPOINT.fullmatch(entry.name)
    try:
        if named is None or not entry.is_dir(follow_symlinks=False):
            return None
        files = [it.stat(follow_symlinks=False) for it in os.scandir(entry.path)]
        modified = max((file.st_mtime for file in files), default=entry.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return None
    return Checkpoint(
        update=int(named[1]),
        size_bytes=sum(file.st_size for file in files),
        modified_at=datetime.fromtimestamp(modified, tz=UTC),
    )
