"""Tests of ``batchwright.commands.counted_updates``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchwright.commands.counted_updates import judge_updates
from batchwright.commands.reports import Reports
from batchwright.commands.templates import Figures
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
    events += [
        {
            "event": "update",
            "rank": number,
            "world_size": ranks,
            "optimizer": "AdamW",
            "backward_passes": passes,
            "forward_samples": forward,
            "loader_samples": loader,
            "ended_at": 0.0,
        }
        for passes, forward, loader in updates
    ]
    events.append({"event": "done", "rank": number, "skipped": 0, "sequences": [], **done})
    lines = "".join(json.dumps({"at": 0.0, **event}) + "\n" for event in events)
    (folder / f"{number + 1}.jsonl").write_text(lines)


def judged(folder: Path, figures: Figures = ALONE, *, takes_accumulation: bool = True) -> CountedUpdates:
    """The verdict on the events of a folder."""
    reports = Reports(folder)
    reports.read()
    counted = judge_updates(reports, figures, 2, takes_accumulation=takes_accumulation, of_plan=True)
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
    assert counted.statement == "1 backward pass of 25 samples per update: 25; planned were 4 of 25 samples: 100"


def test_a_smaller_last_window_is_refused(folder: Path) -> None:
    """Even where the first update is as planned."""
    rank(folder, 0, (4, 100, 100), (2, 50, 50))
    counted = judged(folder)
    assert counted.as_planned is False
    assert "4, 2 backward passes in 2 updates with 100, 50 samples" in counted.statement


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


@pytest.mark.parametrize(("forward", "loader"), [(4, 100), (100, 800), (100, None), (None, 100)])
def test_either_source_confirms_the_samples(folder: Path, forward: int | None, loader: int | None) -> None:
    """Packed sequences have one row, and a loader may give a batch that the program divides."""
    rank(folder, 0, (4, forward, loader), (4, forward, loader))
    assert judged(folder).as_planned is True


def test_samples_that_nothing_shows_leave_the_question_open(folder: Path) -> None:
    """The backward passes alone do not give the batch."""
    rank(folder, 0, (4, None, None), (4, None, None))
    counted = judged(folder)
    assert counted.as_planned is None
    assert "no tensor showed the samples" in counted.statement


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


def test_every_rank_is_awaited(folder: Path) -> None:
    """A rank that has made its updates does not end those that have not."""
    reports = Reports(folder)
    rank(folder, 0, (4, 100, 100), ranks=2)
    reports.read()
    assert not reports.are_finished
    rank(folder, 1, (4, 100, 100), ranks=2)
    reports.read()
    assert reports.are_finished


def test_lengths_that_vary_are_reported(folder: Path) -> None:
    """The evidence has the longest sequence."""
    rank(folder, 0, (4, 100, 100), (4, 100, 100), sequences=[64, 128])
    counted = judged(folder)
    assert (counted.longest_sequence, counted.lengths_vary) == (128, True)


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
