"""Rows of local files, read with Hugging Face `datasets`. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from tuner.data_specs import RecordsData
from tuner.training.data.base import data_problem
from tuner.training.data.files import matching_files
from tuner.training.data.packages import needed

Rows: TypeAlias = Any
"""A `datasets.Dataset`, memory-mapped from the cache of `datasets`."""

_FORMATS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
_OPTIONS: dict[str, dict[str, object]] = {"csv": {"keep_default_na": False, "na_values": [""]}}
"""In a CSV file an empty cell alone is missing: `null` and `NA` are words."""


def read_rows(data: RecordsData) -> Rows:
    """The rows of the files that ``data`` names.

    Raises:
        SpecError: when a path matches no file, or a file cannot be read in its format.
    """
    files = matching_files(data.paths)
    builder = data.format or _format_of(files)
    return load_files(builder, files, "data.paths", data.kind, **_OPTIONS.get(builder, {}))


def _format_of(files: list[Path]) -> str:
    suffixes = sorted({path.suffix.lower() for path in files})
    formats = {_FORMATS.get(suffix) for suffix in suffixes}
    found = formats.pop()
    if formats or found is None:
        message = f"must be json, csv, parquet or text for files ending in {', '.join(suffixes) or 'nothing'}"
        raise data_problem("data.format", message)
    return found


def load_files(builder: str, files: list[Path], field: str, kind: str, **options: object) -> Rows:
    """The rows of local files, by one of the readers of `datasets`.

    Raises:
        SpecError: about ``field``, when they cannot be read; about `data.kind`, when `datasets` is not installed.
    """
    datasets = needed("datasets", "data.kind", kind)
    names = {"train": [_escaped(path) for path in files]}
    try:
        with _offline_and_quiet(datasets):
            return datasets.load_dataset(builder, data_files=names, split="train", **options)
    except Exception as error:  # noqa: BLE001 - each reader raises its own kinds of error
        cause = " ".join(str(error.__cause__ or error).split())
        raise data_problem(field, f"cannot be read as {builder}: {cause}", f"{files[0]} and so on") from None


def _escaped(path: Path) -> str:
    """`datasets` takes file names for patterns."""
    return "".join(f"[{it}]" if it in "*?[" else it for it in str(path))


@contextmanager
def _offline_and_quiet(datasets: Any) -> Iterator[None]:  # noqa: ANN401 - the module
    """Both libraries read their environment variables once, when they are imported: that may have been long ago."""
    settings = [datasets.config, needed("huggingface_hub.constants", "data.kind", "records")]
    offline = [it.HF_HUB_OFFLINE for it in settings]
    level, silent = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        for it in settings:
            it.HF_HUB_OFFLINE = True
        yield
    finally:
        for it, before in zip(settings, offline, strict=True):
            it.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(level)
        if not silent:
            datasets.enable_progress_bars()
