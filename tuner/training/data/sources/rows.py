"""Rows of local files, read with Hugging Face `datasets`. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from tuner.schemas.dataset import RecordsData
from tuner.training.data.base import data_problem
from tuner.training.data.files import DataFolders
from tuner.training.data.sources.packages import import_optional

Rows: TypeAlias = Any
"""A `datasets.Dataset`, memory-mapped from the cache of `datasets`."""

_PATHS = "data.paths"
_ARCHIVES = ((b"PK\x03\x04", 0), (b"PK\x05\x06", 0), (b"PK\x07\x08", 0), (b"Rar!", 0), (b"ustar", 257))
"""Signatures of archives, each with its offset in bytes: zip, rar and tar."""
_ARCHIVE_START = 262
_FORMATS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
_OPTIONS: dict[str, dict[str, object]] = {"csv": {"keep_default_na": False, "na_values": [""]}}
"""In a CSV file only an empty cell is missing: `null` and `NA` are words."""


def read_rows(data: RecordsData, folders: DataFolders) -> Rows:
    """Read the rows of the files that ``data`` names.

    Raises:
        SpecError: when a path matches no file or one outside the folders, or a file cannot be read in its format.
    """
    files = folders.matching(data.paths)
    builder = data.format or _format_of(files)
    opened = [_opened(path, folders) for path in files]
    rows = _load(builder, files, folders.cache)
    for path, identity in zip(files, opened, strict=True):
        if _identity(path.lstat()) != identity:
            raise data_problem(_PATHS, "was replaced while it was read: try again", path)
    return rows


def _opened(path: Path, folders: DataFolders) -> tuple[int, int]:
    """Identity of a file that may be read. `datasets` opens the file once more, by its path.

    Raises:
        SpecError: when the file may not be read, or would be read as more than one file.
    """
    if "::" in str(path):
        raise data_problem(_PATHS, "has `::` in its path, which chains several files: name it otherwise", path)
    with folders.open(_PATHS, path) as stream:
        start = stream.read(_ARCHIVE_START)
        if any(start[offset:].startswith(magic) for magic, offset in _ARCHIVES):
            raise data_problem(_PATHS, "is an archive: extract it and name the files", path)
        return _identity(os.fstat(stream.fileno()))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _format_of(files: list[Path]) -> str:
    suffixes = sorted({path.suffix.lower() for path in files})
    formats = {_FORMATS.get(suffix) for suffix in suffixes}
    found = formats.pop()
    if formats or found is None:
        message = f"must be json, csv, parquet or text for files ending in {', '.join(suffixes) or 'nothing'}"
        raise data_problem("data.format", message)
    return found


def _load(builder: str, files: list[Path], cache: Path | None) -> Rows:
    """Load the rows of local files with one of the readers of `datasets`.

    Raises:
        SpecError: when the files cannot be read, or `datasets` is not installed.
    """
    datasets = import_optional("datasets", "data.kind", "records")
    names = {"train": [_escaped(path) for path in files]}
    options = _OPTIONS.get(builder, {}) | ({"cache_dir": str(cache)} if cache else {})
    try:
        with _offline_and_quiet(datasets):
            return datasets.load_dataset(builder, data_files=names, split="train", **options)
    except Exception as error:  # noqa: BLE001 - each reader raises its own kinds of error
        cause = " ".join(str(error.__cause__ or error).split())
        raise data_problem(_PATHS, f"cannot be read as {builder}: {cause}", f"{files[0]} and so on") from None


def _escaped(path: Path) -> str:
    """Escape a path: `datasets` reads file names as patterns."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in str(path))


@contextmanager
def _offline_and_quiet(datasets: Any) -> Iterator[None]:  # noqa: ANN401 - the module
    """Set both libraries offline by attribute, because they read their environment variables only on import."""
    settings = [datasets.config, import_optional("huggingface_hub.constants", "data.kind", "records")]
    offline = [module.HF_HUB_OFFLINE for module in settings]
    level, silent = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        for module in settings:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, before in zip(settings, offline, strict=True):
            module.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(level)
        if not silent:
            datasets.enable_progress_bars()
