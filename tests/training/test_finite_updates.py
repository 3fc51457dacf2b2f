"""A run whose loss, gradient or weights are not finite fails, says since when, and keeps its last finite checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchwright.cli.errors import ExitCode
from batchwright.errors import NotFiniteError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingProgress, TrainingResult
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training import worker
from batchwright.training.assembly import build_run
from batchwright.training.finite_updates import FiniteUpdates
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from tests.support.command import called
from tests.support.factories import mlp_spec, recommendation

DIVERGES = mlp_spec(optimizer={"name": "sgd", "learning_rate": 1e4})
"""Its fourth update has a loss of NaN."""


def _progress(update: int, **changes: Any) -> TrainingProgress:
    figures: dict[str, Any] = {
        "loss": 2.5,
        "terms": {},
        "weights": {"loss": 64.0},
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
    return TrainingProgress(update=update, updates=100, **(figures | changes))


def _skipped(update: int, **changes: Any) -> TrainingProgress:
    return _progress(update, gradient_norm=None, skipped=True, **changes)


def test_a_step_along_a_gradient_of_nan_ends_the_run() -> None:
    """The weights are lost, even if the loss is still finite."""
    finite = FiniteUpdates(nn.Linear(2, 2))
    finite.add(_progress(1))
    with pytest.raises(NotFiniteError, match="the gradient of update 2 is not finite, and neither are the weights"):
        finite.add(_progress(2, gradient_norm=None))
    assert finite.since == 2


def test_updates_that_a_scaler_skips_are_normal() -> None:
    """Up to 31 in a row, and any number with a step between them; an update without a target counts as neither."""
    finite = FiniteUpdates(nn.Linear(2, 2))
    for update in range(1, 32):
        finite.add(_skipped(update))
    finite.add(_skipped(32, weights={"loss": 0.0}))
    assert finite.since == 1
    finite.add(_progress(33))
    assert finite.since is None
    for update in range(34, 65):
        finite.add(_skipped(update))
    assert finite.conclude(_skipped(64)) == ("no step was made since update 34, because the gradients are not finite")
    with pytest.raises(NotFiniteError, match="not been finite since update 34, for 32 updates"):
        finite.add(_skipped(65))


def test_the_end_of_a_run_is_judged() -> None:
    """A last loss of NaN, and a run without a single step, are no success."""
    finite = FiniteUpdates(nn.Linear(2, 2))
    finite.add(_skipped(1))
    with pytest.raises(NotFiniteError, match="so no step was made"):
        finite.conclude(_skipped(1))
    finite.add(_progress(2))
    assert finite.conclude(_progress(2)) is None
    finite.add(_progress(3, loss=None))
    with pytest.raises(NotFiniteError, match="since update 3"):
        finite.conclude(_progress(3, loss=None))


def test_the_sequence_goes_on_after_a_checkpoint() -> None:
    """The state of a checkpoint has its begin, and whether a step was made."""
    finite, resumed = FiniteUpdates(nn.Linear(2, 2)), FiniteUpdates(nn.Linear(2, 2))
    finite.add(_progress(1))
    finite.add(_skipped(2))
    resumed.load_state(**finite.state())  # type: ignore[arg-type] # as a checkpoint returns it
    assert resumed.conclude(_skipped(2)) is not None
    assert resumed.since == 2


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_weights_and_statistics_must_be_finite(name: str) -> None:
    """A statistic that became infinite ruins the model in eval mode; a mask of minus infinity was there before."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2,), -math.inf))
    finite = FiniteUpdates(model)
    finite.require_finite(model.state_dict(), 3)
    with torch.no_grad():
        model.state_dict()[name].view(-1)[0] = math.inf
    with pytest.raises(NotFiniteError, match=f"`{name}` of the model is not finite after update 4"):
        finite.require_finite(model.state_dict(), 4)


# --- runs -------------------------------------------------------------------------------------------------------------


def _run(folder: Path, spec: WorkloadSpec, **request: Any) -> TrainingResult:
    """Train in this process, as the process of a run does."""
    paths = RunPaths(folder)
    paths.recommendation.write_text(recommendation(spec, 16, 8).model_dump_json())
    paths.request.write_text(TrainingRequest(**request).model_dump_json())
    return worker.train(paths, worker.StopRequest())


def test_a_run_that_diverges_fails_and_keeps_its_last_finite_checkpoint(tmp_path: Path) -> None:
    """The result has the update, the checkpoint and the remedy; the update is reported; no weights are written."""
    result, paths = _run(tmp_path, DIVERGES, updates=40, checkpoint_every=2), RunPaths(tmp_path)
    assert (result.outcome, result.updates, result.not_finite_since) == (RunOutcome.FAILED, 4, 4)
    assert "the gradient of update 4 is not finite" in result.message
    assert "The finite checkpoint of update 2 is kept. Lower the learning rate" in result.message
    newest = ProgressLog(paths.progress).last()
    assert newest is not None
    assert (newest.update, newest.loss) == (4, None)
    assert not paths.weights.exists()
    parts = build_run(recommendation(DIVERGES, 16, 8), TrainingRequest(updates=40), paths, open_device("cpu"))
    weights, state = parts.checkpoints.load(2)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert state["finite"] == {"since": None, "made_step": True}


def test_weights_that_are_lost_by_the_last_step_are_not_written(tmp_path: Path) -> None:
    """The gradient of the only update is finite, and its step is infinite: the checkpoint would not be."""
    spec = mlp_spec(optimizer={"name": "sgd", "learning_rate": 3e38, "weight_decay": 1e3})
    result = _run(tmp_path, spec, updates=1)
    assert (result.outcome, result.not_finite_since) == (RunOutcome.FAILED, 1)
    assert "is not finite after update 1. No checkpoint was written" in result.message
    assert not RunPaths(tmp_path).weights.exists()


def test_a_run_that_learns_has_nothing_to_say(tmp_path: Path) -> None:
    """Its result has no such update and no note."""
    result = _run(tmp_path, mlp_spec(), updates=3)
    assert (result.outcome, result.not_finite_since, result.notes) == (RunOutcome.SUCCEEDED, None, ())


@pytest.mark.usefixtures("forked")
def test_the_command_line_says_why_and_has_the_code_of_a_failed_run(tmp_path: Path) -> None:
    """The same folder goes on from its finite checkpoint, and fails again at the same update."""
    path = tmp_path / "recommendation.json"
    path.write_text(recommendation(DIVERGES, 16, 8).model_dump_json())
    line = ("train", path, "--updates", "40", "--checkpoint-every", "2", "--output-dir", tmp_path / "run")
    for resumed in ("", ", resumed from update 2"):
        done = called(*line, columns=400)
        assert done.returncode == ExitCode.TRAINING_FAILED
        assert "FAILED: the gradient of update 4 is not finite" in done.stdout
        assert f"{resumed}. Files in" in done.stdout
