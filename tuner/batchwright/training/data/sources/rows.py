"""Rows of local files, read with Hugging Face `datasets`. Nothing is downloaded."""

import functools
import glob
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchwright.schemas.dataset.data_spec import RecordsData
from batchwright.system.host_failures import disk_failure_of
from batchwright.training.data.base import data_problem, import_optional
from batchwright.training.data.files import DataFolders
from batchwright.training.data.first_reading import FirstReading, TimeIsUpError
from batchwright.training.data.foreign import ForeignFailure, foreign_errors, try_in_child
from batchwright.workloads.base import Sample

Rows: TypeAlias = Any
"""A `datasets.Dataset`, memory-mapped from the cache of `datasets`."""


@dataclass(frozen=True)
class RowFiles:
    """The files of some rows."""

    builder: str
    """Reader of `datasets`."""
    paths: list[Path]
    """The files, in the order of their rows."""
    cache: Path
    """Folder for the copies of `datasets`."""
    reading: FirstReading | None
    """The first reading that these are the rows of; None for all rows."""
    originals: Mapping[Path, Path]
    """Files that others are a part of, where they are."""

    def load(self, paths: list[Path] | None = None) -> Rows:
        """Load the rows of some of the files, first in a child process: a file may crash its parser.

        Raises:
            ForeignFailure: when a file cannot be read.
        """
        named = (self.builder, self.paths if paths is None else paths, self.cache)
        seconds = _LOADING_SECONDS if self.reading is None else self.reading.seconds_left
        try:
            try_in_child(functools.partial(_load, *named), seconds)
        except ForeignFailure:
            if self.reading is not None and time.monotonic() > self.reading.deadline:
                raise TimeIsUpError("the files are too large to be loaded in time") from None
            raise
        return _load(*named)

    def place(self, number: int) -> str:
        """Name the file and the row that has a number among all rows, from 0; rows count from 1 in their file."""
        for path in self.paths[:-1]:
            count = len(replace(self, reading=None).load([path]))
            if number < count:
                return f"row {number + 1} of {self._name(path)}"
            number -= count
        return f"row {number + 1} of {self._name(self.paths[-1])}"

    def _name(self, path: Path) -> Path:
        return self.originals.get(path, path)

    def faulty_place(self) -> str:
        """Name the first file that cannot be read, and its first row at fault where that can be told."""
        features = None
        for path in self.paths:
            for row, line in enumerate(_lines(path) if self.builder != "parquet" else (), start=1):
                if _is_faulty(line, self.builder):
                    return f"row {row} of {self._name(path)}"
            try:
                found = replace(self, reading=None).load([path]).features
            except ForeignFailure:
                first = self._first_faulty_line(path) if self.builder == "json" else None
                return str(self._name(path)) if first is None else f"row {first} of {self._name(path)}"
            if (features := features or found) != found:
                return f"{self._name(path)}, unlike {self._name(self.paths[0])}"
        return ", ".join(str(self._name(path)) for path in self.paths)

    def _first_faulty_line(self, path: Path) -> int | None:
        """Number of the first line, from 1, with which the lines up to it cannot be loaded; None in a large file."""
        if path.stat().st_size > _LARGEST_SEARCHED:
            return None
        lines = path.read_bytes().splitlines(keepends=True)
        good, bad = 0, len(lines)
        with TemporaryDirectory() as folder:
            part, cache = Path(folder) / path.name, Path(folder) / "cache"
            while bad - good > 1:
                middle = (good + bad) // 2
                part.write_bytes(b"".join(lines[:middle]))
                try:
                    try_in_child(functools.partial(_load, self.builder, [part], cache), _LOADING_SECONDS)
                    good = middle
                except ForeignFailure:
                    bad = middle
        return bad or None

    def place_of_null(self) -> str | None:
        """Name the first row that is `null`, which is read as a row whose fields are all missing."""
        for path in self.paths:
            for row, line in enumerate(map(bytes.strip, _lines(path)), start=1):
                if line.startswith(b"null") or line.endswith(b"null"):
                    return f"row {row} of {self._name(path)}"
        return None


class FileRows(NamedTuple):
    """All rows of some files."""

    rows: Rows
    """The rows."""
    files: RowFiles
    """Their files."""


