"""Tests of ``batchwright.commands.counted_updates``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batchwright.commands.counted_updates import judge_updates
from batchwright.commands.reports import Reports
from batchwright.commands.templates import Figures
from batchwright.schemas.command import CommandModel
from batchwright.schemas.results import CountedUpdates

PLANNED = Figures(micro_batch_size=25, accumulation_steps=4, world_size=2, updates=2)
ALONE = Figures(micro_batch_size=25, accumulation_steps=4, world_size=1, updates=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of events."""
    return tmp_path


def rank(folder: Path, number: int, *updates: tuple[int, int | None, int | None], ranks: int = 1, **done: Any) -> None:
    """Write the events of a rank: backward passes, samples by the model and by the loader, of each update."""
    events: list[dict[str, Any]] = [{"event": "start", "argv": ["python"], "python": "3.11.7"}]
    for at, (passes, rows, drawn) in enumerate(updates, 1):
        counts = {"dimension 0": rows, "loader 1": drawn}
        events.append(
            {
                "event": "update",
                "rank": number,
                "world_size": ranks,
                "number": at,
                "optimizer": "AdamW",
                "optimizer_number": 0,
                "backward_passes": passes,
                "samples": {name: count for name, count in counts.items() if count is not None},
                "ended_at": 0.0,
            }
        )
    events.append({"event": "done", "rank": number, "skipped": 0, **done})
    lines = "".join(json.dumps({"at": 0.0, **event}) + "\n" for event in events)
    (folder / f"{number + 1}.jsonl").write_text(lines)


def judged(
    folder: Path, figures: Figures = ALONE, *, takes_accumulation: bool = True, unit: Mapping[str, int] | None = None
) -> CountedUpdates:
    """The verdict on the events of a folder."""
    reports = Reports(folder)
    reports.read()
    words = ("train", "{micro_batch_size}", *(("{gradient_accumulation_steps}",) if takes_accumulation else ()))
    model = CommandModel(kind="command", argv=words, **(unit or {}))
    counted = judge_updates(reports, figures, model, of_plan=True)
    assert counted is not None
    return counted


def test_what_was_planned_is_said_with_its_figures(folder: Path) -> None:
    """The updates of every rank are counted."""
    for number in (0, 1):
        rank(folder, number, (4, 100, 100), (4, 100, 100), ranks=2)
    counted = judged(folder, PLANNED)
    assert counted.as_planned is True
    assert counted.statement == "4 backward passes of 25 samples per update on each of 2 ranks: 200, as planned"


def test_ignored_accumulation_is_refused_with_both_figures(folder: Path) -> None:
    """One backward pass per update, where four were planned."""
    rank(folder, 0, (1, 25, 25), (1, 25, 25))
    counted = judged(folder)
    assert counted.as_planned is False
    assert counted.statement == "1 backward pass of 25 samples per update: 25; planned: 4 of 25 samples: 100"


def test_a_smaller_last_window_is_refused(folder: Path) -> None:
    """Even where the first update is as planned."""
    rank(folder, 0, (4, 100, 100), (2, 50, 50))
    counted = judged(folder)
    assert counted.as_planned is False
    assert "4, 2 backward passes in the last of 2 updates" in counted.statement


@pytest.mark.parametrize(
    ("updates", "ends"),
    [
        pytest.param([(4, 100, 100), (2, 50, 50), (4, 100, 100)], [1], id="the end of an epoch"),
        pytest.param([(4, 100, 100), (4, 90, 90), (4, 100, 100)], [1], id="a smaller last batch"),
        pytest.param([(4, 100, 100), (4, 90, 90)], [], id="a smaller last batch at the end of the program"),
        pytest.param([(1, 25, 25), (2, 50, 50), (4, 100, 100), (4, 100, 100)], [], id="a ramp"),
    ],
)
def test_smaller_updates_may_be_as_planned(folder: Path, updates: list[tuple[int, int, int]], ends: list[int]) -> None:
    """At the end of an epoch, and before the first update with all passes."""
    rank(folder, 0, *updates, epoch_ends=ends)
    counted = judged(folder)
    assert counted.as_planned is True
    assert counted.statement == "4 backward passes of 25 samples per update: 100, as planned"


