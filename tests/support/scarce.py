"""Hosts that lack something, made for a test: a small disk, and a process without descriptors to spare."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own at ``folder``, of this size. Skips the test where it cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = shutil.which("mount")
    command = [mount or "", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a tmpfs, which takes root")
    try:
        yield folder
    finally:
        subprocess.run([shutil.which("umount") or "", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all room there is on the disk of ``folder``."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as stream:
        _until_refused(errno.ENOSPC, lambda: stream.write(bytes(4096)))
    return path


def _until_refused(number: int, take: Callable[[], object]) -> None:
    """Take again and again, until the kernel answers with this error."""
    while True:
        try:
            take()
        except OSError as error:
            if error.errno == number:
                return
            raise


@contextmanager
def descriptors_used_up(spare: int = 0) -> Iterator[list[int]]:
    """A block in which this process can open ``spare`` files more; closing those in the list gives descriptors back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, hard))
    try:
        _until_refused(errno.EMFILE, lambda: taken.append(os.open(os.devnull, os.O_RDONLY)))
        for _ in range(spare):
            os.close(taken.pop())
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while taken:
            os.close(taken.pop())
