"""The update engine: an accumulated update has the gradient of the full batch, whatever the split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from factories import gpt_spec, mlp_spec
from tuner.errors import WorkloadError
from tuner.specs import WorkloadSpec
from tuner.training.engine import UpdateEngine
from tuner.workloads.base import LossTerms, pad_tokens
from tuner.workloads.build import build_model, build_workload

CPU = torch.device("cpu")
SGD = {"name": "sgd", "learning_rate": 1.0}


class Regression:
    """The published example: one weight, y = 2x, mean squared error; optionally without `loss_weights`."""

    def build_model(self) -> nn.Module:
        """A single weight of zero."""
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def make_batch(self, size: int) -> Tensor:
        """The numbers 1 .. size as x."""
        return torch.arange(1.0, size + 1)[:, None]

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Squared error and its number of samples."""
        return {"squared_error": (F.mse_loss(model(batch), 2 * batch, reduction="sum"), float(len(batch)))}


def _parts(*sizes: int) -> list[Tensor]:
    """The eight samples in micro-batches of these sizes."""
    return list(torch.split(Regression().make_batch(8), list(sizes)))


class TwoTerms(Regression):
    """Two terms with different weights, without telling them beforehand."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Adds a penalty that weighs one per batch."""
        return {**super().loss_terms(model, batch), "penalty": (model.weight.square().sum(), 1.0)}  # type: ignore[operator]


def _engine(spec: WorkloadSpec, workload: Any) -> UpdateEngine:
    return UpdateEngine(spec, workload, build_model(spec, workload), CPU)


@pytest.mark.parametrize("sizes", [(8,), (2, 2, 2, 2), (3, 3, 2), (1,) * 8])
def test_the_published_regression_is_reproduced(sizes: tuple[int, ...]) -> None:
    """With x = 1..8, y = 2x, SGD with rate 0.02: the weight after one update is 2.04, accumulated or not."""
    spec = mlp_spec(optimizer={"name": "sgd", "learning_rate": 0.02})
    workload = Regression()
    engine = _engine(spec, workload)
    engine.update(_parts(*sizes))
    assert engine.parameters[0].item() == pytest.approx(2.04, abs=1e-5)


