"""Find and open the files that a spec names, in the folders that a run may read."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from batchwright.errors import DataOutsideRootsError
from batchwright.system.data_roots import ANY_FILE, DataRoots, expand_glob
from batchwright.training.data.base import data_problem

_T = TypeVar("_T")


@dataclass(frozen=True)
class DataFolders:
    """The folders that a run may read data from, and the folder for its copies."""

    roots: DataRoots = ANY_FILE
    """Folders that must hold every file that is read."""
    cache: Path | None = None
    """Folder for the copies that `datasets` maps into memory; the default of `datasets` when None."""
    pretrained: Path | None = None
    """Folder of the pretrained model, whose tokenizer the data may ask for."""

    @classmethod
    def of_run(cls, cache: Path) -> DataFolders:
        """The folders of this process's run, whose roots are in the environment."""
        return cls(DataRoots.from_environment(os.environ), cache)

    def with_pretrained(self, folder: Path, roots: DataRoots) -> DataFolders:
        """Return these folders with that of the pretrained model, which lies below ``roots``."""
        if self.roots.folders is None:
            return replace(self, pretrained=folder)
        folders = [*self.roots.folders, *(roots.folders or ())]
        return replace(self, roots=DataRoots(list(map(str, folders))), pretrained=folder)

    def matching(self, patterns: Sequence[str]) -> list[Path]:
        """The real paths of the files that the patterns name, sorted, so that every host reads the same stream.

        Raises:
            SpecError: when a pattern matches no file, or one outside the folders.
        """
        paths: set[Path] = set()
        for pattern in patterns:
            files = _as_field_problem("data.paths", pattern, partial(self._files, pattern))
            if not files:
                raise data_problem("data.paths", f"no file matches (from {Path.cwd()})", pattern)
            paths |= files
        return sorted(paths)

    def files_in_subfolders(self, field: str, folder: str, suffixes: Collection[str]) -> list[Path]:
        """The files with these suffixes in a folder's subfolders, sorted, hidden files included.

        Raises:
            SpecError: about ``field``, when a folder or a file lies outside the folders that may be read.
        """
        return _as_field_problem(field, folder, lambda: sorted(self._entries(Path(folder), suffixes)))

    def open(self, field: str, path: str | Path) -> BinaryIO:
        """Open a file that a spec names.

        Raises:
            SpecError: about ``field``, when the file lies outside the folders.
            OSError: when it cannot be opened.
        """
        return _as_field_problem(field, path, lambda: self.roots.open(path))

    def _entries(self, folder: Path, suffixes: Collection[str]) -> Iterator[Path]:
        for below in self._children(folder):
            for entry in self._children(below):
                if entry.suffix.lower() in suffixes:
                    self.roots.resolve(entry)
                    yield entry

    def _children(self, folder: Path) -> Iterable[Path]:
        if not folder.is_dir():
            return ()
        self.roots.resolve(folder)
        return folder.iterdir()

    def _files(self, pattern: str) -> set[Path]:
        return {self.roots.resolve(path) for path in expand_glob(pattern, self.roots) if path.is_file()}


def _as_field_problem(field: str, value: object, read: Callable[[], _T]) -> _T:
    """Return the result of ``read``, and report a path outside the folders as a problem of a field."""
    try:
        return read()
    except DataOutsideRootsError as error:
        raise data_problem(field, str(error), value) from None


def matching_files(patterns: Sequence[str]) -> list[Path]:
    """The files that the patterns name, sorted, in any folder.

    Raises:
        SpecError: when a pattern matches no file.
    """
    return DataFolders().matching(patterns)
