"""An adapter above a base in 4 or 8 bits: memory to the byte, exact updates, checkpoints, and the result in peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from batchwright.errors import CheckpointError, SpecError
from batchwright.estimation.trace import Category, Trace
from batchwright.estimation.tracing.session import trace
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.planning.fingerprint import relevant_versions
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.assembly import build_run
from batchwright.training.coupling.check import check_spec_coupling
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.micro_batches.splitting import sliced
from batchwright.training.trainer import Trainer
from batchwright.workloads.adapters.quantized_base import QuantizedLinear
from batchwright.workloads.build import build_model, build_workload, check_workload, summarize
from batchwright.workloads.preload import late_imports
from batchwright_service.application.rules.device_checks import check_packages
from batchwright_service.errors import UnsupportedJobError
from tests.support.factories import recommendation, transformers_spec
from tests.support.faults import relative_distance
from tests.support.service.scripted import SERVED
from tests.support.traced import held_bytes, most_bytes, traced_on_cuda
from tests.support.whole_runs import weights_of
from tests.training.test_adapters import logits
from tests.training.test_eight_bit_state import engine_of, temporary_bytes
from tests.training.test_trained_model import GPT2, UPDATES, spec_of, train

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # read by peft
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # peft on GPT-2
]

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
KINDS: list[dict[str, Any]] = [{"kind": "nf4"}, {"kind": "fp4", "double_quantization": True}, {"kind": "int8"}]
ONE_KIND = pytest.mark.parametrize(
    "quantization",
    [pytest.param(kind, id=kind["kind"], marks=() if kind is KINDS[0] else pytest.mark.thorough) for kind in KINDS],
)
"""Training with the other kinds is thorough: each layer's product is tested for all."""
BLOCK, SCALES_BLOCK, CODE_TABLE = 64, 256, 256 * 4


def probed(quantization: dict[str, Any] | None, **changes: Any) -> WorkloadSpec:
    """A Llama with an adapter, as probes have it: of random weights."""
    adapter = {"kind": "lora", "rank": 4, **({} if quantization is None else {"quantization": quantization})}
    batch = {"sequence_length": 16}
    return transformers_spec("causal-lm", LLAMA, batch=batch, adapter=adapter, **{"data": None, **changes})


