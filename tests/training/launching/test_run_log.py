"""The log of a run: what is worth a line in an update, and the lines of a real run that is stopped and goes on."""

import re
from pathlib import Path
from typing import Any

import pytest

from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import EvaluationReport, MicroBatchSplit, TrainingProgress
from batchwright.training.launching.run_log import events
from tests.support.factories import recommendation
from tests.support.whole_runs import run_to_end

DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (.*)")


def progress(update: int, updates: int = 300, **changes: Any) -> TrainingProgress:
    """An update of 64 samples."""
    figures: dict[str, Any] = {
        "loss": 2.5,
        "terms": {},
        "learning_rate": 0.1,
        "gradient_norm": 1.0,
        "skipped": False,
        "samples": 64,
        "micro_batch_sizes": (64,),
        "samples_seen": 64 * update,
        "epoch": 0,
        "seconds": 2.0,
        "peak_bytes": None,
    }
    return TrainingProgress(update=update, updates=updates, **(figures | changes))


def test_the_loss_has_ten_lines() -> None:
    """And one for the first update."""
    told = [update for update in range(1, 301) if list(events(progress(update)))]
    assert told == [1, *range(30, 301, 30)]
    assert list(events(progress(30))) == ["update 30 of 300: loss 2.5000, 32 samples per second"]


def test_a_divided_micro_batch_and_a_lost_step_are_told() -> None:
    """With the sizes, and the rank."""
    split = MicroBatchSplit(rank=1, size=300, parts=(150, 150), message="CUDA out of memory")
    assert list(events(progress(7, splits=(split,), skipped=True, weights={"loss": 64.0}))) == [
        "update 7 of 300: micro-batch of 300 did not fit on rank 1: 150 + 150 from here on",
        "update 7 of 300: no step was made, since a gradient was not finite",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": 0.25, "metrics": {"accuracy": 0.875}}, "after update 6: loss 0.2500  accuracy 0.8750"),
        ({"loss": 0.25, "metrics": {"f1": None}}, "after update 6: loss 0.2500  f1 not known"),
        (
            {"loss": 0.25, "of_averages": True, "trained": {"loss": 0.5, "terms": {}}},
            "of the moving averages after update 6: loss 0.2500  loss of the trained weights 0.5000",
        ),
        ({"loss": 0.25, "is_best": True}, "after update 6: loss 0.2500  (best so far)"),
        ({"loss": None, "message": "one sample does not fit"}, "after update 6: one sample does not fit"),
    ],
)
def test_an_evaluation_is_told(changes: dict[str, Any], words: str) -> None:
    """Its figures, or why it has none."""
    figures = {"update": 6, "terms": {}, "weights": {}, "samples": 8, "micro_batch_size": 8, "seconds": 1.0}
    report = EvaluationReport(**(figures | changes))
    assert list(events(progress(7, evaluations=(report,)))) == [f"evaluation {words}"]


@pytest.mark.usefixtures("forked")
def test_a_run_tells_what_happens(tmp_path: Path) -> None:
    """Its beginning, its loss, its checkpoints and its end, each with the time; a process that resumes goes on."""
    found = recommendation(effective_batch_size=16)
    for updates in (2, 3):
        run_to_end(tmp_path, found, TrainingRequest(updates=updates, checkpoint_every=1))
    lines = [DATED.fullmatch(line) for line in (tmp_path / "log.txt").read_text().splitlines()]
    texts = [line.group(1) for line in lines if line is not None]
    assert [re.sub(r"loss .*", "loss", text) for text in texts] == [
        "begun: 2 updates of 16 of 50 samples, in micro-batches of at most 4, on cpu",
        "update 1 of 2: loss",
        "checkpoint of update 1 written",
        "update 2 of 2: loss",
        "checkpoint of update 2 written",
        "succeeded: 2 updates made",
        "resumed after update 2: 3 updates of 16 of 50 samples, in micro-batches of at most 4, on cpu",
        "update 3 of 3: loss",
        "checkpoint of update 3 written",
        "succeeded: 3 updates made",
    ]
