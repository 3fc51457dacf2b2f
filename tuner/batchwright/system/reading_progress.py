"""The file in which a process that reads data says how far it has come, for a parent that may find it dead."""

import struct
from pathlib import Path
from typing import NamedTuple, Self

_NUMBERS = struct.Struct("qqq")


class ReadingProgress(NamedTuple):
    """How far a reading has come."""

    sample: int = -1
    """Number of the sample that is being read; -1 while none is, as files are opened."""
    read: int = 0
    """Samples, rows or bytes that have been read."""
    total: int = 0
    """All of them; 0 if their number is not known."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read a file, which may be missing."""
        content = path.read_bytes() if path.exists() else b""
        return cls(*_NUMBERS.unpack(content)) if len(content) == _NUMBERS.size else cls()

    def packed(self) -> bytes:
        """The content of the file, of one length."""
        return _NUMBERS.pack(*self)