class TextRows(NamedTuple):
    """Rows that have text."""

    rows: Rows
    """The rows."""
    lengths: Tensor
    """Bytes of each row's texts, int64 ``(rows,)``: nearly in proportion to their tokens, without tokenising them."""
    numbers: npt.NDArray[np.int64]
    """Number of each row among all rows of the files, from 0, ``(rows,)``."""
    files: RowFiles
    """The files of the rows."""

    def place(self, index: int) -> str:
        """Name the file and the row in it, from 1."""
        return self.files.place(int(self.numbers[index]))


Encoder: TypeAlias = Callable[[int, dict[str, Any]], Sample]
"""Makes a sample from a row's index and fields."""
Read: TypeAlias = Callable[[], FileRows]
"""Reads the rows of the files."""
Prepared: TypeAlias = tuple[TextRows, Encoder]
"""Rows, and the encoder of a row."""

_LOADING_SECONDS = 24 * 3600.0
"""A bound on the time that a reader of `datasets` may take: terabytes are copied within it."""
_LARGEST_SEARCHED = 2**28
"""Bytes of a file whose first faulty line is looked for by loading parts of it, some twenty times."""
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


def read_rows(data: RecordsData, folders: DataFolders) -> FileRows:
    """Read the rows of the files that ``data`` names.

    Raises:
        SpecError: when a path matches no file or one outside the folders, or a file cannot be read in its format.
    """
    files = folders.matching(data.paths)
    cache = folders.cache or Path(import_optional("datasets.config", "data.kind", "records").HF_DATASETS_CACHE)
    opened, builder = [_opened(path, folders) for path in files], data.format or _format_of(files)
    parts = {path: path for path in files}
    if folders.reading is not None:
        parts = folders.reading.first_bytes(files, cache, of_lines=builder != "parquet")
    found = RowFiles(builder, list(parts), cache, folders.reading, parts)
    try:
        rows = found.load()
    except ForeignFailure as failure:
        place = found.faulty_place()
        raise data_problem(_PATHS, f"cannot be read as {found.builder}: {failure}", place) from None
    if found.builder == "json" and _has_row_of_nulls(rows) and (null := found.place_of_null()) is not None:
        raise data_problem(_PATHS, "has a row `null`: write an object or nothing", null)
    for path, identity in zip(files, opened, strict=True):
        if _identity(path.lstat()) != identity:
            raise data_problem(_PATHS, "was replaced while it was read: try again", path)
    return FileRows(rows, found)


def rows_with_all(  # noqa: PLR0913 - the fields by their kind
    found: FileRows,
    data: RecordsData,
    fields: Mapping[str, str],
    *,
    are_lists: bool = False,
    label: str | None = None,
    tools: str | None = None,
) -> TextRows:
    """The rows that have all texts, or an element in all lists, with only these fields, the label and the tools.

    ``fields`` are those with texts, or with lists (``are_lists``), whose lengths count elements: their names by the
    fields of the spec that name them. Label and tools are of any type.

    Raises:
        SpecError: when a field is missing or holds something else, or no row has all.
    """
    others = {"data.label_field": label, "data.tools_field": tools}
    rows = found.rows
    named = {**fields, **{field: name for field, name in others.items() if name}}
    for field, name in named.items():
        if name not in rows.column_names:
            message = f"is not a field of these rows, which have {', '.join(rows.column_names)}"
            raise data_problem(field, message, f"{name}, {found.files.place(0)}")
    for field, name in fields.items():
        kind = getattr(rows.features[name], "dtype", "nested")
        if holds_lists(rows, name) if are_lists else kind in {"string", "large_string"}:
            continue
        right = list if are_lists else str
        at_fault = (row for row, value in enumerate(rows[name]) if value is not None and not isinstance(value, right))
        message = "holds no lists, as of messages or of words" if are_lists else f"holds {kind}, not text"
        raise data_problem(field, message, f"{name}, {found.files.place(next(at_fault, 0))}")
    compute = import_optional("pyarrow.compute", "data.kind", "records")
    length_of = compute.list_value_length if are_lists else compute.binary_length
    for field, name in named.items():
        _check_texts(found, field, name)
    lengths = (length_of(rows.data.column(name)) for name in fields.values())
    sizes = np.stack([np.asarray(compute.fill_null(each, 0).to_numpy(), dtype=np.int64) for each in lengths])
    kept = np.logical_and.reduce(sizes > 0)
    if not kept.any():
        wanted = f"no row has {'elements' if are_lists else 'text'} in {' and '.join(fields.values())}"
        raise data_problem(_PATHS, wanted, ", ".join(data.paths))
    rows = rows.select_columns(list(dict.fromkeys(named.values())))
    numbers = np.flatnonzero(kept)
    if not kept.all():
        rows = rows.select(numbers, keep_in_memory=True)
    return TextRows(rows, torch.from_numpy(sizes.sum(axis=0)[numbers]), numbers, found.files)


