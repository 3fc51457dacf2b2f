"""Evaluations of the moving averages: their figures, what they choose, and what trains, which never changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from batchwright.errors import SpecError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome, TrainingProgress
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.evaluation.evaluation_sums import EvaluationShare
from batchwright.training.evaluation.run_evaluation import RunEvaluation
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.training.update_engine import averages_as_weights
from tests.support.factories import gpt_spec, recommendation
from tests.support.faults import relative_distance
from tests.support.whole_runs import ENVIRONMENT, run_to_end
from tests.training.evaluation.test_run_evaluation import DROPOUT, Scripted, evaluations, loop_for

pytestmark = pytest.mark.usefixtures("forked")
DECAY = 0.9


def spec_with(weights: str, **evaluation: Any) -> WorkloadSpec:
    """A GPT with dropout, whose averages lag far behind, and ten of 50 samples held out."""
    return gpt_spec(
        model=DROPOUT,
        ema_decay=DECAY,
        evaluation={"count": 10, "metrics": ["perplexity"], "every": 2, "weights": weights, **evaluation},
    )


def reports_of(directory: Path, weights: str, **changes: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The evaluations of a run in this process, and the weights that it ends with."""
    made: list[TrainingProgress] = []
    loop = loop_for(directory, spec_with(weights).model_copy(update=changes))
    assert loop.run(made.append) is RunOutcome.SUCCEEDED
    loop.save_weights()
    return evaluations(made), {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_parameters_and_averages_are_equal_to_the_bit_afterwards(dtype: torch.dtype) -> None:
    """Also where the block raises, for values that are no numbers, and for a matrix that is transposed in memory."""
    values = [torch.randn(5, 3).t(), torch.tensor(float("nan")), torch.tensor([float("inf"), -0.0, 1e-40])]
    parameters = [nn.Parameter(value.to(dtype)) for value in values]
    averages = [torch.randn(value.shape) for value in values]
    before = [tensor.detach().clone() for tensor in (*parameters, *averages)]
    device = open_device("cpu")

    def fail_within() -> None:
        with torch.no_grad(), averages_as_weights(parameters, averages, device):
            for parameter, average in zip(parameters, before[len(parameters) :], strict=True):
                assert torch.equal(parameter, average.to(dtype))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_within()
    for tensor, other in zip((*parameters, *averages), before, strict=True):
        assert (
            tensor.detach()
            .reshape(-1)
            .contiguous()
            .view(torch.uint8)
            .equal(other.reshape(-1).contiguous().view(torch.uint8))
        )


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.thorough), "bf16"])
def test_the_figures_are_those_of_the_averages_that_are_written(tmp_path: Path, precision: str) -> None:
    """And with `both` those of each; what trains is equal to the bit whatever is evaluated."""
    found = {
        weights: reports_of(tmp_path / weights, weights, precision=precision)
        for weights in ("trained", "average", "both")
    }
    trained, average, both = (found[weights][0] for weights in ("trained", "average", "both"))
    assert [report.loss for report in both] == [report.loss for report in average]
    assert [report.metrics for report in both] == [report.metrics for report in average]
    assert [report.trained and report.trained.loss for report in both] == [report.loss for report in trained]
    assert all(report.of_averages and report.trained is None for report in average)
    assert average[0].loss == trained[0].loss
    assert average[-1].loss != trained[-1].loss
    for name, tensor in found["trained"][1].items():
        assert torch.equal(tensor, found["average"][1][name])
        assert torch.equal(tensor, found["both"][1][name])
    last = loop_for(tmp_path / "again", spec_with("trained").model_copy(update={"precision": precision}))
    last.model.load_state_dict(load_file(RunPaths(tmp_path / "average").average_weights), strict=False)
    assert last.evaluation is not None
    last.evaluation.evaluate(6, lambda: False)
    (report,) = last.evaluation.take_reports()
    assert report.loss == average[-1].loss


