"""The files by which a task gets its request and leaves its result."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel

from tuner.system.files import tail, write_atomically


@dataclass(frozen=True)
class TaskPaths:
    """The files of one task, in a directory of its own. Nothing else builds these names."""

    directory: Path

    @classmethod
    @contextmanager
    def holding(cls, request: BaseModel) -> Iterator[Self]:
        """Make a temporary directory with the request in it; the directory is removed at the end of the block.

        Raises:
            OSError: when it cannot be made.
        """
        with tempfile.TemporaryDirectory(prefix="batchwright-", ignore_cleanup_errors=True) as directory:
            paths = cls(Path(directory))
            write_atomically(paths.request, request.model_dump_json())
            yield paths

    @property
    def request(self) -> Path:
        """The request (JSON)."""
        return self.directory / "request.json"

    @property
    def result(self) -> Path:
        """The document that the task leaves (JSON); absent when the task ended before that."""
        return self.directory / "result.json"

    @property
    def output(self) -> Path:
        """The output of the process, with the stacks that it dumped."""
        return self.directory / "output.txt"

    def output_tail(self, length_bytes: int = 4000) -> str:
        """Read the end of the output."""
        return tail(self.output, length_bytes) if self.output.exists() else ""
