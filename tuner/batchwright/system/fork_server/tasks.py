"""A task of a fork server, and its files: its request, its result and its output."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import BaseModel

from batchwright.system.files import PathBelow, tail, write_atomically
from batchwright.system.temporary_folders import TemporaryFolder


@dataclass(frozen=True)
class RunTask:
    """Run a task in a fork of the server.

    Attributes:
        task: its name.
        directory: the directory of its ``TaskPaths``.
        modules: modules that the server imports before it forks.
        environment: variables on top of the server's own.
        data_bytes: limit of the task's private memory (``RLIMIT_DATA``).
        file_bytes: limit of the size of files that the task writes (``RLIMIT_FSIZE``).
    """

    task: str
    directory: str
    modules: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    data_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True)
class TaskPaths:
    """The files of one task, in its own directory. Nothing else builds these names."""

    directory: Path

    request = PathBelow("request.json")
    """The request (JSON)."""
    result = PathBelow("result.json")
    """The result (JSON); absent if the task ended before writing it."""
    output = PathBelow("output.txt")
    """The output of the process, including dumped stacks."""

    @classmethod
    @contextmanager
    def temporary(cls, request: BaseModel) -> Iterator[Self]:
        """Create a temporary directory that contains the request, and remove it at the end of the block.

        Raises:
            OSError: when the directory or the request cannot be written.
        """
        with TemporaryFolder() as directory:
            paths = cls(directory)
            write_atomically(paths.request, request.model_dump_json())
            yield paths

    def output_tail(self, length_bytes: int = 4000) -> str:
        """Read the end of the output."""
        return tail(self.output, length_bytes) if self.output.exists() else ""
