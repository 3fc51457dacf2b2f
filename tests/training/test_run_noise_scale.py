"""The gradient noise scale of a run: which updates are measured, what is reported, and what a resumed run keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright.hardware.memory_devices.factory import open_device
from batchwright.planning.noise_scale import MOST_UPDATES, NoiseMeasurement
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingProgress
from batchwright.training.assembly import build_run
from batchwright.training.batch_schedule import BatchSchedule
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.run_noise_scale import RunNoiseScale, interval
from batchwright.training.trainer import Trainer
from tests.support.factories import gpt_spec, mlp_spec, recommendation, resnet_spec
from tests.support.whole_runs import run_to_end

pytestmark = pytest.mark.usefixtures("forked")
SCHEDULE = BatchSchedule(seed=0, samples=50, effective_batch_size=16)


def loop_for(directory: Path, spec: Any, largest: int, **fields: Any) -> Trainer:
    """A loop in this process, with an effective batch of 16 of the 50 samples."""
    request = TrainingRequest(**fields)
    return Trainer(build_run(recommendation(spec, 16, largest), request, RunPaths(directory), open_device("cpu")))


def measured(made: list[TrainingProgress]) -> list[int]:
    """The updates that were measured."""
    return [progress.update for progress in made if progress.noise_scale is not None]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"updates": 60}, 1),
        ({"updates": 1000}, 5),
        ({"updates": 100_000}, 10),
        ({"updates": 60, "noise_scale_every": 7}, 7),
        ({"updates": 60, "noise_scale_every": 0}, 0),
    ],
)
def test_the_interval_between_measurements(fields: dict[str, int], expected: int) -> None:
    """By default a run has 200 measurements or more, or as many as it has updates, unless the request says another."""
    assert interval(TrainingRequest(**fields)) == expected


def test_full_windows_are_measured_at_the_interval(tmp_path: Path) -> None:
    """50 samples at 16: every fourth update is a window of two, and left out."""
    made: list[TrainingProgress] = []
    loop_for(tmp_path / "each", mlp_spec(), 8, updates=9).run(made.append)
    assert measured(made) == [1, 2, 3, 5, 6, 7, 9]
    made.clear()
    loop_for(tmp_path / "third", mlp_spec(), 8, updates=9, noise_scale_every=3).run(made.append)
    assert measured(made) == [1, 5, 9]


def test_a_run_that_was_stopped_goes_on_with_its_measurements(tmp_path: Path) -> None:
    """The estimate of a resumed run is that of a run that was never stopped, and so are the weights."""
    whole = loop_for(tmp_path / "whole", gpt_spec(), 5, updates=21)
    whole.run(lambda _: None)
    first = loop_for(tmp_path / "cut", gpt_spec(), 5, updates=21)
    assert first.run(lambda _: None, lambda: first.position.update >= 10) is RunOutcome.STOPPED
    second = loop_for(tmp_path / "cut", gpt_spec(), 5, updates=21)
    assert second.resume() == 10
    second.run(lambda _: None)
    assert second.noise_scale.estimate() == whole.noise_scale.estimate()
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gathering", ["in-place", "scratch"])
def test_a_measured_run_has_the_weights_of_another(tmp_path: Path, gathering: str) -> None:
    """No bit of the weights depends on whether updates were measured."""
    weights = []
    for every in (0, 1):
        spec = gpt_spec(gradient_gathering=gathering)
        loop = loop_for(tmp_path / str(every), spec, 5, updates=6, noise_scale_every=every)
        loop.run(lambda _: None)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()]))
    assert torch.equal(*weights)


def test_the_result_says_which_batch_the_gradients_suggest(tmp_path: Path) -> None:
    """The result has the estimate of the last update, and the suggestion in words."""
    result = run_to_end(tmp_path, recommendation(gpt_spec(), 16, 4), TrainingRequest(updates=20))
    assert result.noise_scale is not None
    assert result.noise_scale.measured_updates == 15
    assert result.noise_scale.suggested_effective_batch_size is not None
    assert f"about {result.noise_scale.suggested_effective_batch_size:,} sample" in result.noise_scale.message


def test_a_suggestion_above_the_data_is_said_to_be_so() -> None:
    """The run knows the number of its samples."""
    kept = RunNoiseScale(TrainingRequest(updates=30), SCHEDULE)
    for update in range(1, 31):
        kept.add(update, NoiseMeasurement(100.0 * (1.1 if update % 2 else 0.9), -0.9))
    estimate = kept.estimate()
    assert estimate is not None
    assert estimate.samples is not None
    assert estimate.samples > 50
    assert "The data has only 50 samples" in estimate.message


def test_a_run_that_is_not_to_be_measured_has_no_noise_scale(tmp_path: Path) -> None:
    """Neither its updates nor its result."""
    loop = loop_for(tmp_path, mlp_spec(), 4, updates=3, noise_scale_every=0)
    made: list[TrainingProgress] = []
    loop.run(made.append)
    assert measured(made) == []
    assert loop.noise_scale.estimate() is None


def test_whole_windows_on_one_rank_say_what_is_missing(tmp_path: Path) -> None:
    """One micro-batch has nothing to compare with, and the result says so."""
    loop = loop_for(tmp_path, mlp_spec(), 16, updates=3)
    made: list[TrainingProgress] = []
    loop.run(made.append)
    estimate = loop.noise_scale.estimate()
    assert measured(made) == []
    assert estimate is not None
    assert "at least two micro-batches per update" in estimate.message


def test_a_loss_that_couples_samples_is_not_measured(tmp_path: Path) -> None:
    """With BatchNorm the gradient of a micro-batch is no sum over its samples."""
    spec = resnet_spec(data={"kind": "synthetic", "samples": 50})
    loop = loop_for(tmp_path, spec, 8, updates=2, allow_batch_coupling=True)
    made: list[TrainingProgress] = []
    loop.run(made.append)
    assert measured(made) == []


def test_old_measurements_make_room_for_new_ones() -> None:
    """A run keeps the newest, in its checkpoints too."""
    kept = RunNoiseScale(TrainingRequest(updates=10_000), SCHEDULE)
    for update in range(1, MOST_UPDATES + 100):
        kept.add(update, NoiseMeasurement(float(update), 1.0))
    resumed = RunNoiseScale(TrainingRequest(updates=10_000), SCHEDULE)
    resumed.load_state(**kept.state())  # type: ignore[arg-type] # plain values
    assert resumed.estimate() == kept.estimate()
    estimate = resumed.estimate()
    assert estimate is not None
    assert estimate.measured_updates == MOST_UPDATES
