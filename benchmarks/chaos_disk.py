"""The disk of a deployment's runs: a file system of its own that can be full, where this process may mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SIZE_BYTES = 4 * 1024**3
"""Memory is taken only for what is written: some 25 MiB per job."""


class RunsDisk:
    """A tmpfs at a folder. ``mounted`` tells whether there is one: mounting takes root.

    Args:
        folder: where the runs go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.mounted = False

    @contextmanager
    def there(self) -> Iterator[None]:
        """Mounted for the block, if that may be."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.parent.chmod(0o700)
        self._folder.mkdir(exist_ok=True)
        self.mounted = self._mount(f"size={_SIZE_BYTES}")
        try:
            yield
        finally:
            if self.mounted:
                self.mounted = False
                subprocess.run([_command("umount"), "-l", str(self._folder)], check=True)  # noqa: S603 - found above

    @contextmanager
    def full(self) -> Iterator[None]:
        """Without room for one more page in the block: the size of the file system is what it holds."""
        while not self._mount(f"remount,size={self._used()}"):
            continue  # something was written in between
        try:
            yield
        finally:
            self._mount(f"remount,size={_SIZE_BYTES}")

    def _used(self) -> int:
        found = os.statvfs(self._folder)
        return max(1, found.f_blocks - found.f_bfree) * found.f_frsize

    def _mount(self, options: str) -> bool:
        command = [_command("mount"), "-t", "tmpfs", "-o", options, "tmpfs", str(self._folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603 - as above


def _command(name: str) -> str:
    return shutil.which(name) or f"/bin/{name}"