def packed_bytes(layer: QuantizedLinear, *, double: bool) -> int:
    """Bytes of a weight in 4 or 8 bits with its scales."""
    values = layer.in_features * layer.out_features
    if layer.kind == "int8":
        return values + 4 * layer.out_features
    blocks = -(-values // BLOCK)
    scales = blocks + 4 * -(-blocks // SCALES_BLOCK) + CODE_TABLE + 4 if double else 4 * blocks
    return -(-values // 2) + scales


# --- memory ---


@pytest.mark.parametrize(
    ("quantization", "precision"),
    [
        pytest.param(
            quantization,
            precision,
            id=f"{quantization['kind']}-{precision}",
            marks=() if ours == theirs else pytest.mark.thorough,
        )
        for ours, quantization in enumerate(KINDS)
        for theirs, precision in enumerate(("bf16", "fp32", "bf16-mixed"))
    ],
)
def test_an_estimate_has_the_bytes_of_what_runs(quantization: dict[str, Any], precision: str) -> None:
    """Of packed weights and scales, and of the temporaries of an update, in which weights are unpacked."""
    spec = probed(quantization, precision=precision)
    workload, engine = build_workload(spec), engine_of(spec)
    layers = [module for module in engine.model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 2 * 7
    double = quantization.get("double_quantization", False)
    for layer in layers:
        held = sum(parameter.nbytes for parameter in layer.parameters())
        assert held == packed_bytes(layer, double=double)
    micro_batches = [sliced(workload.make_batch(4), 4) for _ in range(2)]
    engine.update(micro_batches)
    taken = temporary_bytes(engine, micro_batches)
    traced = trace(spec, 4, accumulates=True)
    storages = [tensor.untyped_storage() for tensor in (*engine.model.parameters(), *engine.model.buffers())]
    kept = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert held_bytes(traced, "end", Category.PARAMETERS) == kept
    found = most_bytes(traced, None, "measured-update") - held_bytes(traced, "end")
    assert abs(taken - found) < 0.005 * found


@pytest.mark.thorough
def test_a_trace_for_a_card_has_the_packed_base() -> None:
    """And unpacks a weight for many tokens, in the type of the products; needs a C++ compiler."""
    kinds = {"whole": None, "nf4": KINDS[0], "int8": KINDS[2]}
    specs = {name: probed(fields, precision="bf16") for name, fields in kinds.items()}
    capability = {"accumulates": True, "compute_capability": [9, 0], "sizes": [200]}
    cases = [{"name": name, "spec": spec.model_dump(mode="json"), **capability} for name, spec in specs.items()]
    found: dict[str, Trace] = {name: traces[0] for name, traces in traced_on_cuda(cases).items()}
    kept = {name: held_bytes(taken, "end", Category.PARAMETERS) for name, taken in found.items()}
    for kind in ("nf4", "int8"):
        model = build_model(specs[kind], build_workload(specs[kind]))
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        values = [layer.in_features * layer.out_features for layer in layers]
        packed = sum(packed_bytes(layer, double=False) for layer in layers)
        assert kept["whole"] - kept[kind] == 2 * sum(values) - packed
        unpacked = 2 * max(values)
        assert found[kind].sizes.count(unpacked) > found["whole"].sizes.count(unpacked)


@pytest.mark.parametrize("quantization", KINDS, ids=lambda fields: fields["kind"])
def test_a_summary_counts_weights_and_not_bytes(quantization: dict[str, Any]) -> None:
    """As many parameters as in the unquantised model, of fewer bytes."""
    models = (build_model(spec, build_workload(spec)) for spec in (probed(None), probed(quantization)))
    whole, packed = map(summarize, models)
    assert (packed.parameters, packed.trainable_parameters) == (whole.parameters, whole.trainable_parameters)
    assert packed.parameter_bytes < whole.parameter_bytes / 2


def test_the_loss_of_a_quantised_base_is_checked_for_coupled_samples() -> None:
    """In fp32, as its products have no fp64."""
    report = check_spec_coupling(probed(KINDS[0]), build_workload(probed(KINDS[0])), torch.device("cpu"))
    assert not report.coupled, report.message


# --- training ---


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained GPT-2, whose weights are transposed."""
    directory = tmp_path_factory.mktemp("base")
    train(directory, spec_of({"config": GPT2}))
    return RunPaths(directory).pretrained


def quantised(base: Path, quantization: dict[str, Any], **changes: Any) -> WorkloadSpec:
    """A spec that trains an adapter above a pretrained base in 4 bits."""
    adapter = {"kind": "lora", "rank": 4, "target_modules": ["c_attn", "c_fc"], "quantization": quantization}
    return spec_of({"pretrained": str(base)}, adapter={**adapter, **changes.pop("adapter", {})}, **changes)


@pytest.mark.parametrize("quantization", KINDS, ids=lambda fields: fields["kind"])
def test_peft_loads_the_adapter_above_the_same_base(base: Path, tmp_path: Path, quantization: dict[str, Any]) -> None:
    """As transformers quantises it: equal logits, and other ones than those of the base alone."""
    from bitsandbytes.nn import Linear8bitLt
    from peft import PeftModel

    trainer, _ = train(tmp_path, quantised(base, quantization))
    config = BitsAndBytesConfig(load_in_8bit=True)
    if quantization["kind"] != "int8":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization["kind"],
            bnb_4bit_use_double_quant=quantization.get("double_quantization", False),
            bnb_4bit_compute_dtype=torch.float32,
        )

    def quantised_by_transformers() -> torch.nn.Module:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            base, quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        for module in model.modules():  # which repacks weights for evaluations on some CPUs
            if hasattr(module, "support_avx512bf16_for_cpu"):
                vars(module)["support_avx512bf16_for_cpu"] = False
            if isinstance(module, Linear8bitLt):  # which quantises its input too, except in training on the CPU
                module.train()
                vars(module)["train"] = lambda _, kept=module: kept
        return model

    loaded = PeftModel.from_pretrained(quantised_by_transformers(), RunPaths(tmp_path).pretrained)
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(loaded), logits(quantised_by_transformers()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [3, *(pytest.param(it, marks=pytest.mark.thorough) for it in (1, 7))])
@ONE_KIND
def test_training_above_a_quantised_base_is_exact(
    base: Path, tmp_path: Path, quantization: dict[str, Any], size: int
) -> None:
    """However the batch is divided; biases may be trained too."""
    spec = quantised(base, quantization, adapter={"bias": "all"})
    for trained_with in (size, 10):
        train(tmp_path / str(trained_with), spec, trained_with)
    whole = weights_of(tmp_path / "10")
    assert any(name.endswith("base_layer.bias") for name in whole)
    assert relative_distance(weights_of(tmp_path / str(size)), whole) < 1e-6


@pytest.mark.parametrize(
    "quantization", [pytest.param(KINDS[1], id="fp4"), pytest.param(KINDS[2], id="int8", marks=pytest.mark.thorough)]
)
def test_a_run_learns_resumes_and_keeps_its_base(base: Path, tmp_path: Path, quantization: dict[str, Any]) -> None:
    """Checkpoints hold the adapter alone, and a run goes on above the same codes to the same bits."""
    optimizer = {"name": "adamw8bit", "learning_rate": 0.02}
    spec = quantised(base, quantization, optimizer=optimizer, precision="bf16-mixed", ema_decay=0.5)
    found, request = recommendation(spec, 40, 10), TrainingRequest(updates=6, checkpoint_every=3)

    def loop(folder: str) -> Trainer:
        return Trainer(build_run(found, request, RunPaths(tmp_path / folder), open_device("cpu")))

    whole, first = loop("whole"), loop("cut")
    start = {name: value.clone() for name, value in whole.model.named_parameters() if not value.requires_grad}
    losses: list[float] = []
    whole.run(lambda progress: losses.append(progress.loss or 0.0))
    assert losses[-1] < losses[0]
    for name, value in whole.model.named_parameters():
        assert name not in start or torch.equal(value, start[name])
    first.run(lambda _: None, lambda: first.position.update >= 3)
    second = loop("cut")
    assert second.resume() == 3
    second.run(lambda _: None)
    pairs = zip(whole.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    weights, state = second._checkpoints.load(6)
    assert weights
    assert all(".lora_" in name for name in weights)
    assert state["base_sha256"] == whole._parts.base_sha256


def test_another_quantisation_is_another_base(base: Path, tmp_path: Path) -> None:
    """A run does not resume above codes that it did not begin with."""
    train(tmp_path, quantised(base, KINDS[0]))
    found = recommendation(quantised(base, KINDS[1]), 10, 4)
    with pytest.raises(CheckpointError):
        Trainer(build_run(found, TrainingRequest(updates=UPDATES + 1), RunPaths(tmp_path), open_device("cpu"))).resume()


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {"strategy": "fsdp", "world_size": 2}}, r"needs whole weights on each rank: .* must be `ddp`"),
        ({"compile": True}, "`adapter.quantization` cannot be compiled: leave `compile` out"),
        ({"data": {"kind": "synthetic", "samples": 4}}, r"needs `model\.pretrained` to train"),
    ],
)
def test_what_a_quantised_base_cannot_is_refused(changes: dict[str, Any], message: str) -> None:
    """With the remedy."""
    with pytest.raises(SpecError, match=message):
        probed(KINDS[0], **changes)


def test_only_decoders_are_quantised() -> None:
    """Other models read the types of weights that are packed."""
    config = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}
    adapter = {"kind": "lora", "quantization": {"kind": "nf4"}}
    with pytest.raises(SpecError, match=r"is for decoders: the task must be `causal-lm`, not `masked-lm`"):
        transformers_spec("masked-lm", config, batch={"sequence_length": 8}, adapter=adapter)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any probe, and when a job is submitted to workers without it."""
    spec = probed(KINDS[0])
    extra = r"package `bitsandbytes`: pip install 'batchwright\[bitsandbytes\]'"
    with pytest.raises(UnsupportedJobError, match=rf"adapter\.quantization: `nf4` needs the {extra}"):
        check_packages(recommendation(spec), TrainingRequest(), [SERVED.model_copy(update={"packages": ()})])
    monkeypatch.setattr("batchwright.workloads.required_packages.find_spec", lambda _: None)
    with pytest.raises(SpecError, match=rf"adapter\.quantization: `nf4` needs the {extra}"):
        check_workload(spec)


def test_the_package_is_part_of_what_is_measured() -> None:
    """Imported early, and named by a recommendation."""
    versions = {"bitsandbytes": "0.50.2"}
    packed, plain = recommendation(probed(KINDS[0])), recommendation(probed(None))
    assert "bitsandbytes" in late_imports(packed.request.workload)
    assert "bitsandbytes" not in late_imports(plain.request.workload)
    assert relevant_versions(packed.request.workload, packed.device, versions) == versions
    assert not relevant_versions(plain.request.workload, plain.device, versions)


@pytest.mark.parametrize("quantization", KINDS, ids=lambda fields: fields["kind"])
def test_a_layer_with_a_bias_adds_it_once(quantization: dict[str, Any]) -> None:
    """Trained or not; the product is that of the unpacked weight."""
    torch.manual_seed(0)
    spec = probed(quantization)
    assert spec.adapter is not None
    assert spec.adapter.quantization is not None
    linear = torch.nn.Linear(64, 32)
    inputs: Tensor = torch.randn(2, 3, 64, requires_grad=True)
    results = []
    for trains in (False, True):
        linear.bias.requires_grad = trains
        layer = QuantizedLinear(linear, spec.adapter.quantization, is_random=False)
        results.append(layer(inputs))
    torch.testing.assert_close(*results)
    error = torch.linalg.vector_norm(results[0] - linear(inputs)) / torch.linalg.vector_norm(linear(inputs))
    assert error < 0.15
    (gradient,) = torch.autograd.grad(results[0].sum(), inputs, retain_graph=True)
    results[1].sum().backward()
    torch.testing.assert_close(inputs.grad, gradient)
    assert torch.linalg.vector_norm(gradient - linear.weight.sum(0)) < 0.15 * torch.linalg.vector_norm(gradient)
    assert torch.equal(linear.bias.grad, torch.full((32,), 6.0))  # type: ignore[arg-type] # it has one
