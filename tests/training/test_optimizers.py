"""The optimizers of a spec: torch's own classes, with their arguments, groups and state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from tests.support.factories import mlp_spec
from tuner.errors import SpecError
from tuner.schemas.optimizer import OPTIMIZERS, OptimizerArguments, OptimizerName, OptimizerSpec
from tuner.training.accumulation.engine import GradientAccumulation, split_batch
from tuner.training.optimizers import build_optimizer, materialize_state
from tuner.workloads.build import check_workload

ARGUMENTS: dict[str, Any] = {
    "eps": 1e-6,
    "amsgrad": True,
    "nesterov": True,
    "centered": True,
    "decoupled_weight_decay": True,
    "momentum_decay": 0.01,
    "alpha": 0.8,
    "rho": 0.8,
    "lr_decay": 0.1,
    "initial_accumulator_value": 0.5,
    "beta2_decay": -0.5,
    "lambd": 0.01,
    "t0": 1.0,
    "etas": [0.4, 1.3],
    "step_sizes": [1e-5, 10.0],
}
"""A value of each argument that is not torch's default."""


def _cases() -> Iterable[dict[str, Any]]:
    """Every optimizer, implementation and argument, with and without weight decay and momentum."""
    for name, kind in OPTIMIZERS.items():
        momentum = {"momentum": 0.9} if "momentum" in kind.fields else {}
        decay = {"weight_decay": 0.1} if "weight_decay" in kind.fields else {}
        for how in ("default", "foreach", "for-loop", *(["fused"] if kind.has_fused else [])):
            yield {"name": name, "implementation": how}
            yield {"name": name, "implementation": how, **decay, **momentum}
            given = {argument: ARGUMENTS[argument] for argument in sorted(kind.arguments)}
            yield {"name": name, "implementation": how, **momentum, "arguments": given}


CASES = list(_cases())


def _id(fields: dict[str, Any]) -> str:
    return "-".join(str(value) if not isinstance(value, dict) else "arguments" for value in fields.values())


def _some_parameters() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(), (7,), (3, 5), (2, 3, 4)]
    return [
        (f"p{number}", nn.Parameter(torch.randn(shape, generator=generator))) for number, shape in enumerate(shapes)
    ]


def _stepped(parameters: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    for _ in range(steps):
        for _, parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for _, parameter in parameters]


# --- arguments ---


def test_every_optimizer_has_its_arguments() -> None:
    """All are in the table, and torch's classes take what it lists."""
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)
    assert set(ARGUMENTS) == set(OptimizerArguments.__annotations__)
    for kind in OPTIMIZERS.values():
        taken = inspect.signature(getattr(torch.optim, kind.torch_class)).parameters
        assert kind.fields | kind.arguments <= set(taken)
        assert ("fused" in taken) or not kind.has_fused


def test_all_dense_optimizers_of_torch_without_a_closure_are_there() -> None:
    """`LBFGS` needs a closure, `SparseAdam` sparse gradients, and `Muon` trains matrices alone."""
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert kinds - {"LBFGS", "SparseAdam", "Muon"} == {kind.torch_class for kind in OPTIMIZERS.values()}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adamw", "arguments": {"nesterov": True}}, "`arguments.nesterov` is not an argument of `adamw`"),
        ({"name": "rprop", "weight_decay": 0.1}, "`weight_decay` is not an argument of `rprop`"),
        ({"name": "adagrad", "implementation": "fused"}, "`adam`, `adamw`, `sgd` do"),
        ({"name": "sgd", "arguments": {"nesterov": True}}, "needs a `momentum` above 0"),
        ({"name": "sgd", "arguments": {"nestrov": True}}, "did you mean `nesterov`?"),
        ({"name": "adam", "arguments": {"eps": 0}}, "optimizer.arguments.eps: must be above 0"),
        ({"name": "adam", "groups": [{"parameters": []}]}, "must have at least 1 item"),
    ],
)
def test_wrong_arguments_are_named(fields: dict[str, Any], message: str) -> None:
    """An argument of another optimizer is no silent one."""
    with pytest.raises(SpecError) as caught:
        mlp_spec(optimizer=fields)
    assert message in str(caught.value)


# --- state ---


