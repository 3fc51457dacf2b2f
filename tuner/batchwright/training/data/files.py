"""Find and open the files that a spec names, in the folders that a run may read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from batchwright.errors import DataOutsideRootsError
from batchwright.system.data_roots import ANY_FILE, DataRoots, expand_glob, why_unmatched
from batchwright.training.data.base import data_problem
from batchwright.training.data.first_reading import FirstReading


@dataclass(frozen=True)
class DataFolders:
    """The folders that a run may read data from, and the folder for its copies."""

    roots: DataRoots = ANY_FILE
    """Folders that must hold every file that is read."""
    cache: Path | None = None
    """Folder for the copies that `datasets` maps into memory; the default of `datasets` when None."""
    pretrained: Path | None = None
    """Folder of the pretrained model, whose tokenizer the data may ask for."""
    reading: FirstReading | None = None
    """The bounds of a first reading; None if all data is read, as by a run."""

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
            with _as_field_problem("data.paths", pattern):
                files = {self.roots.resolve(path) for path in expand_glob(pattern, self.roots) if path.is_file()}
            if not files:
                raise data_problem("data.paths", why_unmatched(pattern), pattern)
            paths |= files
        return sorted(paths)

    def files_in_subfolders(self, field: str, folder: str, suffixes: Collection[str]) -> list[Path]:
        """The files with these suffixes in a folder's subfolders, sorted, hidden files included.

        Raises:
            SpecError: about ``field``, when a folder or a file lies outside the folders that may be read.
        """
        with _as_field_problem(field, folder):
            entries = (entry for below in self._children(Path(folder)) for entry in self._children(below))
            found = sorted(entry for entry in entries if entry.suffix.lower() in suffixes)
            for entry in found:
                self.roots.resolve(entry)
        return found

    def open(self, field: str, path: str | Path) -> BinaryIO:
        """Open a file that a spec names.

        Raises:
            SpecError: about ``field``, when the file lies outside the folders.
            OSError: when it cannot be opened.
        """
        with _as_field_problem(field, path):
            return self.roots.open(path)

    def _children(self, folder: Path) -> Iterable[Path]:
        if not folder.is_dir():
            return ()
        self.roots.resolve(folder)
        return folder.iterdir()


@contextmanager
def _as_field_problem(field: str, value: object) -> Iterator[None]:
    """Report a path outside the folders as a problem of a field."""
    try:
        yield
    except DataOutsideRootsError as error:
        raise data_problem(field, str(error), value) from None
