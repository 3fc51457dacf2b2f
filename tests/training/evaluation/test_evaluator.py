"""Evaluation passes: exact figures for any batch size, no trace in training, and batches that do not fit."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.driving.foreground import run_tuning
from batchwright.errors import SpecError, WorkloadError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest, TuningRequest
from batchwright.schemas.training import EvaluationReport, RunOutcome, TrainingProgress
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.assembly import build_run
from batchwright.training.launching.run_directory import ProgressLog, RunPaths
from batchwright.training.micro_batches.rng_state import RandomState
from batchwright.training.trainer import Trainer
from tests.support.factories import gpt_spec, mlp_spec, recommendation, resnet_spec
from tests.support.whole_runs import ENVIRONMENT, MIB, run_to_end

pytestmark = pytest.mark.usefixtures("forked")
DROPOUT = {
    "kind": "reference",
    "architecture": {"name": "gpt", "layers": 2, "heads": 2, "width": 32, "vocabulary_size": 256, "dropout": 0.3},
}
LIMITED = """
import os, torch

class Limited:
    '''A linear model whose evaluation fits at most `most` samples at a time, and draws random numbers.'''

    def __init__(self, most, buffers=False):
        self.most = most

    def build_model(self):
        first, last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        return torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), last)

    def make_batch(self, size):
        return {'x': torch.randn(size, 4), 'y': torch.randint(0, 3, (size,))}

    def score(self, model, batch):
        from batchwright.workloads.base import LabelScores
        torch.rand(3)
        if not model.training and len(batch['x']) > self.most:
            raise MemoryError('injected')
        assert model.training or not torch.is_grad_enabled()
        logits = model(batch['x'])
        loss = torch.nn.functional.cross_entropy(logits, batch['y'], reduction='sum')
        return LabelScores({'loss': (loss, len(batch['x']))}, logits, batch['y'])

    def loss_terms(self, model, batch):
        return self.score(model, batch).terms

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(40, 4, generator=generator), torch.randint(0, 3, (40,), generator=generator)
        return [{'x': a, 'y': b} for a, b in zip(x, y)]