def test_a_size_that_a_framework_multiplied_is_refused(folder: Path) -> None:
    """The passes are right, and their samples are not."""
    for number in (0, 1):
        rank(folder, number, (4, 200, 200), (4, 200, 200), ranks=2)
    assert judged(folder, PLANNED).as_planned is False


def test_other_ranks_than_planned_are_refused_with_the_remedy(folder: Path) -> None:
    """The plan is for one rank by default."""
    for number in (0, 1):
        rank(folder, number, (4, 100, 100), (4, 100, 100), ranks=2)
    counted = judged(folder, ALONE)
    assert counted.as_planned is False
    assert "--world-size 2" in counted.statement


@pytest.mark.parametrize(("rows", "drawn"), [(4, 100), (100, 800), (100, None), (None, 100)])
def test_either_source_confirms_the_samples(folder: Path, rows: int | None, drawn: int | None) -> None:
    """Packed sequences have one row, and a loader may give a batch that the program divides."""
    rank(folder, 0, (4, rows, drawn), (4, rows, drawn))
    assert judged(folder).as_planned is True


def test_batches_of_random_sizes_are_left_open(folder: Path) -> None:
    """As a sampler draws them that takes each sample by chance."""
    for updates in ([(1, 5, 5), (1, 9, 9)], [(1, 9, 9), (1, 5, 5)]):
        rank(folder, 0, *updates)
        assert judged(folder, takes_accumulation=False).as_planned is None


@pytest.mark.parametrize(
    ("passes", "rows", "drawn"),
    [
        pytest.param(4, None, None, id="nothing shows the samples"),
        pytest.param(4, 4, None, id="one row a pass"),
        pytest.param(4, 700, 300, id="each counts something else"),
        pytest.param(8, 200, None, id="two passes a micro-batch"),
    ],
)
def test_what_a_single_size_cannot_show_is_left_open(
    folder: Path, passes: int, rows: int | None, drawn: int | None
) -> None:
    """Nothing is refused that another unit of a sample explains."""
    rank(folder, 0, (passes, rows, drawn), (passes, rows, drawn))
    counted = judged(folder)
    assert counted.as_planned is None
    assert "not verified to be the 100 planned samples" in counted.statement


def test_two_passes_of_a_micro_batch_are_confirmed_by_the_loader(folder: Path) -> None:
    """As of a program with two losses."""
    rank(folder, 0, (8, 200, 100), (8, 200, 100))
    assert judged(folder).as_planned is True


def test_one_sample_is_not_confirmed_by_a_dimension(folder: Path) -> None:
    """The one row of a packed batch is one, too."""
    rank(folder, 0, (4, 4, None), (4, 4, None))
    assert judged(folder, Figures(1, 4, 1, 2)).as_planned is None


@pytest.mark.parametrize(("unit", "verdict"), [({"samples_per_unit": 7}, None), ({"samples_per_unit": 2}, False)])
def test_what_a_sample_is_may_be_said(folder: Path, unit: dict[str, int], *, verdict: bool | None) -> None:
    """It is kept as unverified, and refuses what contradicts it."""
    rank(folder, 0, (4, 700, None), (4, 700, None))
    counted = judged(folder, unit=unit)
    assert counted.as_planned is verdict
    assert "given that 7 of a count are a sample" in counted.statement or verdict is False


def test_a_command_that_takes_sizes_only_is_not_judged_by_its_accumulation(folder: Path) -> None:
    """But the result says so."""
    rank(folder, 0, (8, 200, 200), (8, 200, 200))
    counted = judged(folder, takes_accumulation=False)
    assert counted.as_planned is None
    assert "only its micro-batch size was set" in counted.statement


def test_a_command_that_takes_sizes_only_is_judged_by_them(folder: Path) -> None:
    """Another size than the probe's would prove nothing."""
    rank(folder, 0, (8, 800, 800), (8, 800, 800))
    assert judged(folder, takes_accumulation=False).as_planned is False


