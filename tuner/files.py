"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def appearing_whole(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes ``path`` in one step when the block ends well, and is dropped when it does not.

    A reader, or a restart after a kill at any moment, sees the old file or the new one, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Make ``content`` the content of ``path`` in one durable step."""
    with appearing_whole(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def sync_directory(directory: Path) -> None:
    """Make a rename inside ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
