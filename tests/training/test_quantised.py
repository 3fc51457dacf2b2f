"""Models that are quantised in part: checked, trained and resumed, with only what may be cast being cast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.training.assembly import build_run
from batchwright.training.coupling.check import check_spec_coupling
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.trainer import Trainer
from batchwright.workloads.build import build_model, build_workload
from batchwright.workloads.casting import cast_floating, is_quantized
from tests.support.factories import recommendation

CPU = torch.device("cpu")


def quantised_spec(**changes: Any) -> WorkloadSpec:
    """The quantised workload."""
    model = {"kind": "python", "target": "tests.support.quantised:build"}
    return parse_spec({"model": model, "data": {"kind": "workload"}, **changes})


def test_the_model_refuses_to_be_cast() -> None:
    """The fixture is as strict as transformers is with models that GPTQ or bitsandbytes has quantised."""
    model = build_workload(quantised_spec()).build_model()
    with pytest.raises(ValueError, match=r"`\.float\(\)` is not supported"):
        model.float()
    with pytest.raises(ValueError, match="cannot cast"):
        model.to(torch.bfloat16)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_only_what_may_be_cast_is_cast(precision: str, dtype: torch.dtype) -> None:
    """Adapters, norms and embeddings take the spec's type; packed weights and their scales keep theirs."""
    spec = quantised_spec(precision=precision)
    model = build_model(spec, build_workload(spec))
    found = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    layer = "transformer.h.0.mlp.c_fc"
    assert (found[f"{layer}.weight"], found[f"{layer}.scale"]) == (torch.int8, torch.float16)
    others = {found[name] for name in found if not name.endswith((".weight", ".scale", ".bias")) or ".up." in name}
    assert found[f"{layer}.up.weight"] is found["transformer.ln_f.weight"] is found["transformer.wte.weight"] is dtype
    assert others <= {dtype, torch.bool}


def test_its_loss_is_checked_for_coupled_samples() -> None:
    """The loss is checked in fp32, independently of the type that the model is trained in."""
    for precision in ("fp32", "bf16"):
        spec = quantised_spec(precision=precision)
        report = check_spec_coupling(spec, build_workload(spec), CPU)
        assert not report.coupled, report.message
        assert report.gradient_error < 1e-5


@pytest.mark.parametrize(
    "precision",
    [pytest.param(name, marks=pytest.mark.thorough) for name in ("fp32", "bf16")] + [pytest.param("bf16-mixed")],
)
def test_a_run_trains_its_adapters_and_resumes(tmp_path: Path, precision: str) -> None:
    """A run that was stopped and resumed ends like one that was not, with unchanged packed weights."""
    spec = quantised_spec(precision=precision, optimizer={"learning_rate": 0.01})
    found, request = recommendation(spec, 8, 4), TrainingRequest(updates=4, checkpoint_every=2)

    def loop_in(name: str) -> Trainer:
        return Trainer(build_run(found, request, RunPaths(tmp_path / name), open_device("cpu")))

    whole = loop_in("whole")
    start = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    losses: list[float] = []
    assert whole.run(lambda progress: losses.append(progress.loss or 0.0)) is RunOutcome.SUCCEEDED
    first = loop_in("cut")
    first.run(lambda _: None, lambda: first.position.update >= 2)
    second = loop_in("cut")
    assert second.resume() == 2
    second.run(lambda _: None)
    ends = [loop.model.state_dict() for loop in (whole, second)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in start)
    changed = {name for name in start if not torch.equal(start[name], ends[0][name])}
    assert changed
    assert all(".up." in name or ".down." in name for name in changed)
    assert losses[-1] != losses[0]


class Packed(Tensor):
    """A tensor of a library's own class, which looks like floating-point numbers."""


def test_tensors_of_special_classes_are_not_cast() -> None:
    """The tensors of torchao and bitsandbytes have special classes and are not cast."""
    layer, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Packed), requires_grad=False)
    narrow = nn.Linear(2, 2, bias=False)
    narrow.weight = nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    model: Any = nn.Sequential(layer, plain, narrow)
    model.is_quantized = True
    cast_floating(model, torch.bfloat16)
    assert [next(module.parameters()).dtype for module in model] == [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
    assert layer.bias.dtype is torch.float32


def test_a_packed_weight_is_enough() -> None:
    """A model without the attribute may be quantised."""
    packed = nn.Linear(2, 2, bias=False)
    packed.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.uint8), requires_grad=False)
    model = nn.Sequential(packed, nn.Linear(2, 2))
    assert is_quantized(model)
    assert {parameter.dtype for parameter in cast_floating(model, torch.bfloat16).parameters()} == {
        torch.uint8,
        torch.bfloat16,
    }


def test_a_model_that_is_not_quantised_is_cast_whole() -> None:
    """Counters and indices are no quantised weights."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Embedding(3, 2))
    model.register_buffer("positions", torch.arange(8).reshape(1, 8))
    assert not is_quantized(model)
    cast_floating(model, torch.bfloat16)
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.bfloat16, torch.int64}
