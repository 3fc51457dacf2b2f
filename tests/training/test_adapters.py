"""A run of an adapter is as exact as any other, holds only what is trained, and peft loads its result."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from batchwright.errors import CheckpointError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.assembly import build_run
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.trainer import Trainer
from tests.support.factories import recommendation
from tests.support.faults import relative_distance
from tests.support.whole_runs import run_to_end, weights_of
from tests.training.test_trained_model import GPT2, UPDATES, spec_of, train

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # read by peft
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # peft on GPT-2
]

LORA = {"kind": "lora", "rank": 4, "target_modules": ["c_attn", "c_fc"]}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained model."""
    directory = tmp_path_factory.mktemp("base")
    train(directory, spec_of({"config": GPT2}))
    return RunPaths(directory).pretrained


def adapted(base: Path, adapter: dict[str, Any] | None = None, **changes: Any) -> WorkloadSpec:
    """A spec that trains an adapter of a pretrained model."""
    return spec_of({"pretrained": str(base)}, adapter={**LORA, **(adapter or {})}, **changes)


def logits(model: torch.nn.Module) -> torch.Tensor:
    """The output of a model in evaluation, of fixed tokens."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.arange(16).reshape(2, 8)).logits
    return found


@pytest.mark.parametrize("model", ["pretrained", "config"])
def test_training_an_adapter_is_exact(base: Path, tmp_path: Path, model: str) -> None:
    """The weights are those of undivided batches, however the batch is divided, above a given or a random base."""
    spec = adapted(base) if model == "pretrained" else spec_of({"config": LLAMA}, adapter={"kind": "lora"})
    for size in (1, 3, 7, 10):
        train(tmp_path / str(size), spec, size)
    whole = weights_of(tmp_path / "10")
    assert whole
    assert all(".lora_" in name for name in whole)
    assert any(bool(value.any()) for name, value in whole.items() if ".lora_B." in name)
    for size in (1, 3, 7):
        assert relative_distance(weights_of(tmp_path / str(size)), whole) < 1e-6


@pytest.mark.parametrize("classes", ["PeftModel", "AutoPeftModel"])
def test_peft_loads_the_adapter(base: Path, tmp_path: Path, classes: str) -> None:
    """With the logits of the model that was trained; the base is the folder that the spec names."""
    from peft import AutoPeftModelForCausalLM, PeftModel

    spec = adapted(base, {"use_rslora": True, "alpha": 3.5, "bias": "all", "modules_to_save": ["ln_f"]})
    trainer, _ = train(tmp_path, spec)
    folder = RunPaths(tmp_path).pretrained
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert "Plan and evidence" in (folder / "README.md").read_text(encoding="utf-8")
    if classes == "PeftModel":
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    else:
        loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0.0, atol=0.0)
    assert not torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(base)))


def test_a_random_base_is_written_beside_its_adapter(tmp_path: Path) -> None:
    """Nothing else holds its weights; averages are an adapter of their own."""
    from peft import AutoPeftModelForCausalLM, PeftModel

    trainer, _ = train(tmp_path, spec_of({"config": LLAMA}, adapter={"kind": "lora"}, ema_decay=0.5))
    paths = RunPaths(tmp_path)
    loaded = AutoPeftModelForCausalLM.from_pretrained(paths.pretrained)
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0.0, atol=0.0)
    average = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(paths.base), paths.pretrained_average)
    assert not torch.equal(logits(average), logits(loaded))


def test_checkpoints_hold_what_is_trained(base: Path, tmp_path: Path) -> None:
    """Neither weights nor optimizer state of the base are in them."""
    trainer, _ = train(tmp_path, adapted(base, optimizer={"name": "adamw"}))
    weights, state = trainer._checkpoints.load(UPDATES)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert set(weights) == trained
    assert len(state["optimizer"]["state"]) == len(trained)
    assert len(trained) == 2 * 2 * 2  # two matrices for two modules of two layers


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.2}, {"modules_to_save": ["ln_f"], "bias": "lora_only"}])
def test_a_stopped_run_resumes_to_equal_weights(base: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """To the bit, with the base read again."""
    spec = adapted(base, changes)
    _, undisturbed = train(tmp_path / "undisturbed", spec)
    stop(tmp_path / "run", spec)
    assert train(tmp_path / "run", spec)[1] == undisturbed


def test_a_random_base_is_made_again(tmp_path: Path) -> None:
    """A resumed run finds the random weights of its seed below the adapter, and ends with equal weights."""
    spec = spec_of({"config": LLAMA}, adapter={"kind": "lora"})
    _, undisturbed = train(tmp_path / "undisturbed", spec)
    stop(tmp_path / "run", spec)
    assert train(tmp_path / "run", spec)[1] == undisturbed


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    """A run resumes only above the weights that it began with, which the error tells by their SHA-256."""
    folder = tmp_path / "folder"
    shutil.copytree(base, folder)
    spec = adapted(folder)
    stop(tmp_path / "run", spec)
    change_a_bias(folder)
    with pytest.raises(CheckpointError, match=r"was trained beside other frozen weights: SHA-256 [0-9a-f]{64}, and"):
        train(tmp_path / "run", spec)


def change_a_bias(folder: Path) -> None:
    """Change a number in the weights of a pretrained GPT-2."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["transformer.h.0.mlp.c_proj.bias"][0] += 1.0
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def stop(directory: Path, spec: WorkloadSpec) -> None:
    """Train half of the updates, and end with a checkpoint."""
    found, request = recommendation(spec, 10, 4), TrainingRequest(updates=UPDATES, checkpoint_every=2)
    stopped = Trainer(build_run(found, request, RunPaths(directory), open_device("cpu")))
    made: list[int] = []
    outcome = stopped.run(lambda progress: made.append(progress.update), lambda: len(made) == UPDATES // 2)
    assert outcome is RunOutcome.STOPPED


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_checkpointed_activations_change_no_weight(tmp_path: Path, config: dict[str, Any]) -> None:
    """Gradients reach the adapter through blocks whose inputs need none, since the base is frozen."""
    spec = spec_of({"config": config}, adapter={"kind": "lora", "dropout": 0.1})
    train(tmp_path / "kept", spec)
    train(tmp_path / "recomputed", spec.model_copy(update={"activation_checkpointing": True}))
    kept = weights_of(tmp_path / "kept")
    for name, value in weights_of(tmp_path / "recomputed").items():
        assert torch.equal(value, kept[name]), name


def test_a_base_in_bf16_keeps_its_adapter_in_fp32(base: Path, tmp_path: Path) -> None:
    """As peft does; the matrices that are saved are in fp32 too."""
    trainer, _ = train(tmp_path, adapted(base, precision="bf16"))
    kinds = {parameter.dtype for parameter in trainer.model.parameters() if not parameter.requires_grad}
    assert kinds == {torch.bfloat16}
    assert {value.dtype for value in weights_of(tmp_path).values()} == {torch.float32}
    from peft import AutoPeftModelForCausalLM

    loaded = AutoPeftModelForCausalLM.from_pretrained(RunPaths(tmp_path).pretrained, dtype=torch.bfloat16)
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_ranks_train_an_adapter_of_a_classifier(base: Path, tmp_path: Path, precision: str, strategy: str) -> None:
    """Sharded or not, the adapter and the head equal those of one rank, and peft loads them."""
    for ranks in (1, 2):
        spec = spec_of(
            {"pretrained": str(base), "task": "sequence-classification", "config": {"num_labels": 3}},
            adapter=LORA,
            parallelism={"strategy": strategy, "world_size": ranks},
            precision=precision,
        )
        result = run_to_end(tmp_path / str(ranks), recommendation(spec, 10, 4), TrainingRequest(updates=UPDATES))
        assert result.outcome is RunOutcome.SUCCEEDED, result
    found = weights_of(tmp_path / "2")
    assert any("score.modules_to_save" in name for name in found)
    assert relative_distance(found, weights_of(tmp_path / "1")) < (1e-6 if precision == "fp32" else 1e-2)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, pad_token_id=0)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(model, RunPaths(tmp_path / "2").pretrained).state_dict()
    head = "base_model.model.score.modules_to_save.default.weight"
    assert torch.equal(loaded[head], found[head.removeprefix("base_model.model.")].float())


def test_the_config_is_that_of_peft(base: Path, tmp_path: Path) -> None:
    """Fields of the spec have peft's names in the file."""
    train(tmp_path, adapted(base, {"rank": 2, "alpha": 4, "dropout": 0.1, "init_lora_weights": "gaussian"}))
    config = json.loads((RunPaths(tmp_path).pretrained / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.1,
        "bias": "none",
        "init_lora_weights": "gaussian",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
    }
    assert config.items() >= expected.items()
    assert sorted(config["target_modules"]) == ["c_attn", "c_fc"]