def _ragged_samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 17, (8,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def _gradient_of_full_batch(spec: WorkloadSpec, samples: list[Tensor]) -> Tensor:
    torch.manual_seed(0)
    workload = build_workload(spec)
    model = build_model(spec, workload).double()
    terms = workload.loss_terms(model, pad_tokens(samples))
    loss = sum((loss / weight for loss, weight in terms.values()), torch.zeros(()))
    torch.autograd.backward(loss)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _accumulated_gradient(spec: WorkloadSpec, samples: list[Tensor], size: int) -> Tensor:
    """The gradient an update descends, read off the parameters before and after a step of SGD with rate 1."""
    torch.manual_seed(0)
    workload = build_workload(spec)
    engine = _engine(spec, workload)
    before = [parameter.detach().clone() for parameter in engine.parameters]
    engine.update([pad_tokens(samples[start : start + size]) for start in range(0, len(samples), size)])
    pairs = zip(before, engine.parameters, strict=True)
    return torch.cat([(old - new.detach()).flatten() for old, new in pairs])


@pytest.mark.parametrize("size", range(1, 9))
def test_ragged_samples_give_the_full_batch_gradient(size: int) -> None:
    """Every micro-batch size, with samples of different lengths and tied weights: within 1e-5 of fp64."""
    spec = gpt_spec(optimizer=SGD)
    truth = _gradient_of_full_batch(spec, _ragged_samples())
    ours = _accumulated_gradient(spec, _ragged_samples(), size)
    assert float((ours - truth).abs().max() / truth.abs().max()) < 1e-5


class MeanOfMeans(Regression):
    """The tutorial's loop as a workload: each micro-batch's mean counts alike."""

    def loss_weights(self, batch: Tensor) -> Mapping[str, float]:
        """Every micro-batch weighs one."""
        del batch
        return {"squared_error": 1.0}

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Means instead of sums."""
        return {"squared_error": (F.mse_loss(model(batch), 2 * batch), 1.0)}


def test_the_tutorials_loop_would_be_caught() -> None:
    """The mutant that averages means over uneven micro-batches misses 2.04 by far: the test above can fail."""
    spec = mlp_spec(optimizer={"name": "sgd", "learning_rate": 0.02})
    workload = MeanOfMeans()
    engine = _engine(spec, workload)
    engine.update(_parts(3, 3, 2))
    assert abs(engine.parameters[0].item() - 2.04) > 1e-2


def test_clipping_is_once_per_update() -> None:
    """The whole gradient is clipped: its norm, not each micro-batch's, meets the limit."""
    spec = mlp_spec(optimizer={"name": "sgd", "learning_rate": 1.0}, gradient_clipping=0.5)
    workload = Regression()
    engine = _engine(spec, workload)
    report = engine.update(_parts(2, 2, 2, 2))
    assert report.gradient_norm == pytest.approx(102.0)
    assert engine.parameters[0].item() == pytest.approx(0.5, rel=1e-4)


def test_the_reported_loss_is_the_windows_mean() -> None:
    """Per term the summed loss over the summed weight, not a mean of means."""
    workload = Regression()
    engine = _engine(mlp_spec(), workload)
    report = engine.update(_parts(5, 3))
    assert report.loss == pytest.approx(sum((2.0 * x) ** 2 for x in range(1, 9)) / 8)


def test_several_terms_need_weights_beforehand() -> None:
    """Each term has its own divisor over the window: the error says which method to add."""
    workload = TwoTerms()
    with pytest.raises(WorkloadError, match="loss_weights"):
        _engine(mlp_spec(), workload).update([workload.make_batch(2)])


def test_a_window_without_weight_makes_no_step() -> None:
    """A window of padding alone leaves parameters and optimizer as they were."""
    spec = gpt_spec()
    engine = _engine(spec, build_workload(spec))
    before = [parameter.detach().clone() for parameter in engine.parameters]
    report = engine.update([pad_tokens([torch.zeros(1, dtype=torch.long)])])
    assert report.skipped
    assert all(torch.equal(old, new) for old, new in zip(before, engine.parameters, strict=True))


class Poisoned(Regression):
    """Regression whose k-th micro-batch has an infinite gradient, as fp16 overflow makes."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Infinite where x is negative."""
        loss = F.mse_loss(model(batch), 2 * batch, reduction="sum")
        return {"squared_error": (loss * float("inf") if bool((batch < 0).any()) else loss, float(len(batch)))}


@pytest.mark.parametrize("poisoned", range(4))
def test_an_infinite_micro_batch_skips_the_whole_window(poisoned: int) -> None:
    """fp16: parameters stay, and the scale is halved once, whichever micro-batch overflowed."""
    spec = mlp_spec(precision="fp16-mixed", optimizer=SGD)
    workload = Poisoned()
    engine = _engine(spec, workload)
    before = [parameter.detach().clone() for parameter in engine.parameters]
    scale = engine.scaler.get_scale()
    batches = _parts(2, 2, 2, 2)
    batches[poisoned] = -batches[poisoned]
    report = engine.update(batches)
    assert report.skipped
    assert report.gradient_norm is None
    assert engine.scaler.get_scale() == scale / 2
    assert all(torch.equal(old, new) for old, new in zip(before, engine.parameters, strict=True))


class Broken(Regression):
    """Returns whatever it is told to as its loss terms."""

    def __init__(self, terms: Any) -> None:
        self.terms = terms

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """The terms given."""
        del model, batch
        return self.terms  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("terms", "words"),
    [({}, "no term"), ({"a": torch.zeros(())}, "loss_sum, weight"), ({"a": (torch.zeros(()), 1)}, "with a gradient")],
)
def test_broken_loss_terms_are_named(terms: Any, words: str) -> None:
    """A workload that breaks the contract gets told which part."""
    workload = Broken(terms)
    with pytest.raises(WorkloadError, match=words):
        _engine(mlp_spec(), workload).update([workload.make_batch(2)])
