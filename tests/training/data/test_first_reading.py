"""A first reading reads a sample of what takes long, spread over the data, or the first rows of large files."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from batchwright.errors import SpecError
from batchwright.schemas.dataset.data_spec import RecordsData
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.reading_progress import ReadingProgress
from batchwright.training.data import first_reading
from batchwright.training.data.base import SelectedSamples
from batchwright.training.data.build import build_data
from batchwright.training.data.files import DataFolders
from batchwright.training.data.first_reading import FirstReading, TimeIsUpError, place_in
from batchwright.training.data.sources.completions import encoded_rows
from batchwright.training.data.sources.rows import read_rows, rows_with_all
from batchwright.training.evaluation.held_out_data import build_run_data
from batchwright.workloads.base import Sample
from batchwright.workloads.build import build_workload
from tests.support.factories import gpt_spec


class Counted:
    """Samples that end the time of a reading when one is read, and know their places."""

    def __init__(self, count: int, last: int = -1, reading: FirstReading | None = None) -> None:
        self.count = count
        self.last = last
        self.reading = reading
        self.indices: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        self.indices.append(index)
        if len(self.indices) == self.last and self.reading is not None:
            self.reading.deadline = 0.0
        return index

    def place(self, index: int) -> str:
        """Name a sample."""
        return f"row {index + 1}"


def new_reading(folder: Path) -> FirstReading:
    """A reading whose time is not up."""
    return FirstReading(time.monotonic() + 600.0, folder / "progress")


def test_every_sample_is_read_once(tmp_path: Path) -> None:
    """In an order that spreads the first ones over the data."""
    reading, samples, others = new_reading(tmp_path), Counted(200), Counted(30)
    reading.read_samples([samples, others])
    assert sorted(samples.indices) == list(range(200))
    assert samples.indices[:4] == [0, 61, 122, 183]
    assert sorted(others.indices) == list(range(30))
    assert (reading.read, reading.total, reading.unit) == (230, 230, "samples")
    assert ReadingProgress.of(reading.progress).total == 230


def test_a_reading_ends_with_its_time(tmp_path: Path) -> None:
    """It has counted what it has read."""
    reading = new_reading(tmp_path)
    reading.read_samples([Counted(200, 5, reading)])
    assert (reading.read, reading.total) == (5, 200)


def test_a_sample_is_named_over_all_parts() -> None:
    """Also of a part that was selected from others."""
    selected = SelectedSamples(Counted(10), torch.tensor([4, 7]))
    assert place_in([selected, Counted(3)], 1) == "row 8"
    assert place_in([selected, Counted(3)], 4) == "row 3"


def records(folder: Path, count: int) -> WorkloadSpec:
    """A spec whose data has two files of rows."""
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {row}"}) for row in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return gpt_spec(data={"kind": "records", "paths": [f"{folder}/*.jsonl"]})


def texts_of(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Encode rows as their texts."""
    return list(rows["text"])


def test_rows_that_are_encoded_in_order_end_with_the_time(tmp_path: Path) -> None:
    """The first thousand are encoded at once, and counted."""
    data, reading = records(tmp_path, 1500).data, new_reading(tmp_path)
    assert isinstance(data, RecordsData)
    rows = read_rows(data, DataFolders(cache=tmp_path / "cache", reading=reading))
    texts = rows_with_all(rows, data, {"data.text_field": "text"})
    reading.deadline = 0.0
    with pytest.raises(TimeIsUpError):
        list(encoded_rows(texts, texts_of, "data.text_field"))
    assert (reading.read, reading.total, reading.unit) == (1000, 3000, "rows")


def test_the_first_lines_of_large_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of all rows is not known then, and a split that needs it is not checked."""
    spec = records(tmp_path, 100)
    monkeypatch.setattr(first_reading, "LARGEST_BYTES", int(1.5 * (tmp_path / "a.jsonl").stat().st_size))
    spec = gpt_spec(data=spec.data, evaluation={"count": 180, "every": 1})
    reading = new_reading(tmp_path)
    folders = DataFolders(cache=tmp_path / "cache", reading=reading)
    data = build_run_data(spec, build_workload(spec), folders)
    reading.read_samples([data.training.samples])
    assert 130 < reading.read < 160
    assert reading.total is None
    with (tmp_path / "b.jsonl").open("r+") as stream:
        stream.write("3")
    with pytest.raises(SpecError, match=f"row 1 of {tmp_path}/b.jsonl"):
        build_run_data(spec, build_workload(spec), DataFolders(cache=tmp_path / "other", reading=new_reading(tmp_path)))


def test_a_large_array_of_json_is_not_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of it then."""
    (tmp_path / "rows.json").write_text(json.dumps([{"text": "a"}] * 10))
    spec = gpt_spec(data={"kind": "records", "paths": [f"{tmp_path}/rows.json"]})
    monkeypatch.setattr(first_reading, "LARGEST_BYTES", 50)
    with pytest.raises(TimeIsUpError):
        build_data(spec, build_workload(spec), DataFolders(cache=tmp_path / "cache", reading=new_reading(tmp_path)))
