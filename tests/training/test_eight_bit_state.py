"""Optimizers of bitsandbytes with a state in 8 bits: bytes, exactness, checkpoints, traces, and what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from batchwright.errors import SpecError
from batchwright.estimation.trace import Category, Trace
from batchwright.estimation.tracing.session import trace
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.planning.fingerprint import relevant_versions
from batchwright.schemas.optimizer import OptimizerSpec
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.accumulation.engine import GradientAccumulation
from batchwright.training.assembly import build_run
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.micro_batches.splitting import MicroBatch, sliced, split_batch
from batchwright.training.optimizers import build_optimizer, materialize_state
from batchwright.training.trainer import Trainer
from batchwright.training.update_engine import UpdateEngine
from batchwright.workloads.build import build_model, build_workload, check_workload
from batchwright.workloads.preload import late_imports
from batchwright.workloads.required_packages import require_packages
from batchwright_service.application.rules.device_checks import check_packages
from batchwright_service.errors import UnsupportedJobError
from tests.support.factories import mlp_spec, recommendation, transformers_spec
from tests.support.faults import relative_distance
from tests.support.service.scripted import SERVED
from tests.support.traced import held_bytes, most_bytes, traced_on_cuda

NAMES = ("adamw8bit", "lion8bit")
VALUES = {"adamw8bit": 2, "lion8bit": 1}
"""Values that are kept for each parameter."""
BLOCK, SMALLEST = 256, 4096
"""Values that share a scale, and those of the smallest parameter whose state is in 8 bits (bitsandbytes 0.50.2)."""
FLOAT, CODE_TABLE = 4, 256 * 4


def mlp_of(name: str, **changes: Any) -> WorkloadSpec:
    """Matrices of 6,400 and 40,000 values, whose last block is not full, and smaller parameters."""
    architecture = {"name": "mlp", "input_features": 32, "hidden_features": 200, "classes": 10}
    model = {"kind": "reference", "architecture": architecture}
    return mlp_spec(model=model, optimizer={"name": name, "learning_rate": 1e-2, "weight_decay": 0.1}, **changes)


def state_bytes(sizes: list[int], values: int) -> int:
    """Bytes of the state of parameters of these sizes: codes and scales, or fp32, and a table for each value."""
    in_8_bits = [size for size in sizes if size >= SMALLEST]
    codes = sum(size + FLOAT * -(-size // BLOCK) for size in in_8_bits)
    return values * (codes + FLOAT * sum(size for size in sizes if size < SMALLEST) + CODE_TABLE * bool(in_8_bits))


def held_by(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state, memory that is shared counted once."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values())


def engine_of(spec: WorkloadSpec) -> UpdateEngine:
    """The engine of probes and runs, on the CPU."""
    workload = build_workload(spec)
    return UpdateEngine(spec, workload, build_model(spec, workload), open_device("cpu"))


def temporary_bytes(engine: UpdateEngine, micro_batches: list[MicroBatch]) -> int:
    """The most that an update takes beside what is held after it, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        engine.update(micro_batches)
    held = most = 0
    events = [event for event in taken.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most - held


# --- memory ---


@pytest.mark.parametrize("name", NAMES)
def test_state_has_a_byte_per_value_and_a_scale_per_block(name: str) -> None:
    """In what runs and in the estimate for a CPU, to the byte."""
    spec = mlp_of(name)
    engine = engine_of(spec)
    expected = state_bytes([parameter.numel() for parameter in engine.model.parameters()], VALUES[name])
    assert held_by(engine.optimizer) == expected
    assert held_bytes(trace(spec, 4, accumulates=True), "end", Category.OPTIMIZER_STATE) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_embeddings_is_in_fp32(name: str) -> None:
    """As in the Trainer of transformers, and on no other optimizer's account."""
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100, bias=False))
    optimizer = build_optimizer(OptimizerSpec.model_validate({"name": name}), model)
    materialize_state(optimizer)
    assert [optimizer.state[parameter]["state1"].dtype for parameter in model.parameters()] == [
        torch.float32,
        torch.uint8,
    ]
    own = optimizer.mng  # type: ignore[attr-defined] # of bitsandbytes
    assert not type(own).get_instance().__dict__.get("pid2config")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_traced_step_takes_the_temporaries_of_a_real_one(name: str, precision: str) -> None:
    """On the CPU a step makes fp32 copies of a parameter and its state; a trace for a card has none."""
    spec = mlp_of(name, precision=precision)
    workload, engine = build_workload(spec), engine_of(spec)
    micro_batches = [sliced(workload.make_batch(4), 4) for _ in range(2)]
    engine.update(micro_batches)
    taken = temporary_bytes(engine, micro_batches)
    traced = trace(spec, 4, accumulates=True)
    found = most_bytes(traced, None, "measured-update") - held_bytes(traced, "end")
    assert abs(taken - found) < 0.001 * found


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, Trace]:
    """Traces with CUDA's decisions; needs a C++ compiler."""
    capability = {"accumulates": True, "compute_capability": [9, 0]}
    cases = [{"name": name, "spec": mlp_of(name).model_dump(mode="json"), "sizes": [4], **capability} for name in NAMES]
    return {name: traces[0] for name, traces in traced_on_cuda(cases).items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_for_a_card_has_the_state_alone(on_cuda: dict[str, Trace], name: str) -> None:
    """The kernels of a card change state and parameters in place."""
    sizes = [parameter.numel() for parameter in build_model(mlp_of(name), build_workload(mlp_of(name))).parameters()]
    taken = on_cuda[name]
    assert held_bytes(taken, "end", Category.OPTIMIZER_STATE) == state_bytes(sizes, VALUES[name])
    assert most_bytes(taken, Category.TEMPORARIES, "measured-update") < max(sizes) * FLOAT


# --- steps ---


@pytest.mark.parametrize("name", NAMES)
def test_the_first_steps_are_near_those_in_fp32(name: str) -> None:
    """Which are torch's AdamW, and Lion of lion-pytorch."""
    other = name.removesuffix("8bit")
    moved = []
    for each in (name, other):
        torch.manual_seed(0)
        model = nn.Linear(64, 128)
        start = model.weight.detach().clone()
        optimizer = build_optimizer(OptimizerSpec.model_validate({"name": each, "weight_decay": 0.1}), model)
        for _ in range(3):
            model.weight.grad = torch.randn_like(model.weight) + 1.0
            optimizer.step()
        moved.append(model.weight.detach() - start)
    error = torch.linalg.vector_norm(moved[0] - moved[1]) / torch.linalg.vector_norm(moved[1])
    assert error < (0.05 if name == "adamw8bit" else 0.2)  # a sign of Lion may turn


@pytest.mark.parametrize("name", NAMES)
def test_a_materialized_state_is_that_of_a_fresh_optimizer(name: str) -> None:
    """The codes have their values, and steps are counted from one."""
    weights = []
    for materializes in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(64, 128)
        optimizer = build_optimizer(OptimizerSpec.model_validate({"name": name}), model)
        if materializes:
            materialize_state(optimizer)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_accumulated_updates_are_those_of_the_whole_batch(name: str, size: int) -> None:
    """Five updates of 20 samples with gradients in fp64, whose sums round to the same fp32 in the step."""

    def trained(micro_batch_size: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)).double()
        optimizer = build_optimizer(OptimizerSpec.model_validate({"name": name}), model)
        accumulation = GradientAccumulation(model, optimizer)
        for _ in range(5):
            batch = torch.randn(20, 64, dtype=torch.float64)
            parts = split_batch(batch, micro_batch_size)
            accumulation.update(parts, lambda model, part: (model(part).square().sum(), len(part)))
        assert {optimizer.state[parameter]["state1"].dtype for parameter in model.parameters()} == {
            torch.uint8,
            torch.float32,
        }
        return model.state_dict()

    assert relative_distance(trained(size), trained(20)) < 1e-7