def _check_texts(found: FileRows, field: str, name: str) -> None:
    """Refuse a field with a text that is not UTF-8, which the readers of `datasets` accept."""
    first = 0
    for chunk in found.rows.data.column(name).chunks:
        try:
            chunk.validate(full=True)
        except ValueError:
            for index in range(len(chunk)):
                with foreign_errors(field, functools.partial(found.files.place, first + index)):
                    chunk.take([index]).validate(full=True)  # a slice of lists would check all of their elements
        first += len(chunk)


def _is_faulty(line: bytes, builder: str) -> bool:
    """Return whether a line of a file is not UTF-8 text, or not the JSON object of a row."""
    try:
        text = line.decode("utf-8-sig")
        return builder == "json" and bool(text.strip()) and not isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return True


def _has_row_of_nulls(rows: Rows) -> bool:
    compute = import_optional("pyarrow.compute", "data.kind", "records")
    columns = (compute.is_null(column) for column in rows.data.columns)
    return bool(compute.any(functools.reduce(compute.and_, columns)).as_py())


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with a row in each; the values of a JSON array one by one; else nothing."""
    with path.open("rb") as stream:
        if stream.read(1) != b"[":
            stream.seek(0)
            yield from stream
            return
        stream.seek(0)
        try:
            values = json.load(stream)
        except (ValueError, RecursionError):
            return
    yield from (json.dumps(value).encode() for value in values)


def holds_lists(rows: Rows, name: str) -> bool:
    """Return whether a field of the rows holds lists, as of messages. False where there is no such field."""
    types = import_optional("pyarrow.types", "data.kind", "records")
    if name not in rows.column_names:
        return False
    kind = rows.data.column(name).type
    return bool(types.is_list(kind) or types.is_large_list(kind))


def _opened(path: Path, folders: DataFolders) -> tuple[int, int]:
    """Identity of a file that may be read. `datasets` opens the file once more, by its path."""
    if "::" in str(path):
        raise data_problem(_PATHS, "has `::` in its path, which chains several files: rename it", path)
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


def _load(builder: str, files: list[Path], cache: Path) -> Rows:
    """Load the rows of local files with one of the readers of `datasets`."""
    datasets = import_optional("datasets", "data.kind", "records")
    names = {"train": [glob.escape(str(path)) for path in files]}  # `datasets` reads names as patterns
    options = _OPTIONS.get(builder, {}) | {"cache_dir": str(cache)}
    try:
        with _offline_and_quiet(datasets):
            return datasets.load_dataset(builder, data_files=names, split="train", **options)
    except Exception as error:  # noqa: BLE001 - each reader raises its own kinds of error
        if (failure := disk_failure_of(error)) is not None:
            raise failure from None
        cause = " ".join(str(error.__cause__ or error).split())
        cause = cause or ("there are no rows" if isinstance(error, StopIteration) else type(error).__name__)
        raise ForeignFailure(cause) from None


@contextmanager
def _offline_and_quiet(datasets: Any) -> Iterator[None]:  # noqa: ANN401 - the module
    """Set both libraries offline by attribute, because they read their environment variables only on import."""
    settings = [datasets.config, import_optional("huggingface_hub.constants", "data.kind", "records")]
    offline = [module.HF_HUB_OFFLINE for module in settings]
    level, silent = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told in sentences
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
