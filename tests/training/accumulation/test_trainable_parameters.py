"""Gradients that would not be summed or cleared are refused before the window, with the parameter's name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from batchwright.errors import WorkloadError
from batchwright.training.accumulation.collectives import single_rank_group
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.fsdp import shard

both_gatherings = pytest.mark.parametrize("gathering", ["scratch", "in-place"])


def _loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return model(batch).sum(), len(batch)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    return model


WINDOW = [torch.ones(2, 2)] * 2


def _unfreeze(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(requires_grad=True)


def _add_layer(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(1, 1))


def _add_group(_: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})


def _replace(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[1].weight = nn.Parameter(torch.zeros(1, 2))


def _stale_gradient(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[0].get_parameter("bias").grad = torch.ones(2)


def _convert(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model.bfloat16()


def _backward(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.ones(1, 2)).sum())


@both_gatherings
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_unfreeze, r"`0\.weight` is trainable, but was frozen.*new GradientAccumulation"),
        (_add_layer, r"`2\.weight` is trainable"),
        (_add_group, r"parameter 0 of the optimizer's group 1, of shape \(5,\), is trainable"),
        (_replace, r"`1\.weight` is trainable"),
        (_stale_gradient, r"`0\.bias` is frozen and has a gradient.*\.grad to None"),
        (_convert, r"`1\.weight` was float32 on cpu .* bfloat16 on cpu now"),
        (_backward, r"`1\.weight` has a gradient from before the window.*zero_grad"),
    ],
)
def test_a_gradient_from_outside_the_window_is_refused(
    change: Callable[[nn.Sequential, torch.optim.Optimizer], None], words: str, gathering: Gathering
) -> None:
    """Between two windows: no step is made, so no parameter moves."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering)
    accumulation.update(WINDOW, _loss)
    change(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(WorkloadError, match=words):
        accumulation.update([torch.ones(2, 2).to(next(model[1].parameters()).dtype)], _loss)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_a_parameter_frozen_later_is_not_changed() -> None:
    """A parameter that no longer needs a gradient gets none, and no weight decay."""
    model = _model()
    accumulation = GradientAccumulation(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    accumulation.update(WINDOW, _loss)
    weight = model[1].get_parameter("weight").requires_grad_(False)
    before = weight.detach().clone()
    accumulation.update(WINDOW, _loss)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("clear", ["nothing", "zero", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both_gatherings
def test_gradients_that_a_window_left_for_a_step_are_known(
    gathering: Gathering, dtype: torch.dtype, clear: str
) -> None:
    """After ``accumulate`` and a step of one's own, whether or not the gradients are cleared."""
    model = _model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accumulation = GradientAccumulation(model, optimizer, gathering=gathering)
    found = []
    for _ in range(2):
        accumulation.accumulate([batch.to(dtype) for batch in WINDOW], _loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        if clear != "nothing":
            optimizer.zero_grad(set_to_none=clear == "none")
    assert len(found[0]) == 2
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@both_gatherings
@pytest.mark.filterwarnings("ignore:it could not be checked whether the loss is a sum over the samples")
def test_a_failed_window_leaves_no_gradient(gathering: Gathering) -> None:
    """The second micro-batch fails: nothing of the first is in the way of the next window."""
    model = _model()
    accumulation = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.0), gathering=gathering)

    def failing(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        if len(batch) == 1:
            raise ValueError("a bad sample")
        return _loss(model, batch)

    with pytest.raises(ValueError, match="a bad sample"):
        accumulation.update([torch.ones(2, 2), torch.ones(1, 2)], failing)
    assert all(parameter.grad is None for parameter in model.parameters())
    accumulation.update(WINDOW, _loss)


def test_fsdp1_is_refused() -> None:
    """DDP averages in every backward pass, which no option changes."""

    class FullyShardedDataParallel(nn.Sequential):
        """By this name torch has its first FSDP, which needs a process group to be made."""

    model = FullyShardedDataParallel(nn.Linear(1, 1))
    with pytest.raises(WorkloadError, match=r"averages gradients.*fully_shard"):
        GradientAccumulation(model, torch.optim.SGD(model.parameters()))


def test_a_model_in_shards_on_one_rank_may_be_left_as_torch_makes_it() -> None:
    """Over one rank a mean is a sum; another divisor is refused, and named."""
    ranks = single_rank_group(torch.device("cpu"))
    try:
        model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 1))[1]
        shard(model, torch.device("cpu"), 1)
        accumulation = GradientAccumulation(
            model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks, lock_step=True
        )
        accumulation.update(WINDOW, _loss)
        model.set_gradient_divide_factor(3.0)  # type: ignore[operator] # FSDP's own method
        with pytest.raises(WorkloadError, match=r"the model by 3 .*set_gradient_divide_factor\(1\.0\)"):
            accumulation.update(WINDOW, _loss)
    finally:
        ranks.close()
