"""A run's progress as TensorBoard reads it: what was written is there, each update once."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchwright.errors import SpecError
from batchwright.schemas.requests import TrackerName, TrainingRequest
from batchwright.schemas.training import EvaluationReport, RunOutcome, TrainedFigures, TrainingProgress, TrainingResult
from batchwright.training.launching.launcher import TrainingProcess
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.training.trackers.base import TrackedRun
from batchwright.training.trackers.figures import figures_of
from batchwright.training.trackers.requested_trackers import Trackers
from batchwright.training.worker import ProgressWriter
from tests.support.factories import gpt_spec, mlp_spec, recommendation

pytestmark = pytest.mark.usefixtures("forked")


def progress(update: int, **changes: Any) -> TrainingProgress:
    """An update of ten samples in a tenth of a second."""
    given: dict[str, Any] = {
        "updates": 100,
        "loss": 1.0 / update,
        "terms": {"loss": 1.0 / update},
        "weights": {"loss": 160.0},
        "learning_rate": 0.1,
        "gradient_norm": 1.5,
        "skipped": False,
        "samples": 10,
        "micro_batch_sizes": (5, 5),
        "samples_seen": 10 * update,
        "epoch": 0,
        "seconds": 0.1,
        "peak_bytes": None,
    }
    return TrainingProgress(update=update, **{**given, **changes})


@contextmanager
def writing(
    paths: RunPaths, resumed_from: int = 0, tracker: TrackerName | None = "tensorboard"
) -> Iterator[ProgressWriter]:
    """A writer with a tracker, which is closed at the end."""
    trackers = Trackers(() if tracker is None else (tracker,), TrackedRun(paths, "a run", {}), pytest.fail)
    try:
        yield ProgressWriter(paths, resumed_from, trackers, None)
    finally:
        trackers.close(RunOutcome.SUCCEEDED)


def figures(update: TrainingProgress) -> dict[str, float]:
    """The figures of an update without a limit."""
    return figures_of(update, None)[update.update]


def events(paths: RunPaths, tag: str) -> list[tuple[int, float]]:
    """The points that TensorBoard shows for a tag: update and value, in the order of time."""
    reader = EventAccumulator(str(paths.tensorboard), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def losses(paths: RunPaths) -> list[tuple[int, float]]:
    """Updates and losses of the run's own log, rounded as TensorBoard rounds, to fp32."""
    made = ProgressLog(paths.progress).new_lines()
    return [(progress.update, torch.tensor(progress.loss, dtype=torch.float32).item()) for progress in made]


def ended(process: TrainingProcess) -> TrainingResult:
    """The run's result."""
    while (result := process.poll()) is None:
        time.sleep(0.02)
    return result


def test_a_run_writes_what_it_logs(tmp_path: Path) -> None:
    """The losses are those of `progress.jsonl`, one for each update, and the speed is reported in tokens too."""
    process = TrainingProcess(tmp_path)
    process.start(recommendation(gpt_spec()), TrainingRequest(updates=4, trackers=("tensorboard",)))
    assert ended(process).outcome is RunOutcome.SUCCEEDED
    paths = RunPaths(tmp_path)
    assert len(losses(paths)) == 4
    assert events(paths, "loss/total") == losses(paths)
    assert [step for step, _ in events(paths, "speed/tokens_per_second")] == [1, 2, 3, 4]


def test_a_killed_run_has_each_update_once(tmp_path: Path) -> None:
    """Updates after the checkpoint are made again; none is lost, none is there twice, after SIGKILL."""
    found, paths = recommendation(mlp_spec()), RunPaths(tmp_path)
    process = TrainingProcess(tmp_path)
    process.start(found, TrainingRequest(updates=100_000, checkpoint_every=5, trackers=("tensorboard",)))
    while (paths.checkpointed_update() or 0) < 10:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pids[0], signal.SIGKILL)
    assert ended(process).outcome is RunOutcome.FAILED
    total = ProgressLog(paths.progress).last_update() + 3
    again = TrainingProcess(tmp_path)
    again.start(found, TrainingRequest(updates=total, trackers=("tensorboard",)))
    assert ended(again).outcome is RunOutcome.SUCCEEDED
    assert [step for step, _ in events(paths, "loss/total")] == list(range(1, total + 1))
    assert events(paths, "loss/total") == losses(paths)