@pytest.mark.parametrize("name", NAMES)
def test_a_run_learns_and_goes_on_bit_equal(tmp_path: Path, name: str) -> None:
    """Stopped after some updates under a schedule, and resumed from codes and scales."""
    spec = mlp_of(name, schedule={"name": "cosine"})
    spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"learning_rate": 1e-3})})

    def loop(folder: str) -> Trainer:
        paths, request = RunPaths(tmp_path / folder), TrainingRequest(updates=8)
        return Trainer(build_run(recommendation(spec, 25, 10), request, paths, open_device("cpu")))

    whole, first = loop("whole"), loop("cut")
    losses: list[float] = []
    whole.run(lambda progress: losses.append(progress.loss or 0.0))
    first.run(lambda _: None, lambda: first.position.update >= 4)
    second = loop("cut")
    assert second.resume() == 4
    second.run(lambda _: None)
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), second.model.parameters(), strict=True))
    states = [each.engine.optimizer.state_dict()["state"] for each in (whole, second)]
    assert str(states[0]) == str(states[1])
    assert losses[-1] < losses[0]


# --- what is refused ---


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_refused(name: str) -> None:
    """A block of a shard is no block of the parameter, and the package's steps take no shards."""
    with pytest.raises(SpecError, match=rf"`{name}`, which needs whole parameters: `parallelism\.strategy` must be"):
        mlp_spec(optimizer={"name": name}, parallelism={"strategy": "fsdp", "world_size": 2})
    assert mlp_spec(optimizer={"name": name}, parallelism={"world_size": 2})