"""


def loop_for(directory: Path, spec: WorkloadSpec, largest: int = 5, **fields: Any) -> Trainer:
    """A loop in this process, with an effective batch of 16."""
    request = TrainingRequest(**{"updates": 4, **fields})
    return Trainer(build_run(recommendation(spec, 16, largest), request, RunPaths(directory), open_device("cpu")))


def run(directory: Path, spec: WorkloadSpec, largest: int = 5, **fields: Any) -> tuple[Trainer, list[EvaluationReport]]:
    """A loop that has made its updates, and its evaluations."""
    loop, made = loop_for(directory, spec, largest, **fields), list[TrainingProgress]()
    assert loop.run(made.append) is RunOutcome.SUCCEEDED
    return loop, [evaluation for progress in made for evaluation in progress.evaluations]


def weights(loop: Trainer) -> dict[str, torch.Tensor]:
    """Parameters and buffers."""
    return dict(loop.model.state_dict())


def text(directory: Path, **changes: Any) -> WorkloadSpec:
    """A GPT with dropout over ragged rows of text, with rows of their own to evaluate on."""
    for name, count in (("training", 40), ("held-out", 13)):
        rows = [f"row {number} of {name} " * (1 + number % 3) for number in range(count)]
        (directory / f"{name}.txt").write_text("\n".join(rows))
    records = {"kind": "records", "paths": [str(directory / "training.txt")]}
    held_out = {"kind": "records", "paths": [str(directory / "held-out.txt")]}
    evaluation = {"data": held_out, "every": 1, "metrics": ["accuracy", "perplexity"]}
    fields = {"model": DROPOUT, "batch": {"sequence_length": 40}, "data": records, "evaluation": evaluation}
    return gpt_spec(**{**fields, **changes})


def evaluating(spec: WorkloadSpec, **changes: Any) -> WorkloadSpec:
    """A spec whose evaluation has other fields."""
    assert spec.evaluation is not None
    return spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update=changes)})


@pytest.mark.parametrize("size", [1, 3, 4, 13, 100])
def test_figures_are_those_of_all_samples_together(tmp_path: Path, size: int) -> None:
    """Loss, accuracy and perplexity over every token, computed in fp64 without the code under test."""
    spec = evaluating(text(tmp_path), micro_batch_size=size, every=None)
    loop, (_, report) = run(tmp_path / "run", spec, updates=2)
    model = loop.model.double().eval()
    losses, correct, tokens = 0.0, 0, 0
    for row in (tmp_path / "held-out.txt").read_text().splitlines():
        ids = torch.tensor(list(row.encode())[:40])
        logits = model(ids[None])[0, :-1]
        losses += float(F.cross_entropy(logits, ids[1:], reduction="sum").detach())
        correct += int((logits.argmax(-1) == ids[1:]).sum())
        tokens += len(ids) - 1
    assert report.samples == 13
    assert report.weights == {"next_token": tokens}
    assert report.loss == pytest.approx(losses / tokens, rel=1e-6)
    assert report.metrics["accuracy"] == pytest.approx(correct / tokens, abs=2 / tokens)
    assert report.metrics["perplexity"] == pytest.approx(math.exp(losses / tokens), rel=1e-5)
    assert report.micro_batch_size == min(size, 13)


def test_the_plans_micro_batch_is_the_default(tmp_path: Path) -> None:
    """16 samples at 5 are four micro-batches of 4."""
    _, reports = run(tmp_path / "run", text(tmp_path), updates=1)
    assert [report.micro_batch_size for report in reports] == [4, 4]


def test_a_run_has_the_weights_of_one_without_evaluation(tmp_path: Path) -> None:
    """Bit for bit, with dropout: an evaluation draws none of the numbers of the training."""
    with_it, _ = run(tmp_path / "with", text(tmp_path))
    without, _ = run(tmp_path / "without", text(tmp_path).model_copy(update={"evaluation": None}))
    assert all(torch.equal(tensor, weights(without)[name]) for name, tensor in weights(with_it).items())


@pytest.mark.parametrize("size", [2, 16])
def test_a_split_trains_the_same_however_often_it_is_evaluated(tmp_path: Path, size: int) -> None:
    """The split alone decides what trains, so a run that evaluates less has equal weights and running statistics."""
    split = {"count": 12, "every": 1, "micro_batch_size": size}
    spec = resnet_spec(data={"kind": "synthetic", "samples": 50}, evaluation=split)
    often, reports = run(tmp_path / "often", spec, 8, allow_batch_coupling=True)
    seldom, _ = run(tmp_path / "seldom", evaluating(spec, every=None), 8, allow_batch_coupling=True)
    assert len(reports) == 5
    assert all(torch.equal(tensor, weights(seldom)[name]) for name, tensor in weights(often).items())


def test_modules_keep_their_modes_and_random_numbers(tmp_path: Path) -> None:
    """A module that the user holds in evaluation mode stays so, and the generators are where they were."""
    loop = loop_for(tmp_path / "run", text(tmp_path))
    held = next(module for module in loop.model.modules() if isinstance(module, torch.nn.Dropout)).eval()
    modes = [module.training for module in loop.model.modules()]
    before = RandomState.capture(torch.device("cpu"))
    assert loop.evaluation is not None
    assert loop.evaluation.evaluate(0, lambda: False)
    after = RandomState.capture(torch.device("cpu"))
    assert [module.training for module in loop.model.modules()] == modes
    assert not held.training
    assert before.equals(after)


def test_the_training_step_is_compiled_as_without_evaluation(tmp_path: Path) -> None:
    """For the one size of its micro-batches, though batches of two other sizes were evaluated before."""
    loop = loop_for(tmp_path / "run", mlp_spec(evaluation={"count": 11, "micro_batch_size": 4}), 8, updates=1)
    compiled: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    torch._dynamo.reset()
    loop.model.compile(backend=backend)
    loop.run(lambda _: None)
    assert compiled == [False]


def test_smoothed_labels_train_and_do_not_evaluate(tmp_path: Path) -> None:
    """The first loss is that of a run without smoothing, whose first weights are the same."""
    smoothed, plain = (
        run(tmp_path / str(share), mlp_spec(label_smoothing=share, evaluation={"count": 10}))[1][0]
        for share in (0.3, 0.0)
    )
    assert smoothed.loss == plain.loss


# --- batches that do not fit ------------------------------------------------------------------------------------------


def limited(directory: Path, monkeypatch: pytest.MonkeyPatch, most: int, **evaluation: Any) -> WorkloadSpec:
    """A workload whose evaluation fits at most ``most`` samples at a time."""
    (directory / "limited_evaluation.py").write_text(LIMITED)
    monkeypatch.syspath_prepend(str(directory))
    model = {"kind": "python", "target": "limited_evaluation:Limited", "arguments": {"most": most}}
    fields = {"count": 11, "every": 2, "metrics": ["accuracy"], **evaluation}
    return mlp_spec(model=model, data={"kind": "workload"}, evaluation=fields)


def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worst case before the first evaluation; the run goes on, with equal figures and weights."""
    found = {}
    for most in (100, 3):
        spec = limited(tmp_path, monkeypatch, most, micro_batch_size=9)
        found[most] = run(tmp_path / str(most), spec, 16, allow_batch_coupling=True)
    (roomy, free), (tight, split) = found[100], found[3]
    assert [report.splits for report in free] == [()] * 3
    assert [(part.size, part.parts) for part in split[0].splits] == [(9, (5, 4)), (5, (3, 2))]
    assert "injected" in split[0].splits[0].message
    assert [report.splits for report in split[1:]] == [(), ()]
    assert [report.micro_batch_size for report in split] == [3, 3, 3]
    for ours, theirs in zip(split, free, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert (ours.metrics, ours.samples) == (theirs.metrics, theirs.samples)
    assert all(torch.equal(tensor, weights(roomy)[name]) for name, tensor in weights(tight).items())


@pytest.mark.parametrize(
    ("proof", "splits", "largest"), [(None, 2, 3), ((2, 2), 2, 3), ((3, 9), 0, 3), ((11, 11), 1, 3), ((2, 9), 0, 2)]
)
def test_a_larger_size_is_proven_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proof: tuple[int, int] | None, splits: int, largest: int
) -> None:
    """After a resume with a larger `micro_batch_size`, unless one has failed before."""
    loop = loop_for(tmp_path / "run", limited(tmp_path, monkeypatch, 3, micro_batch_size=9), allow_batch_coupling=True)
    assert loop.evaluation is not None
    loop.evaluation.evaluator.accept_proof(proof)
    loop.evaluation.evaluate(0, lambda: False)
    (report,) = loop.evaluation.take_reports()
    assert (len(report.splits), report.micro_batch_size, report.samples) == (splits, largest, 11)
    assert loop.evaluation.evaluator.proof() == (largest, 9)


