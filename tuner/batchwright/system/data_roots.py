"""Restrict training data to allowed folders, and expand glob patterns within them.

A path is checked after all links are resolved. An opened file is checked by its descriptor.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from batchwright.errors import DataOutsideRootsError

ROOTS_VARIABLE = "BATCHWRIGHT_RUN_DATA_ROOTS"
"""Environment variable of a run's processes: a JSON list of the folders they may read; any if absent."""
_WILDCARD = re.compile(r"[*?\[]")


class DataRoots:
    """The folders that data may be read from, with links resolved.

    Args:
        folders: the folders; None allows any file, for runs that a user starts on their own account.
    """

    def __init__(self, folders: Sequence[str] | None) -> None:
        self.folders = (
            None if folders is None else tuple(_resolved(str(Path(folder).expanduser())) for folder in folders)
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> DataRoots:
        """Read the folders from a run's environment."""
        value = environment.get(ROOTS_VARIABLE)
        return cls(None if value is None else json.loads(value))

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that pass these folders to a run's processes."""
        return {} if self.folders is None else {ROOTS_VARIABLE: json.dumps([str(folder) for folder in self.folders])}

    def resolve(self, path: str | Path) -> Path:
        """Return the path with all links resolved. The file need not exist.

        Raises:
            DataOutsideRootsError: when the resolved path is below none of the folders.
        """
        resolved = _resolved(str(path))
        self._check(resolved, path)
        return resolved

    def open(self, path: str | Path) -> BinaryIO:
        """Open a regular file to read. The opened file is checked too, so a link that is swapped in does not help.

        Raises:
            DataOutsideRootsError: when the file lies below none of the folders.
            OSError: when the file cannot be opened, or is not a regular file.
        """
        self.resolve(path)  # nothing outside the folders is opened, not even to check it
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._check(Path(f"/proc/self/fd/{descriptor}").readlink(), path)
            _check_regular(descriptor, path)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def _check(self, resolved: Path, path: str | Path) -> None:
        if self.folders is None or any(resolved.is_relative_to(root) for root in self.folders):
            return
        allowed = ", ".join(map(str, self.folders)) or "none"
        raise DataOutsideRootsError(
            f"{str(path)!r} is outside the folders that jobs may read, or links to outside (allowed: {allowed}); "
            "the operator adds them to BATCHWRIGHT_DATA_ROOTS"
        )


ANY_FILE = DataRoots(None)
"""No restriction: any file may be read."""


def literal_prefix(pattern: str) -> str:
    """Return the folders of a glob pattern before its first wildcard; the whole pattern if there is no wildcard."""
    match = _WILDCARD.search(pattern)
    if match is None:
        return pattern
    return pattern[: match.start()].rpartition("/")[0] or ("/" if pattern.startswith("/") else "")


def expand_glob(pattern: str, roots: DataRoots = ANY_FILE, max_entries: int | None = None) -> Iterator[Path]:
    """Yield the paths that a pattern matches, as `glob.iglob(pattern, recursive=True)` does.

    Args:
        pattern: a path with `*`, `?`, `[...]` and `**`.
        roots: every folder that is entered, and every match, must lie below them.
        max_entries: stop after this many directory entries, matched or not; None for no bound.

    Raises:
        DataOutsideRootsError: naming the folder or match that is outside.
    """
    prefix = literal_prefix(pattern)
    parts = [part for part in pattern[len(prefix) :].split("/") if part]
    parts = [part for part, previous in zip(parts, ["", *parts], strict=False) if not part == previous == "**"]
    yield from _Walk(roots, max_entries).matches(Path(prefix), parts)


def why_unmatched(pattern: str) -> str:
    """Say why a pattern names no file, for an error about it."""
    path = Path(pattern)
    if path.is_dir():
        return f"is a folder: name files in it, such as {path / '*'}"
    if path.exists() and not path.is_file():
        return "is not a regular file but a pipe, a socket or a device, which cannot be read twice: write it to a file"
    return f"no file matches (from {Path.cwd()})"


class _Walk:
    """A walk over the matches of a pattern."""

    def __init__(self, roots: DataRoots, max_entries: int | None) -> None:
        self._roots = roots
        self._entries_left = max_entries

    def matches(self, path: Path, parts: Sequence[str]) -> Iterator[Path]:
        """Yield the matches of ``parts`` below ``path``, or the path itself if there are no parts."""
        if not parts:
            if path.exists() or path.is_symlink():
                self._roots.resolve(path)
                yield path
        elif path.is_dir():
            self._roots.resolve(path)
            yield from self._match_part(path, parts)

    def _match_part(self, folder: Path, parts: Sequence[str]) -> Iterator[Path]:
        head, rest = parts[0], parts[1:]
        if head == "**":
            yield from self._match_any_depth(folder, rest or ("*",), ())
        elif _WILDCARD.search(head) is None:
            yield from self.matches(folder / head, rest)
        else:
            matches = re.compile(fnmatch.translate(head)).match
            for path in self._entries(folder, hidden=head.startswith(".")):
                if matches(path.name):
                    yield from self.matches(path, rest)

    def _match_any_depth(
        self, folder: Path, parts: Sequence[str], ancestors: tuple[tuple[int, int], ...]
    ) -> Iterator[Path]:
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in ancestors:  # a link to an ancestor
            return
        yield from self.matches(folder, parts)
        for path in self._entries(folder, hidden=False):
            if path.is_dir():
                self._roots.resolve(path)
                yield from self._match_any_depth(path, parts, (*ancestors, identity))

    def _entries(self, folder: Path, *, hidden: bool) -> list[Path]:
        try:
            entries = sorted(islice(folder.iterdir(), self._entries_left))
        except OSError:  # as in glob: a folder that cannot be listed has no matches
            return []
        if self._entries_left is not None:
            self._entries_left -= len(entries)
        return [entry for entry in entries if hidden or not entry.name.startswith(".")]


def _check_regular(descriptor: int, path: str | Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _resolved(path: str) -> Path:
    return Path(os.path.realpath(path))