def test_updates_made_again_replace_those_before(tmp_path: Path) -> None:
    """Resuming from update 2 drops the lines and events of updates 3 and 4."""
    paths = RunPaths(tmp_path)
    with writing(paths) as writer:
        for update in (1, 2, 3, 4):
            writer.append(progress(update, loss=1.0))
    with writing(paths, resumed_from=2) as writer:
        writer.append(progress(3, loss=2.0))
    assert events(paths, "loss/total") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_an_update_that_is_reported_again_is_tracked_once(tmp_path: Path) -> None:
    """Its line is replaced, and of its figures those of a later evaluation are added, also by another process."""
    fields: dict[str, Any] = {"terms": {}, "weights": {}, "samples": 9, "micro_batch_size": 5, "seconds": 0.1}
    evaluated = progress(2, evaluations=(EvaluationReport(update=2, loss=3.0, **fields),))
    paths = RunPaths(tmp_path)
    with writing(paths) as writer:
        writer.append(progress(1))
        writer.append(progress(2))
    for _ in range(2):
        with writing(paths, resumed_from=2) as writer:
            writer.append(evaluated)
    assert [made.update for made in ProgressLog(paths.progress).new_lines()] == [1, 2]
    assert events(paths, "loss/total") == [(1, 1.0), (2, 0.5)]
    assert events(paths, "evaluation/loss") == [(2, 3.0)]


def test_an_update_that_only_a_tracker_has_is_tracked_once(tmp_path: Path) -> None:
    """A kill between its figures and its line: the process that resumes from it reports it again."""
    paths = RunPaths(tmp_path)
    with writing(paths) as writer:
        writer.append(progress(1))
        writer.append(progress(2, loss=4.0))
    ProgressLog(paths.progress).truncate_after(1)
    with writing(paths, resumed_from=2) as writer:
        writer.append(progress(2, loss=4.0))
    assert events(paths, "loss/total") == losses(paths) == [(1, 1.0), (2, 4.0)]


def test_an_update_is_on_the_disk_when_it_is_reported(tmp_path: Path) -> None:
    """Events are not queued: a kill directly afterwards loses none."""
    paths = RunPaths(tmp_path)
    with writing(paths) as writer:
        (file,) = paths.tensorboard.iterdir()
        sizes = []
        for update in range(1, 51):
            writer.append(progress(update))
            sizes.append(file.stat().st_size)
    grown = {later - earlier for earlier, later in pairwise(sizes[20:])}
    assert len(grown) == 1


def test_a_figure_that_is_not_there_is_left_out() -> None:
    """A skipped update has no norm, a loss that is not finite no value, a loss over samples no tokens."""
    without = figures(progress(1, loss=None, gradient_norm=None, weights={"loss": 10.0}))
    missing = set(figures(progress(1))) - set(without)
    assert missing == {"loss/total", "optimizer/gradient_norm", "speed/tokens_per_second"}
    assert without["speed/samples_per_second"] == 100.0


def test_an_evaluation_has_curves() -> None:
    """Its loss and its metrics, at the update that it evaluates."""
    fields: dict[str, Any] = {"terms": {}, "weights": {}, "samples": 9, "micro_batch_size": 5, "seconds": 0.1}
    start = EvaluationReport(update=0, loss=9.0, **fields)
    after = EvaluationReport(update=1, loss=2.0, metrics={"accuracy": 0.5}, **fields)
    found = figures_of(progress(1, evaluations=(start, after)), None)
    assert list(found) == [0, 1]
    assert found[0] == {"evaluation/loss": 9.0}
    assert (found[1]["evaluation/loss"], found[1]["evaluation/accuracy"]) == (2.0, 0.5)
    assert "evaluation/loss" not in figures(progress(2))
    both = EvaluationReport(update=2, loss=2.0, of_averages=True, trained=TrainedFigures(loss=3.0, terms={}), **fields)
    of_both = figures_of(progress(2, evaluations=(both,)), None)[2]
    assert (of_both["evaluation/loss"], of_both["evaluation/trained/loss"]) == (2.0, 3.0)


def test_the_peak_is_beside_the_limit() -> None:
    """Where there is a limit, and a peak was measured."""
    found = figures_of(progress(3, peak_bytes=70), 100)[3]
    assert (found["memory/peak_bytes"], found["memory/limit_bytes"]) == (70.0, 100.0)
    assert not {"memory/peak_bytes", "memory/limit_bytes"} & set(figures(progress(3)))


def test_each_of_several_terms_has_its_own_curve() -> None:
    """A single one is the total and needs none."""
    several = figures(progress(1, terms={"labels": 1.0, "auxiliary": 0.5}))
    assert (several["loss/labels"], several["loss/auxiliary"]) == (1.0, 0.5)
    assert [tag for tag in figures(progress(1)) if tag.startswith("loss/")] == ["loss/total"]


def test_without_tensorboard_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that requests TensorBoard is refused; other runs do not need the package."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with writing(RunPaths(tmp_path), tracker=None) as writer:
        writer.append(progress(1))
    with (
        pytest.raises(SpecError, match=r"pip install 'batchwright\[tensorboard\]'") as caught,
        writing(RunPaths(tmp_path)),
    ):
        pass
    assert caught.value.problems[0].field == "trackers.0"
