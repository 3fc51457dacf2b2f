"""The optimizers of a spec: torch's own classes, with their arguments, groups and state."""

import inspect
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from batchwright.errors import SpecError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.optimizer import OPTIMIZERS, OptimizerArguments, OptimizerName, OptimizerSpec
from batchwright.schemas.requests import TrainingRequest
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.assembly import build_run
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.micro_batches.splitting import split_batch
from batchwright.training.optimizers import build_optimizer, materialize_state
from batchwright.training.trainer import Trainer
from batchwright.workloads.build import check_workload
from tests.support.factories import gpt_spec, mlp_spec, recommendation
from tests.support.faults import relative_distance

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
    "ns_steps": 3,
    "adjust_lr_fn": "match_rms_adamw",
    "adamw_learning_rate": 0.002,
    "adamw_parameters": ["none.*"],
}
"""A value of each argument that is not torch's default."""


def _required(name: str) -> dict[str, Any]:
    """Fields without which an optimizer is refused."""
    return {"momentum": 0.95} if name == "muon" else {}


def _cases() -> Iterable[dict[str, Any]]:
    """Every optimizer, implementation and argument, with and without weight decay and momentum."""
    for name, kind in OPTIMIZERS.items():
        momentum = {"momentum": 0.9} if "momentum" in kind.fields else {}
        required = _required(name)
        decay = {"weight_decay": 0.1} if "weight_decay" in kind.fields else {}
        for how in ("default", *(["foreach"] * kind.has_foreach), "for-loop", *(["fused"] if kind.has_fused else [])):
            yield {"name": name, "implementation": how, **required}
            yield {"name": name, "implementation": how, **decay, **momentum}
            given = {argument: ARGUMENTS[argument] for argument in sorted(kind.arguments)}
            yield {"name": name, "implementation": how, **momentum, "arguments": given}


CASES = list(_cases())


def _id(fields: dict[str, Any]) -> str:
    return "-".join(str(value) if not isinstance(value, dict) else "arguments" for value in fields.values())


def _parameters() -> nn.Module:
    """Parameters of every number of dimensions, and an embedding."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Module()
    for number, shape in enumerate([(), (7,), (3, 5), (2, 3, 4)]):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator)))
    model.embedding = nn.Embedding(4, 3, _weight=torch.randn((4, 3), generator=generator))
    return model


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


# --- arguments ---


def test_every_optimizer_has_its_arguments() -> None:
    """All are in the table, and torch's classes take what it lists."""
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)
    assert set(ARGUMENTS) == set(OptimizerArguments.__annotations__)
    for kind in OPTIMIZERS.values():
        taken = dict(inspect.signature(getattr(import_module(kind.module), kind.torch_class)).parameters)
        if kind.torch_class == "Muon":
            taken |= inspect.signature(torch.optim.AdamW).parameters
        of_ours = {"adamw_learning_rate", "adamw_parameters"}
        assert (kind.fields | kind.arguments) - of_ours <= set(taken)
        assert ("fused" in taken) or not kind.has_fused
        assert ("foreach" in taken) is kind.has_foreach


def test_all_dense_optimizers_of_torch_without_a_closure_are_there() -> None:
    """`LBFGS` needs a closure, and `SparseAdam` sparse gradients."""
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert kinds - {"LBFGS", "SparseAdam"} == {
        kind.torch_class for kind in OPTIMIZERS.values() if kind.module == "torch.optim"
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adamw", "arguments": {"nesterov": True}}, "`arguments.nesterov` is not an argument of `adamw`"),
        ({"name": "rprop", "weight_decay": 0.1}, "`weight_decay` is not an argument of `rprop`"),
        ({"name": "lion", "implementation": "foreach"}, "`implementation` is `foreach`, which `lion` does not have"),
        ({"name": "lion", "momentum": 0.9, "arguments": {"eps": 1e-8}}, "`arguments.eps` is not an argument of `lion`"),
        ({"name": "adagrad", "implementation": "fused"}, "`adam`, `adamw`, `muon`, `sgd` do"),
        ({"name": "muon"}, "`muon` needs a `momentum` above 0; its authors use 0.95"),
        ({"name": "adamw", "arguments": {"ns_steps": 5}}, "`arguments.ns_steps` is not an argument of `adamw`"),
        ({"name": "muon", "momentum": 0.9, "arguments": {"adjust_lr_fn": "other"}}, "'original', 'match_rms_adamw'"),
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
    ours, fresh = _parameters(), _parameters()
    optimizer = build_optimizer(spec, ours)
    materialize_state(optimizer)
    found, wanted = _stepped(ours, optimizer, 3), _stepped(fresh, build_optimizer(spec, fresh), 3)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(torch.isfinite(tensor).all() for tensor in found)


@pytest.mark.parametrize("fields", CASES, ids=_id)
def test_materializing_a_state_changes_nothing_else(fields: dict[str, Any]) -> None:
    """Parameters, learning rate and generators stay, no gradient is left, and the next step takes no more state."""
    model, untouched = _parameters(), _parameters()
    optimizer = build_optimizer(OptimizerSpec.model_validate({"learning_rate": 0.3, **fields}), model)
    random_state = torch.get_rng_state()
    materialize_state(optimizer)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), untouched.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert optimizer.param_groups[0]["lr"] == 0.3
    state_tensors = _state_tensors(optimizer)
    _stepped(model, optimizer, 1)
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
    assert relative_distance(accumulated, whole) < 1e-12