@pytest.mark.parametrize("weights", [pytest.param("average", marks=pytest.mark.thorough), "both"])
def test_the_best_weights_are_averages(tmp_path: Path, weights: str) -> None:
    """Those of the update at which the averages were best, which are written by a run that ends there too."""
    spec = spec_with(weights).model_copy(
        update={"optimizer": gpt_spec(optimizer={"name": "sgd", "learning_rate": 2.0}).optimizer}
    )
    made: list[TrainingProgress] = []
    loop = loop_for(tmp_path / "run", spec, updates=20, checkpoint_every=3)
    loop.run(made.append)
    loop.save_weights()
    assert loop.evaluation is not None
    best = loop.evaluation.best_update
    assert best is not None
    losses = {report.update: report.loss for report in evaluations(made) if report.update}
    assert losses[best] == min(loss for loss in losses.values() if loss is not None)
    assert "of the moving averages" in loop.evaluation.summary().message
    shorter = loop_for(tmp_path / "shorter", spec, updates=best)
    shorter.run(lambda _: None)
    shorter.save_weights()
    written, expected = (
        load_file(path)
        for path in (RunPaths(tmp_path / "run").best_weights, RunPaths(tmp_path / "shorter").average_weights)
    )
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())


class TwoScripts:
    """Held-out samples whose losses are given, those of the trained weights and those of their averages."""

    def __init__(self, trained: list[float], averages: list[float]) -> None:
        self._scripts = {False: Scripted(*trained), True: Scripted(*averages)}

    def __len__(self) -> int:
        return 10

    def run(self, should_stop: object, *, averaged: bool) -> tuple[list[EvaluationShare], dict[str, float]]:
        """The next loss of these weights."""
        return self._scripts[averaged].run(should_stop)


@pytest.mark.parametrize(("weights", "ends", "best"), [("trained", None, 4), ("average", 3, 1), ("both", 3, 1)])
def test_early_stopping_and_the_best_follow_the_weights(weights: str, ends: int | None, best: int) -> None:
    """Averages that get worse end the run at their best, where the trained weights go on to improve."""
    spec = spec_with(weights, every=1, metrics=[], early_stopping={"patience": 2}).evaluation
    assert spec is not None
    evaluation = RunEvaluation(spec, TwoScripts([9.0, 8.0, 7.0, 6.0, 5.0], [9.0, 3.0, 4.0, 4.0, 4.0]), 100)  # type: ignore[arg-type] # the judging is under test
    ended = None
    for update in range(5):
        evaluation.evaluate(update, lambda: False)
        if evaluation.stops_early and ended is None:
            ended = update
    assert (ended, evaluation.best_update) == (ends, best)


@pytest.mark.thorough
def test_ranks_that_share_a_model_evaluate_its_averages(tmp_path: Path) -> None:
    """Each exchanges its shards; the figures are those of one process, and the weights as without."""
    alone = spec_with("both")
    shared = alone.model_copy(
        update={"parallelism": gpt_spec(parallelism={"world_size": 2, "strategy": "fsdp"}).parallelism}
    )
    without = shared.model_copy(update={"evaluation": spec_with("trained").evaluation})
    results, reports = {}, {}
    for name, spec, ranks in (("alone", alone, 1), ("shared", shared, 2), ("without", without, 2)):
        found = recommendation(
            spec.model_copy(update={"model": gpt_spec().model}), 16, 5, world_size=ranks, environment=ENVIRONMENT
        )
        results[name] = run_to_end(tmp_path / name, found, TrainingRequest(updates=4))
        assert results[name].outcome is RunOutcome.SUCCEEDED, results[name].message
        reports[name] = evaluations(ProgressLog(RunPaths(tmp_path / name).progress).new_lines())
    assert results["shared"].weights_sha256 == results["without"].weights_sha256
    for ours, theirs in zip(reports["shared"], reports["alone"], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert ours.trained is not None
        assert theirs.trained is not None
        assert ours.trained.loss == pytest.approx(theirs.trained.loss, rel=1e-4)
    best = [load_file(RunPaths(tmp_path / name).best_weights) for name in ("shared", "alone")]
    assert relative_distance(*best) < 1e-3


def test_averages_that_are_not_kept_are_refused() -> None:
    """Naming the field that keeps them."""
    with pytest.raises(SpecError, match="also set `ema_decay`"):
        gpt_spec(evaluation={"count": 10, "weights": "average"})