def test_a_command_that_takes_sizes_only_may_go_backward_twice_in_a_micro_batch(folder: Path) -> None:
    """The data loader counts the samples, and the model was called once with each."""
    rank(folder, 0, (8, 100, 100), (8, 100, 100))
    counted = judged(folder, takes_accumulation=False)
    assert counted.as_planned is None
    assert counted.statement.startswith("8 backward passes for 100 samples per update: 100; the command takes no")


def test_an_optimizer_that_counts_nothing_leaves_the_verdict_to_another(folder: Path) -> None:
    """As that of a generator, which made its samples when its critic was trained."""
    rank(folder, 0, (4, 100, 100), (4, 100, 100), (4, None, None), (4, None, None))
    path = folder / "1.jsonl"
    head, *lines = path.read_text().splitlines()
    lines[2:4] = [line.replace('"optimizer_number": 0', '"optimizer_number": 1') for line in lines[2:4]]
    path.write_text("\n".join([head, *lines]) + "\n")
    counted = judged(folder)
    assert (counted.as_planned, len(counted.ranks)) == (True, 2)


def test_a_batch_with_time_first_is_described_by_its_samples(folder: Path) -> None:
    """No data loader and not the first dimension, but another one has the size."""
    rank(folder, 0, (4, 140, None), (4, 140, None))
    path = folder / "1.jsonl"
    path.write_text(path.read_text().replace('"dimension 0": 140', '"dimension 0": 140, "dimension 1": 100'))
    assert judged(folder).statement.startswith("4 backward passes of 25 samples per update: 100; not verified")


def test_each_optimizer_has_updates_of_its_own(folder: Path) -> None:
    """A critic goes backward twice in a micro-batch, and its generator once."""
    rank(folder, 0, (8, 200, 100), (4, 100, 0), (8, 200, 100), (4, 100, 0))
    path = folder / "1.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        event["optimizer_number"] = event.get("number", 1) % 2
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    counted = judged(folder)
    assert [each.backward_passes for each in counted.ranks] == [(8, 8), (4, 4)]
    assert [each.optimizer for each in counted.ranks] == ["AdamW", "AdamW 2"]
    assert counted.as_planned is True


def test_every_rank_is_awaited(folder: Path) -> None:
    """A rank that has made its updates does not end those that have not."""
    reports = Reports(folder)
    rank(folder, 0, (4, 100, 100), ranks=2)
    reports.read()
    assert not reports.are_finished
    rank(folder, 1, (4, 100, 100), ranks=2)
    reports.read()
    assert reports.are_finished


def test_the_shapes_of_all_ranks_are_reported(folder: Path) -> None:
    """The smallest and the largest size of each dimension."""
    rank(folder, 0, (4, 100, 100), ranks=2, shapes={"Net.0": [[25, 64], [25, 128]]})
    rank(folder, 1, (4, 100, 100), ranks=2, shapes={"Net.0": [[25, 32], [25, 96]]})
    assert judged(folder, PLANNED).shapes == {"Net.0": ((25, 25), (32, 128))}


def test_what_may_take_memory_later_is_reported(folder: Path) -> None:
    """By the code of its warning."""
    unseen: dict[str, Any] = {
        "idle_optimizers": [["torch.optim.Adam", 12_000]],
        "idle_parameters": 5,
        "held_parameters": 100,
    }
    rank(folder, 0, (4, 100, 100), **unseen, later_evaluation="train.py:7")
    found = judged(folder).unseen
    assert "Adam (12,000 parameters)" in found["optimizer-did-not-step"]
    assert "5 parameters" in found["parameters-without-gradient"]
    assert "(train.py:7)" in found["evaluation-not-seen"]


def test_a_line_that_is_being_written_is_read_later(folder: Path) -> None:
    """A process writes while the supervisor reads."""
    path, reports = folder / "7.jsonl", Reports(folder)
    path.write_text('{"event": "forward", "at": 1.0}\n{"event": "backw')
    reports.read()
    assert reports.waiting_passes == 0
    with path.open("a") as stream:
        stream.write('ard", "at": 2.0, "waiting": 3}\n')
    reports.read()
    assert (reports.forward_at, reports.waiting_passes) == (1.0, 3)
