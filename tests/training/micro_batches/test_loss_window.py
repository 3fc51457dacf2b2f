"""Losses and weights are summed in fp64 in any type of the data, and a term without weight adds nothing."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import WorkloadError
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.micro_batches.loss_window import UpdateReport, as_weight

both_gatherings = pytest.mark.parametrize("gathering", ["scratch", "in-place"])
NARROW = [torch.bfloat16, torch.float16]


def _linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 3).to(dtype)


def _engine(model: nn.Module, gathering: Gathering = "scratch", **options: Any) -> GradientAccumulation:
    return GradientAccumulation(model, torch.optim.SGD(model.parameters(), 0.1), gathering=gathering, **options)


def _error(gradient: Tensor | None, truth: Tensor) -> float:
    assert gradient is not None
    return float((gradient.double() - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("known", [False, True])
def test_weights_of_a_narrow_type_are_counted_exactly(dtype: torch.dtype, *, known: bool) -> None:
    """3,000 ones in bf16 add up to 256, and in fp16 to 2,048."""
    count = 3000
    model, inputs = _linear(), torch.randn(count, 8, dtype=torch.float64)
    (truth,) = torch.autograd.grad(model(inputs).square().sum() / count, model.weight)
    report = _engine(model).accumulate(
        list(torch.split(inputs, 1)),
        lambda called, batch: (called(batch).square().sum(), torch.ones(len(batch), dtype=dtype).sum()),
        (lambda batch: torch.ones(len(batch), dtype=dtype).sum()) if known else None,  # type: ignore[arg-type,return-value]
    )
    assert report.weights == {"loss": count}
    assert _error(model.weight.grad, truth) < 1e-12


@pytest.mark.parametrize("dtype", NARROW)
def test_losses_of_a_narrow_type_are_summed_exactly(dtype: torch.dtype) -> None:
    """Under autocast each micro-batch has its loss in bf16, and a sum in bf16 stops growing."""
    model, values = _linear(), torch.rand(3000, dtype=torch.float64).to(dtype)
    report = _engine(model, checks_coupling=False).accumulate(
        list(torch.split(values, 1)),
        lambda called, batch: (batch.sum() + 0 * called(torch.zeros(8).double()).sum().to(dtype), len(batch)),
    )
    assert report.loss == pytest.approx(float(values.double().mean()), rel=1e-12)


@both_gatherings
def test_the_gradient_of_a_narrow_loss_is_divided_exactly(gathering: Gathering) -> None:
    """1/3 in bf16 is off by 0.2 %, which every gradient of the update would be."""
    model = _linear(torch.bfloat16)
    batches = [torch.ones(3, 8, dtype=torch.bfloat16)] * 3
    engine = _engine(model, gathering, checks_coupling=False)
    engine._run_window(batches, lambda called, batch: (called(batch).sum(), len(batch)), None)
    engine._reduction.apply_outstanding()
    assert [_error(total, torch.ones_like(total).double()) for total in engine.gradients.tensors()] == pytest.approx(
        [0.0, 0.0], abs=1e-6
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_count_that_was_rounded_is_refused(dtype: torch.dtype) -> None:
    """A mask that was cast to bf16 counts 301 as 300, before the engine reads the weight."""
    most = 2**8 if dtype is torch.bfloat16 else 2**11
    assert as_weight("loss", torch.ones(most, dtype=dtype).sum()) == most
    with pytest.raises(WorkloadError, match=rf"up to {most}: count in fp32, as in `mask.sum\(dtype=torch.float32\)`"):
        as_weight("loss", torch.ones(2 * most, dtype=dtype).sum())


def test_a_mask_that_was_cast_is_counted_before_the_cast_if_it_can_be() -> None:
    """``weigh`` gets the batch as it was loaded."""
    model, batch = _linear(torch.bfloat16), {"inputs": torch.randn(301, 8), "mask": torch.ones(301)}
    report = _engine(model, floating=torch.bfloat16, checks_coupling=False).accumulate(
        [batch],
        lambda called, cast: (called(cast["inputs"]).float().square().sum(), cast["mask"].sum()),
        lambda loaded: float(loaded["mask"].sum()),
    )
    assert report.weights == {"loss": 301}


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-1, "-1.0"),
        (torch.ones(2), r"shape \(2,\)"),
        (torch.ones((), dtype=torch.complex64), "complex64"),
        ("many", "'many'"),
        (None, "None"),
    ],
)
def test_a_weight_that_is_no_count_is_refused(weight: object, words: str) -> None:
    """By name, and not by an error of torch's or a model of NaN."""
    engine = _engine(_linear(), checks_coupling=False)
    with pytest.raises(WorkloadError, match=rf"the weight of loss term `loss` is .*{words}"):
        engine.update(
            [torch.randn(2, 8).double()],
            lambda called, batch: (called(batch).sum(), weight),  # type: ignore[arg-type,return-value]
        )