def test_a_sample_that_does_not_fit_leaves_the_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no figures, the report says why, and all updates are made."""
    spec = limited(tmp_path, monkeypatch, most=0)
    loop, reports = run(tmp_path / "run", spec, 16, allow_batch_coupling=True)
    assert loop.position.update == 4
    assert [(report.loss, report.metrics, report.is_best) for report in reports] == [(None, {}, False)] * 3
    assert all("a single held-out sample did not fit: " in str(report.message) for report in reports)
    assert loop.evaluation is not None
    assert "not known" in loop.evaluation.summary().message


def test_a_batch_beyond_the_real_limit_is_halved(tmp_path: Path) -> None:
    """A real OOM under the run's own limit, with a batch size that no probe has proven."""
    architecture = {"name": "mlp", "input_features": 32, "hidden_features": 50_000, "hidden_layers": 1}
    spec = mlp_spec(
        model={"kind": "reference", "architecture": architecture},
        data={"kind": "synthetic", "samples": 1100},
        evaluation={"count": 1000, "micro_batch_size": 1000},
        optimizer={"name": "sgd"},
    )
    found = recommendation(spec, 8, 8, limit_bytes=300 * MIB, environment=ENVIRONMENT)
    result = run_to_end(tmp_path, found, TrainingRequest(updates=1))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    made = ProgressLog(RunPaths(tmp_path).progress).new_lines()
    first, last = made[0].evaluations
    assert first.splits[0].parts == (500, 500)
    assert first.samples == last.samples == 1000
    assert last.splits == ()
    assert last.loss is not None