def _trained(name: str, micro_batch_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = build_optimizer(OptimizerSpec.model_validate({"name": name, **_required(name)}), model)
    accumulation = GradientAccumulation(model, optimizer)
    for _ in range(5):
        batch = torch.randn(20, 4, dtype=torch.float64)
        parts = split_batch(batch, micro_batch_size)
        accumulation.update(parts, lambda model, part: (model(part).square().sum(), len(part)))
    return model.state_dict()


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
    groups = build_optimizer(spec, model).param_groups
    found = [([names[id(it)] for it in group["params"]], group["lr"], group["weight_decay"]) for group in groups]
    assert found == [
        (["1.weight", "2.weight"], 0.1, 0.2),
        (["0.bias", "1.bias", "2.bias"], 0.1, 0.0),
        (["0.weight"], 0.5, 0.2),
    ]


def test_groups_that_name_every_parameter_leave_no_empty_one() -> None:
    """Torch would keep an empty group in every checkpoint."""
    spec = OptimizerSpec.model_validate({"groups": [{"parameters": ["*"], "weight_decay": 0.1}]})
    assert [len(group["params"]) for group in build_optimizer(spec, _model()).param_groups] == [6]


def test_a_group_without_parameters_is_named() -> None:
    """A pattern that matches nothing is most often a misspelt name."""
    spec = OptimizerSpec.model_validate({"groups": [*GROUPS, {"parameters": ["*.bias", "norm*"]}]})
    with pytest.raises(SpecError, match=r"optimizer\.groups\.2\.parameters: .* names are `0\.weight`, `0\.bias`"):
        build_optimizer(spec, _model())
    spec_of_mlp = mlp_spec(optimizer={"groups": [{"parameters": ["norm*"], "weight_decay": 0.0}]})
    with pytest.raises(SpecError, match=r"optimizer\.groups\.0\.parameters"):  # before any probe
        check_workload(spec_of_mlp)


# --- Muon ---


def _language_model() -> nn.Module:
    model: nn.Module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
    return model


def _muon(**fields: Any) -> OptimizerSpec:
    return OptimizerSpec.model_validate({"name": "muon", "learning_rate": 0.02, "momentum": 0.95, **fields})


def _names(model: nn.Module, optimizer: torch.optim.Optimizer, method: str) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for group in optimizer.param_groups if group["method"] == method]
    return {names[id(parameter)] for group in groups for parameter in group["params"]}


def test_muon_trains_the_matrices_of_hidden_layers() -> None:
    """Embeddings, the output layer tied to them, norms and biases are AdamW's, and so is what the user names."""
    model = _language_model()
    found = _names(model, build_optimizer(_muon(), model), "muon")
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert found == {f"transformer.h.0.{layer}.weight" for layer in layers}
    fewer = build_optimizer(_muon(arguments={"adamw_parameters": ["*.attn.*"]}), model)
    assert _names(model, fewer, "muon") == {name for name in found if ".mlp." in name}
    assert _names(model, fewer, "muon") | _names(model, fewer, "adamw") == {
        name for name, _ in model.named_parameters()
    }
    untied = nn.ModuleDict({"layer": nn.Linear(3, 4), "lm_head": nn.Linear(4, 5)})
    assert _names(untied, build_optimizer(_muon(), untied), "muon") == {"layer.weight"}