# --- micro-batches without weight -------------------------------------------------------------------------------------


def _masked_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A mean over the masked samples times their number: 0 / 0 without one."""
    inputs, mask = batch
    count = mask.sum()
    return (model(inputs).square().sum(1) * mask).sum() / count * count, count


def _masked(place: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    masks = torch.ones(4, 3, dtype=torch.float64)
    masks[place] = 0
    return [(torch.randn(3, 8, dtype=torch.float64), mask) for mask in masks]


def _update(place: int, gathering: Gathering, *, known: bool) -> tuple[nn.Linear, UpdateReport]:
    model = _linear()
    weigh = (lambda batch: float(batch[1].sum())) if known else None
    return model, _engine(model, gathering).update(_masked(place), _masked_mean, weigh)


@both_gatherings
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("place", range(4))
def test_a_micro_batch_without_weight_adds_nothing_at_any_place(
    place: int, gathering: Gathering, *, known: bool
) -> None:
    """The update is that of the other nine samples, and so is its loss."""
    exact = _linear()
    inputs = torch.cat([inputs for inputs, mask in _masked(place) if mask.any()])
    truth = exact(inputs).square().sum() / 9
    truth.backward()
    torch.optim.SGD(exact.parameters(), 0.1).step()
    model, report = _update(place, gathering, known=known)
    assert report.loss == pytest.approx(truth.item(), rel=1e-12)
    assert torch.allclose(model.weight, exact.weight, rtol=1e-12, atol=0)
    assert report.weights == {"loss": 9.0}
    assert report.micro_batch_sizes == (3, 3, 3, 3)


@both_gatherings
def test_one_term_without_weight_leaves_the_others(gathering: Gathering) -> None:
    """The second term has no label in the second micro-batch, and its loss there is 0 / 0."""
    model, batches = _linear(), _masked(1)

    def terms(called: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor | float]]:
        return {"all": (called(batch[0]).sum(), float(len(batch[0]))), "masked": _masked_mean(called, batch)}

    everything = model(torch.cat([inputs for inputs, _ in batches])).sum() / 12
    masked = model(torch.cat([inputs for inputs, mask in batches if mask.any()])).square().sum() / 9
    (truth,) = torch.autograd.grad(everything + masked, model.weight)
    report = _engine(model, gathering).accumulate(
        batches, terms, lambda batch: {"all": float(len(batch[0])), "masked": float(batch[1].sum())}
    )
    assert _error(model.weight.grad, truth) < 1e-12
    assert report.terms["masked"] == pytest.approx(masked.item(), rel=1e-12)


def test_a_window_of_micro_batches_without_weight_makes_no_step() -> None:
    """Its loss is NaN in each micro-batch; the report says 0, and that no step was made."""
    model = _linear()
    before = model.weight.detach().clone()
    empty = [(torch.randn(3, 8, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))] * 2
    report = _engine(model).update(empty, _masked_mean)
    assert report.skipped
    assert report.loss == 0.0
    assert torch.equal(model.weight, before)


def test_sharded_ranks_refuse_a_loss_of_nan_without_weight() -> None:
    """In lock step every rank runs every backward pass, so the loss must be finite."""
    engine = _engine(_linear(), lock_step=True)
    with pytest.raises(WorkloadError, match=r"is nan for a micro-batch without weight.*weight\.clamp\(min=1\)"):
        engine.update(_masked(1), _masked_mean)


@both_gatherings
def test_the_rounding_of_a_window_in_fp32_is_within_the_stated_bound(gathering: Gathering) -> None:
    """The worst case: equal gradients, so that each addition rounds the same way. Stated in ``gradient_sums``."""
    model, steps = nn.Linear(1, 1, bias=False), 1024
    engine = _engine(model, gathering, checks_coupling=False)
    engine.accumulate([torch.full((1, 1), 0.1)] * steps, lambda called, batch: (called(batch).sum(), 1.0))
    assert _error(model.weight.grad, torch.full((1, 1), 0.1).double()) < 1e-5