@pytest.mark.thorough
def test_the_proven_micro_batch_is_evaluated_undivided(tmp_path: Path) -> None:
    """Under the limit that a tuning has filled: where a training step fits, an evaluation with its metrics fits."""
    architecture = {"name": "gpt", "layers": 2, "heads": 2, "width": 64, "vocabulary_size": 4096}
    spec = gpt_spec(
        model={"kind": "reference", "architecture": architecture},
        batch={"sequence_length": 64},
        data={"kind": "synthetic", "samples": 600},
        evaluation={"count": 100, "metrics": ["accuracy", "perplexity"]},
    )
    found = run_tuning(TuningRequest(spec=spec, effective_batch_size=256, device="cpu", memory_limit_bytes=160 * MIB))
    assert found.plan is not None
    assert 1 < found.plan.micro_batch_size < 256
    result = run_to_end(tmp_path, found, TrainingRequest(updates=2))
    assert result.outcome is RunOutcome.SUCCEEDED, result.message
    made = ProgressLog(RunPaths(tmp_path).progress).new_lines()
    assert [progress.splits for progress in made] == [(), ()]
    reports = [report for progress in made for report in progress.evaluations]
    assert [(report.splits, report.samples) for report in reports] == [((), 100)] * 2
    assert {report.micro_batch_size for report in reports} == {found.plan.micro_batch_size}


def test_a_metric_without_labels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload of one's own needs `score` for the accuracy; the field is named before anything trains."""
    (tmp_path / "unlabelled.py").write_text(
        "import torch\n"
        "class W:\n"
        "    def build_model(self): return torch.nn.Linear(2, 1)\n"
        "    def make_batch(self, size): return torch.randn(size, 2)\n"
        "    def loss_terms(self, model, batch): return {'loss': (model(batch).square().sum(), len(batch))}\n"
        "    def dataset(self): return [torch.ones(2)] * 20\n"
        "class Pair(W):\n"
        "    def score(self, model, batch): return self.loss_terms(model, batch), batch\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = mlp_spec(
        model={"kind": "python", "target": "unlabelled:W"},
        data={"kind": "workload"},
        evaluation={"count": 4, "metrics": ["accuracy"]},
    )
    with pytest.raises(SpecError, match="score") as caught:
        loop_for(tmp_path / "run", spec)
    assert caught.value.problems[0].field == "evaluation.metrics"
    _, reports = run(tmp_path / "other", evaluating(spec, metrics=()))
    assert [report.samples for report in reports] == [4, 4]
    assert spec.model.kind == "python"
    loop = loop_for(
        tmp_path / "pair",
        spec.model_copy(update={"model": spec.model.model_copy(update={"target": "unlabelled:Pair"})}),
    )
    assert loop.evaluation is not None
    with pytest.raises(WorkloadError, match=r"score\(\) returned a tuple"):
        loop.evaluation.evaluate(0, lambda: False)
