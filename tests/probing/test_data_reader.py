"""The data of a spec is read before the first probe, in a process that may crash, hang or be killed."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from batchwright.driving.foreground import run_tuning
from batchwright.errors import CheckLostError, FieldProblem, HostFailureError, HubUnavailableError, SpecError
from batchwright.hardware.inventory import cpu
from batchwright.probing import data_reader
from batchwright.probing.data_reader import DataReader
from batchwright.probing.exit_causes import EndedTask
from batchwright.probing.protocol import DataReport, DataRequest, ProbePaths
from batchwright.probing.supervisor import ProbeSupervisor
from batchwright.schemas.recommendation import DataReading
from batchwright.schemas.results import ProbeResult
from batchwright.schemas.workload import WorkloadSpec
from batchwright.system.data_roots import DataRoots
from batchwright.system.process_exit import classify_exit
from batchwright.system.reading_progress import ReadingProgress
from tests.support.factories import gpt_spec, mlp_spec, resnet_spec, tuning_request

ROWS = 5200


def records(folder: Path, wrong: dict[int, str] | None = None, **changes: Any) -> WorkloadSpec:
    """A spec with two files of rows, of which some are wrong."""
    lines = [json.dumps({"text": f"row {number}"}) for number in range(1, ROWS + 1)]
    (folder / "rows1.jsonl").write_text("\n".join(lines[:100]) + "\n")
    for number, line in (wrong or {}).items():
        lines[number - 1] = line
    (folder / "rows2.jsonl").write_text("\n".join(lines) + "\n")
    return gpt_spec(data={"kind": "records", "paths": [f"{folder}/rows*.jsonl"], **changes})


# --- real processes ---


def test_all_rows_are_read_within_the_time(supervisor: ProbeSupervisor, tmp_path: Path) -> None:
    """The reading says how many of how many, and tells the progress meanwhile."""
    seen: list[tuple[int, int]] = []
    found = supervisor.read_data(records(tmp_path), on_progress=lambda *numbers: seen.append(numbers))
    assert (found.read, found.total, found.in_words) == (5300, 5300, "all 5,300 samples")
    assert seen[-1][1] == 5300


class Board:
    """Collects what a tuning shows."""

    def __init__(self) -> None:
        self.probes: list[ProbeResult] = []
        self.activities: list[str] = []

    def set_activity(self, activity: str) -> None:
        """Collect an activity."""
        self.activities.append(activity)

    def add(self, probe: ProbeResult) -> None:
        """Collect a probe."""
        self.probes.append(probe)


@pytest.mark.usefixtures("forked")
def test_row_5000_ends_a_tuning_before_its_first_probe(tmp_path: Path) -> None:
    """The error names the file and the row, and nothing was probed."""
    board = Board()
    with pytest.raises(SpecError, match=r"row 5000 of .*/rows2\.jsonl"):
        run_tuning(tuning_request(records(tmp_path, {5000: '{"text": '})), board)
    assert not board.probes
    assert any("data" in activity for activity in board.activities)


def test_an_image_in_the_middle_is_named(supervisor: ProbeSupervisor, tmp_path: Path) -> None:
    """It is decoded when its turn comes, hours into a run: now before the first probe."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / name / f"{number}.png")
    whole = (tmp_path / "dog/2.png").read_bytes()
    (tmp_path / "dog/2.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SpecError, match=r"dog/2\.png"):
        supervisor.read_data(resnet_spec(data={"kind": "images", "path": str(tmp_path)}))


def test_a_sample_is_read_of_data_that_takes_longer(
    supervisor: ProbeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading ends at its time, and says of how many samples it read some."""
    monkeypatch.setattr(data_reader, "_SECONDS", 0.0)
    found = supervisor.read_data(gpt_spec(data={"kind": "arrays", "path": arrays(tmp_path)}))
    assert (found.read, found.total) == (0, 50)
    assert found.in_words == "nothing: the time of the reading was up"


@pytest.mark.usefixtures("forked")
def test_data_that_a_service_may_not_read_is_not_read(tmp_path: Path) -> None:
    """A run elsewhere may read it: the tuning goes on, and says so."""
    (tmp_path / "allowed").mkdir()
    with ProbeSupervisor(cpu(), data_roots=DataRoots([str(tmp_path / "allowed")])) as running:
        found = running.read_data(records(tmp_path))
    assert (found.read, found.total) == (0, None)
    assert "is outside the folders that jobs may read" in found.in_words


def test_what_was_read_is_told_in_words() -> None:
    """All, a part of so many, and a part of an unknown number."""
    assert DataReading(read=1200, total=1200, unit="rows", seconds=1.0).in_words == "all 1,200 rows"
    assert DataReading(read=12, total=1200, unit="rows", seconds=1.0).in_words == "a sample: 12 of 1,200 rows"
    assert DataReading(read=12, seconds=1.0, unit="bytes").in_words == "a sample: 12 of more bytes"


def arrays(folder: Path) -> str:
    """A file of token ids."""
    np.savez(folder / "ids.npz", input_ids=np.zeros((50, 16), dtype=np.int64))
    return str(folder / "ids.npz")


# --- ends of the process ---


def dead(code: int, progress: ReadingProgress, *, timed_out: bool = False, kills: int = 0) -> EndedTask:
    """A process that left no report."""
    return EndedTask(classify_exit(code, kills), timed_out, 0.0, 1.0, "a line\nSegmentation fault", None, [], progress)


def reported(**fields: Any) -> EndedTask:
    """A process that left a report."""
    result = DataReport(**fields).model_dump_json().encode()
    return EndedTask(
        classify_exit(0, 0),
        timed_out=False,
        requested_at=0.0,
        ended_at=1.0,
        output="",
        result=result,
        phases=[],
        progress=ReadingProgress(),
    )


def reading(*ends: EndedTask) -> tuple[DataReader, list[DataRequest]]:
    """A reading whose processes end as given, and their requests."""
    requests: list[DataRequest] = []
    left = list(ends)

    def run(
        request: DataRequest, timeout: float, should_stop: Callable[[], bool], is_stuck: Callable[[ProbePaths], bool]
    ) -> EndedTask:
        del timeout, should_stop, is_stuck
        requests.append(request)
        return left.pop(0)

    return DataReader(mlp_spec(), run, lambda: False, lambda _read, _total: None), requests


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (dead(-signal.SIGSEGV, ReadingProgress(7, 7, 9)), "SIGSEGV.*row 8 of a.jsonl"),
        (dead(-signal.SIGKILL, ReadingProgress(7, 7, 9), timed_out=True), "took more than 20 s.*row 8 of a.jsonl"),
        (dead(-signal.SIGKILL, ReadingProgress(7, 7, 9), kills=1), "more memory than the host has.*row 8 of a.jsonl"),
    ],
)
def test_the_sample_that_ended_the_process_is_named(end: EndedTask, message: str) -> None:
    """A second process is asked for its place."""
    reader, requests = reading(end, reported(place="row 8 of a.jsonl"))
    with pytest.raises(SpecError, match=message):
        reader.read()
    assert [request.named for request in requests] == [None, 7]


def test_a_crash_while_files_are_opened_is_told() -> None:
    """No sample is to be named."""
    reader, _ = reading(dead(-signal.SIGSEGV, ReadingProgress()))
    with pytest.raises(SpecError, match="SIGSEGV"):
        reader.read()


def test_files_that_take_too_long_to_open_are_not_the_fault_of_the_data() -> None:
    """The tuning goes on, and says that nothing was read."""
    reader, _ = reading(dead(-signal.SIGKILL, ReadingProgress(), timed_out=True))
    assert reader.read() == DataReading(read=0, seconds=300.0)


def test_a_process_that_is_killed_is_repeated_once() -> None:
    """A kill from outside says nothing of the data."""
    lost = dead(-signal.SIGKILL, ReadingProgress(3, 3, 9))
    reader, _ = reading(lost, reported(reading=DataReading(read=9, total=9, seconds=1.0)))
    assert reader.read().read == 9
    with pytest.raises(CheckLostError, match="killed 2 times"):
        reading(lost, lost)[0].read()


def test_a_hub_or_a_disk_that_fails_is_told_as_such() -> None:
    """Neither is a fault of the spec."""
    with pytest.raises(HubUnavailableError, match="does not answer"):
        reading(reported(unavailable=(FieldProblem("model.pretrained", "does not answer"),)))[0].read()
    with pytest.raises(HostFailureError, match="No space") as found:
        reading(reported(host_failure="disk-full: No space left on device"))[0].read()
    assert found.value.cause == "disk-full"
