"""The library's doors accept the same: every loss, batch and plan of one is one of every other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batchwright
from batchwright import GradientAccumulation, MicroBatch, OptimizerSpec, find_batch_size
from batchwright.errors import SpecError, WorkloadError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.library.functions import Functions, FunctionWorkload
from batchwright.schemas.plans import UniformPlan
from batchwright.training.accumulation.planned_window import plan_of
from batchwright.training.coupling.check import check_spec_coupling
from batchwright.training.micro_batches.splitting import sliced
from batchwright.training.update_engine import UpdateEngine
from tests.support.factories import mlp_spec, recommendation

SAMPLES, WIDTH = 8, 3
SIZES = (3, 3, 2)
CPU = torch.device("cpu")


def build_model() -> nn.Module:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, 2))


# --- losses, of a batch that `rows` makes a tensor of -----------------------------------------------------------------


def squares(model: nn.Module, batch: Any) -> Tensor:
    """One value for each sample."""
    outputs: Tensor = model(rows(batch))
    return outputs.square().sum(1)


LOSSES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "mean": lambda model, batch: squares(model, batch).mean(),
    "sum and weight": lambda model, batch: (squares(model, batch).sum(), len(rows(batch))),
    "sum and weight in a tensor": lambda model, batch: (squares(model, batch).sum(), torch.tensor(len(rows(batch)))),
    "one name": lambda model, batch: {"squares": (squares(model, batch).sum(), len(rows(batch)))},
    "names": lambda model, batch: {
        "squares": (squares(model, batch).sum(), len(rows(batch))),
        "positive": (model(rows(batch))[rows(batch)[:, 0] > 0].abs().sum(), (rows(batch)[:, 0] > 0).sum()),
    },
}


def mean_of(loss: Any) -> Tensor:
    """The loss that an update minimizes: each term's sum over its own weight."""
    if isinstance(loss, Tensor):
        return loss
    pairs = loss.values() if isinstance(loss, dict) else [loss]
    return torch.stack([loss_sum / weight for loss_sum, weight in pairs]).sum()


# --- batches ----------------------------------------------------------------------------------------------------------


def samples_of(size: int) -> Tensor:
    """The first of 16 random samples."""
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))[:size]


BATCHES: dict[str, Callable[[int], Any]] = {
    "tensor": samples_of,
    "mapping": lambda size: {"x": samples_of(size), "ids": list(range(size))},
    "pair": lambda size: (samples_of(size), torch.zeros(size)),
    "list of samples": lambda size: list(samples_of(size)),
    "list of mappings": lambda size: [{"x": sample} for sample in samples_of(size)],
    "second dimension": lambda size: {"time first": samples_of(size).T},
    "micro-batch": lambda size: MicroBatch.collated(list(samples_of(size)), lambda one: torch.stack([*one])),
}


def rows(batch: Any) -> Any:
    """The samples of any of these batches, as rows."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, dict):
        return batch["x"] if "x" in batch else batch["time first"].T
    if isinstance(batch, tuple):
        return batch[0]
    return torch.stack([sample["x"] if isinstance(sample, dict) else sample for sample in batch])


# --- plans ------------------------------------------------------------------------------------------------------------

PLANS: dict[str, Any] = {
    "plan": batchwright.plan(SAMPLES, 3),
    "recommendation": recommendation(mlp_spec(), SAMPLES, 3),
    "loaded recommendation": batchwright.Recommendation.of(recommendation(mlp_spec(), SAMPLES, 3)),
}

# --- doors: each returns the gradient of one update of eight samples --------------------------------------------------


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that leaves the parameters, so that gradients can be compared."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def accumulated(loss: Any, make_batch: Any, plan: Any, **options: Any) -> list[Tensor]:
    """Of a loop of one's own."""
    model = build_model()
    accumulation = GradientAccumulation(model, optimizer_of(model), plan=plan, **options)
    report = accumulation.accumulate([make_batch(SAMPLES)], loss)
    assert (report.micro_batch_sizes, report.samples) == (SIZES, SAMPLES)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def unchecked(loss: Any, make_batch: Any, plan: Any) -> list[Tensor]:
    """Of such a loop without the check of its first window."""
    return accumulated(loss, make_batch, plan, checks_coupling=False)