@pytest.mark.parametrize("fields", CASES, ids=_id)
def test_steps_from_a_materialized_state_are_those_of_a_fresh_optimizer(fields: dict[str, Any]) -> None:
    """The first steps, with every implementation and argument, are equal to the last bit."""
    spec = OptimizerSpec.model_validate(fields)
    ours, fresh = _some_parameters(), _some_parameters()
    optimizer = build_optimizer(spec, ours)
    materialize_state(optimizer)
    found, wanted = _stepped(ours, optimizer, 3), _stepped(fresh, build_optimizer(spec, fresh), 3)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(torch.isfinite(tensor).all() for tensor in found)


@pytest.mark.parametrize("fields", CASES, ids=_id)
def test_materializing_a_state_changes_nothing_else(fields: dict[str, Any]) -> None:
    """Parameters, learning rate and generators stay, no gradient is left, and the next step takes no more state."""
    parameters, untouched = _some_parameters(), _some_parameters()
    optimizer = build_optimizer(OptimizerSpec.model_validate({"learning_rate": 0.3, **fields}), parameters)
    random_state = torch.get_rng_state()
    materialize_state(optimizer)
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(parameters, untouched, strict=True))
    assert all(parameter.grad is None for _, parameter in parameters)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert optimizer.param_groups[0]["lr"] == 0.3
    state_tensors = _state_tensors(optimizer)
    _stepped(parameters, optimizer, 1)
    assert _state_tensors(optimizer) == state_tensors


def _state_tensors(optimizer: torch.optim.Optimizer) -> set[int]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return {id(value) for value in values if isinstance(value, Tensor)}


# --- accumulation ---


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_accumulated_updates_are_those_of_the_whole_batch(name: str, size: int) -> None:
    """Five updates of 20 samples, in fp64: whatever the size of a micro-batch, the weights are equal."""
    accumulated, whole = (_trained(name, micro_batch_size) for micro_batch_size in (size, 20))
    assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(accumulated, whole, strict=True))


def _trained(name: str, micro_batch_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = build_optimizer(OptimizerSpec.model_validate({"name": name}), model.named_parameters())
    accumulation = GradientAccumulation(model, optimizer)
    for _ in range(5):
        batch = torch.randn(20, 4, dtype=torch.float64)
        parts = split_batch(batch, micro_batch_size)
        accumulation.update(parts, lambda model, part: (model(part).square().sum(), len(part)))
    return [parameter.detach() for parameter in model.parameters()]


# --- groups ---


GROUPS = [
    {"parameters": ["*.bias"], "weight_decay": 0.0},
    {"parameters": ["0.*"], "learning_rate": 0.5},
]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_a_parameter_is_in_the_first_group_that_names_it() -> None:
    """The others keep the optimizer's own rates."""
    spec = OptimizerSpec.model_validate({"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.2, "groups": GROUPS})
    model = _model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(spec, model.named_parameters()).param_groups
    found = [([names[id(it)] for it in group["params"]], group["lr"], group["weight_decay"]) for group in groups]
    assert found == [
        (["1.weight", "2.weight"], 0.1, 0.2),
        (["0.bias", "1.bias", "2.bias"], 0.1, 0.0),
        (["0.weight"], 0.5, 0.2),
    ]


def test_groups_that_name_every_parameter_leave_no_empty_one() -> None:
    """Torch would keep an empty group in every checkpoint."""
    spec = OptimizerSpec.model_validate({"groups": [{"parameters": ["*"], "weight_decay": 0.1}]})
    assert [len(group["params"]) for group in build_optimizer(spec, _model().named_parameters()).param_groups] == [6]


def test_a_group_without_parameters_is_named() -> None:
    """A pattern that matches nothing is most often a misspelt name."""
    spec = OptimizerSpec.model_validate({"groups": [*GROUPS, {"parameters": ["*.bias", "norm*"]}]})
    with pytest.raises(SpecError, match=r"optimizer\.groups\.2\.parameters: .* names are `0\.weight`, `0\.bias`"):
        build_optimizer(spec, _model().named_parameters())
    spec_of_mlp = mlp_spec(optimizer={"groups": [{"parameters": ["norm*"], "weight_decay": 0.0}]})
    with pytest.raises(SpecError, match=r"optimizer\.groups\.0\.parameters"):  # before any probe
        check_workload(spec_of_mlp)