def test_a_name_of_the_trainer_is_answered_with_ours() -> None:
    """As users of transformers will write it."""
    with pytest.raises(SpecError, match="did you mean 'adamw8bit'"):
        mlp_spec(optimizer={"name": "adamw_8bit"})


@pytest.mark.parametrize("name", ["paged_adamw_8bit", "paged_adamw_32bit", "PagedLion8bit"])
def test_a_paged_state_is_refused_with_the_reason(name: str) -> None:
    """And with what can be had instead."""
    reason = (
        r"paged optimizer states are not supported: CUDA moves them .* no probe can tell .* `adamw8bit` or `lion8bit`"
    )
    with pytest.raises(SpecError, match=reason):
        mlp_spec(optimizer={"name": name})


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that is installed, and whose import fails."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "bitsandbytes.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError, match=r"optimizer\.name: .*cannot be imported \(OSError: libcudart\.so\.13"):
        build_workload(mlp_of("adamw8bit"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any probe, before a run on this host, and when a job is submitted to workers without it."""
    spec = mlp_of("adamw8bit")
    named = r"optimizer\.name: `adamw8bit` needs the package `bitsandbytes`: pip install 'batchwright\[bitsandbytes\]'"
    bare, able = (SERVED.model_copy(update={"packages": packages}) for packages in ((), ("bitsandbytes",)))
    with pytest.raises(UnsupportedJobError, match=named):
        check_packages(recommendation(spec), TrainingRequest(), [bare])
    check_packages(recommendation(spec), TrainingRequest(), [bare, able])
    check_packages(recommendation(mlp_of("lion")), TrainingRequest(), [bare])
    monkeypatch.setattr("batchwright.workloads.required_packages.find_spec", lambda _: None)
    with pytest.raises(SpecError, match=named):
        check_workload(spec)
    with pytest.raises(SpecError, match=named):
        require_packages(spec)


# --- around a probe ---


def test_the_package_is_imported_before_memory_is_measured() -> None:
    """Where CUDA may be asked for its devices: not in a process that others which use CUDA are forked from."""
    text = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8})
    in_8_bits = text.model_copy(update={"optimizer": OptimizerSpec(name="adamw8bit")})
    for spec in (mlp_of("adamw8bit"), in_8_bits):
        assert "bitsandbytes" in late_imports(spec)
        assert "bitsandbytes" not in late_imports(spec, with_model=False)
    assert "bitsandbytes" not in late_imports(text)


def test_its_version_is_part_of_a_recommendation() -> None:
    """Another release may keep another state."""
    versions = {"torch": "2.13", "bitsandbytes": "0.50.2"}
    found = recommendation(mlp_of("adamw8bit"))
    assert relevant_versions(mlp_of("adamw8bit"), found.device, versions)["bitsandbytes"] == "0.50.2"
    assert "bitsandbytes" not in relevant_versions(mlp_of("lion"), found.device, versions)