def probed(loss: Any, make_batch: Any, plan: Any) -> list[Tensor]:
    """Of what a probe of ``find_batch_size`` runs, once its check has found a sum over the samples."""
    workload = FunctionWorkload(Functions(build_model, make_batch, loss))
    spec = mlp_spec(optimizer={"name": "sgd", "learning_rate": 1.0})
    assert check_spec_coupling(spec, workload, CPU).verdict == "separate"  # type: ignore[arg-type] # any loss
    model = build_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine = UpdateEngine(spec, workload, model, open_device("cpu"), recovers=False)  # type: ignore[arg-type] # any loss
    sizes = getattr(plan, "plan", plan).micro_batch_sizes[0]
    whole, start, parts = samples_of(SAMPLES), 0, []
    for size in sizes:
        part = whole[start : start + size]
        made = workload.make_batch(size)
        parts.append(sliced(replaced(made, part), size))
        start += size
    engine.update(parts)
    return [one - other.detach() for one, other in zip(before, model.parameters(), strict=True)]


def replaced(batch: Any, part: Tensor) -> Any:
    """A batch of the same structure with other samples."""
    if isinstance(batch, Tensor):
        return part
    if isinstance(batch, dict):
        return {name: part if name == "x" else part.T for name in batch if name != "ids"}
    if isinstance(batch, tuple):
        return part, torch.zeros(len(part))
    return [{"x": sample} if isinstance(batch[0], dict) else sample for sample in part]


DOORS = {"loop": accumulated, "unchecked loop": unchecked, "probe": probed}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("door", DOORS)
def test_every_door_accepts_every_loss_and_batch(door: str, loss: str, batch: str) -> None:
    """With the gradient of the whole batch, from one pass in fp64."""
    assert_exact(DOORS[door](LOSSES[loss], BATCHES[batch], PLANS["plan"]), LOSSES[loss])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loop_accepts_every_plan(loss: str, plan: str) -> None:
    """A recommendation is its plan."""
    assert_exact(accumulated(LOSSES[loss], BATCHES["list of samples"], PLANS[plan]), LOSSES[loss])


def assert_exact(found: list[Tensor], loss: Any) -> None:
    """The gradients are those of the whole batch."""
    model = build_model().double()
    truth = torch.autograd.grad(mean_of(loss(model, samples_of(SAMPLES).double())), list(model.parameters()))
    for one, other in zip(found, truth, strict=True):
        assert (one.double() - other).abs().max() <= 1e-5 * other.abs().max()


def test_a_uniform_plan_is_a_plan() -> None:
    """Two micro-batches of four on each of two ranks."""
    summary = batchwright.plan(16, 4, world_size=2).summary()
    uniform = UniformPlan(**summary.model_dump(), change="none")
    assert plan_of(uniform).micro_batch_sizes == ((4, 4), (4, 4))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (recommendation(plan=None, feasible=False, infeasible_reason="no sample fits"), "has no plan: no sample fits"),
        (batchwright.plan(8, 4).summary(), "must be a plan, as of `plan`, or a recommendation"),
        (8, "must be a plan, as of `plan`, or a recommendation"),
    ],
    ids=["nothing fits", "summary", "number"],
)
def test_what_has_no_plan_is_refused(plan: Any, words: str) -> None:
    """A loop that ignored the argument would train another effective batch."""
    model = build_model()
    with pytest.raises((SpecError, WorkloadError), match=words):
        GradientAccumulation(model, optimizer_of(model), plan=plan)


@pytest.mark.usefixtures("forked")
def test_a_tuning_takes_what_its_documentation_names() -> None:
    """Named terms over lists of samples, a limit in bytes, and fields of the request and of the workload."""
    found = find_batch_size(
        build_model,
        BATCHES["list of mappings"],
        LOSSES["names"],
        effective_batch_size=SAMPLES,
        max_micro_batch_size=3,
        samples=len,
        memory_limit=256 * 1024**2,
        memory_margin=0.05,
        optimizer=OptimizerSpec(name="sgd", learning_rate=0.1),
        precision="bf16-mixed",
        gradient_clipping=1.0,
        device="cpu",
        progress=False,
    )
    workload = found.request.workload
    assert (workload.optimizer.name, workload.precision, workload.gradient_clipping) == ("sgd", "bf16-mixed", 1.0)
    assert (found.request.memory_limit_bytes, found.request.memory_margin) == (256 * 1024**2, 0.05)
    assert found.plan is not None
    assert found.plan.micro_batch_sizes == (SIZES,)
    assert found.evidence.coupling is not None
    assert found.evidence.coupling.verdict == "separate"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: squares(model, batch).sum(), "the loss grows with the batch, like a sum"),
        (
            lambda model, batch: (squares(model, batch) / squares(model, batch).max()).mean(),
            "the loss is not the mean over the samples",
        ),
    ],
    ids=["sum", "coupled"],
)
def test_what_is_no_mean_is_refused(loss: Any, words: str) -> None:
    """A loop takes a mean without its weight, so it tells a sum apart."""
    with pytest.raises(WorkloadError, match=words):
        accumulated(loss, samples_of, PLANS["plan"])
