"""The files of training data: which of them a pattern names, and that each lies below the folders that may be read.

A path is judged by where it really leads, through every link; an opened file by the file that was really opened.
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

from tuner.errors import DataOutsideRootsError

ROOTS_VARIABLE = "BATCHWRIGHT_RUN_DATA_ROOTS"
"""Environment variable of a run's processes: a JSON list of the folders they may read data from; any when absent."""
_WILDCARD = re.compile(r"[*?\[]")


class DataRoots:
    """The folders that data may be read from, links resolved.

    Args:
        folders: the folders; None allows any file, for runs that a user starts on their own account.
    """

    def __init__(self, folders: Sequence[str] | None) -> None:
        self.folders = None if folders is None else tuple(_real(str(Path(it).expanduser())) for it in folders)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> DataRoots:
        """The folders that a run's environment names."""
        named = environment.get(ROOTS_VARIABLE)
        return cls(None if named is None else json.loads(named))

    def variables(self) -> dict[str, str]:
        """The environment that tells a run's processes of these folders."""
        return {} if self.folders is None else {ROOTS_VARIABLE: json.dumps([str(it) for it in self.folders])}

    def resolve(self, path: str | Path) -> Path:
        """The real path, free of links, whether or not a file is there.

        Raises:
            DataOutsideRootsError: when it is below none of the folders.
        """
        real = _real(str(path))
        self._check(real, path)
        return real

    def open(self, path: str | Path) -> BinaryIO:
        """Open a regular file to read; what is judged is the opened file, so that no link can take its place meanwhile.

        Raises:
            DataOutsideRootsError: when the file lies below none of the folders.
            OSError: when it cannot be opened, or is no regular file.
        """
        self.resolve(path)  # nothing outside is opened, not even to look at it
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._check(opened_path(descriptor), path)
            _check_regular(descriptor, path)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def _check(self, real: Path, named: str | Path) -> None:
        if self.folders is None or any(real.is_relative_to(root) for root in self.folders):
            return
        allowed = ", ".join(map(str, self.folders)) or "none"
        raise DataOutsideRootsError(
            f"{str(named)!r} is outside the folders that jobs may read, or leads there by a link (allowed: {allowed}); "
            "the operator adds them to BATCHWRIGHT_DATA_ROOTS"
        )


ANYWHERE = DataRoots(None)
"""Allows any file."""


def opened_path(descriptor: int) -> Path:
    """The path of an opened file, as the kernel knows it."""
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def fixed_part(pattern: str) -> str:
    """The folders of a glob pattern before its first wildcard; the whole of a pattern that has none."""
    match = _WILDCARD.search(pattern)
    if match is None:
        return pattern
    return pattern[: match.start()].rpartition("/")[0] or ("/" if pattern.startswith("/") else "")


def expand(pattern: str, roots: DataRoots = ANYWHERE, most_entries: int | None = None) -> Iterator[Path]:
    """The paths that a pattern matches, as `glob.iglob(pattern, recursive=True)`, and none outside the folders.

    Args:
        pattern: a path with `*`, `?`, `[...]` and `**`.
        roots: every folder that is entered, and every match, has to lie below them.
        most_entries: stop after so many entries of folders, matched or not; no bound when None.

    Raises:
        DataOutsideRootsError: naming the folder or match that leads outside.
    """
    fixed = fixed_part(pattern)
    parts = [it for it in pattern[len(fixed) :].split("/") if it]
    once = [part for part, before in zip(parts, ["", *parts], strict=False) if part != "**" or before != "**"]
    yield from _Walk(roots, most_entries).onward(Path(fixed), once)


class _Walk:
    """A walk over the matches of a pattern."""

    def __init__(self, roots: DataRoots, most_entries: int | None) -> None:
        self._roots = roots
        self._left = most_entries

    def onward(self, path: Path, parts: Sequence[str]) -> Iterator[Path]:
        """The matches of ``parts`` below ``path``, or the path, where no parts are left."""
        if not parts:
            if path.exists() or path.is_symlink():
                self._roots.resolve(path)
                yield path
        elif path.is_dir():
            self._roots.resolve(path)
            yield from self._matches(path, parts)

    def _matches(self, folder: Path, parts: Sequence[str]) -> Iterator[Path]:
        head, rest = parts[0], parts[1:]
        if head == "**":
            yield from self._at_any_depth(folder, rest or ("*",), ())
        elif _WILDCARD.search(head) is None:
            yield from self.onward(folder / head, rest)
        else:
            matches = re.compile(fnmatch.translate(head)).match
            for path in self._entries(folder, hidden=head.startswith(".")):
                if matches(path.name):
                    yield from self.onward(path, rest)

    def _at_any_depth(self, folder: Path, parts: Sequence[str], above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
        found = folder.stat()
        identity = (found.st_dev, found.st_ino)
        if identity in above:  # a link to a folder around it
            return
        yield from self.onward(folder, parts)
        for path in self._entries(folder, hidden=False):
            if path.is_dir():
                self._roots.resolve(path)
                yield from self._at_any_depth(path, parts, (*above, identity))

    def _entries(self, folder: Path, *, hidden: bool) -> list[Path]:
        try:
            entries = sorted(islice(folder.iterdir(), self._left))
        except OSError:  # as glob: what cannot be listed has no matches
            return []
        if self._left is not None:
            self._left -= len(entries)
        return [it for it in entries if hidden or not it.name.startswith(".")]


def _check_regular(descriptor: int, path: str | Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))