def test_a_step_of_muon_is_that_of_both_of_torch() -> None:
    """Equal to the bit to `torch.optim.Muon` and `torch.optim.AdamW`, over steps, a schedule and a checkpoint."""
    ours, theirs = _parameters(), _parameters()
    spec = _muon(weight_decay=0.1, arguments={"nesterov": True, "adamw_learning_rate": 0.003})
    optimizer = build_optimizer(spec, ours)
    matrix = dict(theirs.named_parameters())["p2"]
    others = [parameter for parameter in theirs.parameters() if parameter is not matrix]
    both = (
        torch.optim.Muon([matrix], lr=0.02, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(others, lr=0.003, weight_decay=0.1),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda update: 1.0 / (update + 1)) for each in (optimizer, *both)
    ]
    generator = torch.Generator().manual_seed(6)
    for update in range(6):
        if update == 3:  # goes on from its state, in an optimizer of a later process
            state = optimizer.state_dict()
            optimizer = build_optimizer(spec, ours)
            optimizer.load_state_dict(state)
            schedules[0] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 / (update + 1), 2)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for each in (optimizer, *both):
            each.step()
        for schedule in schedules:
            schedule.step()
        assert [group["lr"] for group in optimizer.param_groups] == [each.param_groups[0]["lr"] for each in both]
        assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_muon_keeps_one_value_for_each_weight_of_a_matrix() -> None:
    """AdamW keeps two, so that the state of a large model is nearly half as large."""
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = build_optimizer(_muon(), model)
    materialize_state(optimizer)
    values = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert sum(value.numel() for value in values) == 64 * 64 + 2 * 64


def test_groups_have_their_rates_in_both() -> None:
    """A group of the spec is divided, with its own rates."""
    spec = _muon(weight_decay=0.1, groups=[{"parameters": ["p[12]"], "weight_decay": 0.0}])
    found = [
        (group["method"], len(group["params"]), group["weight_decay"])
        for group in build_optimizer(spec, _parameters()).param_groups
    ]
    assert found == [("muon", 1, 0.0), ("adamw", 3, 0.1), ("adamw", 1, 0.0)]


def test_a_model_without_matrices_is_refused() -> None:
    """With the optimizer that trains it."""
    with pytest.raises(SpecError, match=r"optimizer\.name: .* of which this model has none: use `adamw`"):
        build_optimizer(_muon(), nn.LayerNorm(4))


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any probe, as torch 2.8 has none; so are shards of matrices."""
    muon = {"name": "muon", "momentum": 0.95}
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(SpecError, match=r"optimizer\.name: torch .* has no `torch\.optim\.Muon`: install torch 2\.9"):
        check_workload(mlp_spec(optimizer=muon))
    with pytest.raises(SpecError, match=r"`parallelism\.strategy` must be `ddp`"):
        mlp_spec(optimizer=muon, parallelism={"strategy": "fsdp"})


# --- Lion ---


def test_a_step_of_lion_is_that_of_its_paper() -> None:
    """Algorithm 2 of Chen et al. (2023), by hand: the sign of an interpolation, and a decay by the learning rate."""
    groups = [{"parameters": ["embedding.*"], "weight_decay": 0.0, "learning_rate": 0.02}]
    fields = {"name": "lion", "learning_rate": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.99], "groups": groups}
    model, by_hand = _parameters(), _parameters()
    found = _stepped(model, build_optimizer(OptimizerSpec.model_validate(fields), model), 3)
    momenta = [torch.zeros_like(parameter) for parameter in by_hand.parameters()]
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        for (name, parameter), momentum in zip(by_hand.named_parameters(), momenta, strict=True):
            rate, decay = (0.02, 0.0) if name.startswith("embedding") else (0.01, 0.1)
            gradient = torch.randn(parameter.shape, generator=generator)
            step = (0.9 * momentum + 0.1 * gradient).sign()
            parameter.data -= rate * (step + decay * parameter.data)
            momentum.mul_(0.99).add_(gradient, alpha=0.01)
    for one, other in zip(found, by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach())


def test_lion_keeps_one_value_for_each_parameter() -> None:
    """Half of what AdamW keeps."""
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = build_optimizer(OptimizerSpec(name="lion"), model)
    materialize_state(optimizer)
    assert sum(value.numel() for state in optimizer.state.values() for value in state.values()) == 64 * 64 + 64


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any probe, with the extra that has it."""
    monkeypatch.setattr("batchwright.workloads.required_packages.find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"optimizer\.name: `lion` needs the package `lion_pytorch`: pip install"):
        check_workload(mlp_spec(optimizer={"name": "lion"}))


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "muon", "momentum": 0.95, "learning_rate": 0.02},
        {"name": "lion", "learning_rate": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]},
    ],
)
def test_a_run_goes_on_bit_equal(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """Stopped after some updates under a schedule, and resumed."""
    spec = gpt_spec(optimizer=optimizer, schedule={"name": "cosine"})

    def loop(name: str) -> Trainer:
        paths, request = RunPaths(tmp_path / name), TrainingRequest(updates=6)
        return Trainer(build_run(recommendation(spec, 16, 5), request, paths, open_device("cpu")))

    whole, first = loop("whole"), loop("cut")
    losses: list[float | None] = []
    whole.run(lambda progress: losses.append(progress.loss))
    first.run(lambda _: None, lambda: first.position.update >= 3)
    second = loop("cut")
    assert second.resume() == 3
    second.run(lambda _: None)
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), second.model.parameters(), strict=True))
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < losses[0]
