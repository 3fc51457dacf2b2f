"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write ``content`` beside ``path``, flush it to the disk, then put it in place in one step.

    A reader, or a restart after a kill at any moment, sees the old file or the new one, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with beside.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make a rename inside ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
