"""The model that a run writes loads in transformers, and a run that starts from it is as exact as any other."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.requests import TrainingRequest
from batchwright.schemas.training import RunOutcome
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.training.assembly import build_run
from batchwright.training.launching.run_directory import RunPaths
from batchwright.training.trainer import Trainer
from batchwright.workloads.pretrained.folder_config import with_pretrained_config
from tests.support.factories import recommendation
from tests.support.faults import relative_distance
from tests.support.whole_runs import run_to_end, weights_of

pytestmark = pytest.mark.usefixtures("forked")

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "num_local_experts": 4,
}
UPDATES = 4


def spec_of(model: dict[str, Any], **changes: Any) -> WorkloadSpec:
    """A causal language model, on random bytes."""
    document = {
        "model": {"kind": "transformers", "task": "causal-lm", **model},
        "batch": {"sequence_length": 16},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "data": {"kind": "synthetic", "samples": 40},
        **changes,
    }
    return with_pretrained_config(parse_spec(document))


def train(directory: Path, spec: WorkloadSpec, micro_batch_size: int = 4) -> tuple[Trainer, str]:
    """Train to the end in this process, and write the model. Return the SHA-256 of its weights too."""
    request = TrainingRequest(updates=UPDATES, checkpoint_every=2)
    found = recommendation(spec, 10, micro_batch_size)
    trainer = Trainer(build_run(found, request, RunPaths(directory), open_device("cpu")))
    trainer.resume()
    assert trainer.run(lambda _: None) is RunOutcome.SUCCEEDED
    return trainer, trainer.save_weights()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained model."""
    directory = tmp_path_factory.mktemp("base")
    train(directory, spec_of({"config": GPT2}, ema_decay=0.5))
    return RunPaths(directory).pretrained


def test_transformers_loads_the_model_and_its_average(pretrained: Path) -> None:
    """The weights are those of the run's file, and the average is another model beside it."""
    run = RunPaths(pretrained.parent)
    for folder, path in ((run.pretrained, run.weights), (run.pretrained_average, run.average_weights)):
        loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values())
        tensors = safetensors.torch.load_file(path)
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in tensors.items())
        assert (folder / "model.safetensors").samefile(path)
    assert run.weights.read_bytes() != run.average_weights.read_bytes()


def test_names_of_published_checkpoints_are_written(tmp_path: Path) -> None:
    """A mixture of experts has other names in its published form: the run's own file keeps those of the parameters."""
    trainer, digest = train(tmp_path, spec_of({"config": MIXTRAL}))
    run = RunPaths(tmp_path)
    assert not (run.pretrained / "model.safetensors").samefile(run.weights)
    assert hashlib.sha256(run.weights.read_bytes()).hexdigest() == digest
    published = safetensors.torch.load_file(run.pretrained / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in published
    loaded = AutoModelForCausalLM.from_pretrained(run.pretrained).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_starts_from_pretrained_weights(pretrained: Path, tmp_path: Path, precision: str) -> None:
    """Before the first update, in the precision of the spec; the result names the folder and its digest."""
    spec = spec_of({"pretrained": str(pretrained)}, precision=precision)
    request = TrainingRequest(updates=UPDATES)
    parts = build_run(recommendation(spec, 10, 4), request, RunPaths(tmp_path), open_device("cpu"))
    expected = AutoModelForCausalLM.from_pretrained(pretrained).state_dict()
    own = parts.engine.model.state_dict()
    assert all(torch.equal(own[name], expected[name].to(own[name].dtype)) for name in own)
    assert [note for note in parts.notes if f"starts from the weights in {pretrained} (SHA-256 " in note]


def test_fine_tuning_is_exact(pretrained: Path, tmp_path: Path) -> None:
    """The weights are those of undivided batches, however the batch is divided."""
    spec = spec_of({"pretrained": str(pretrained)})
    for size in (10, 1, 3, 7):
        train(tmp_path / str(size), spec, size)
        assert relative_distance(weights_of(tmp_path / str(size)), weights_of(tmp_path / "10")) < 1e-6


def test_the_generation_config_is_that_of_the_pretrained_model(pretrained: Path, tmp_path: Path) -> None:
    """A chat model still stops at each of its end tokens, and samples as it was meant to."""
    base = shutil.copytree(pretrained, tmp_path / "base")
    GenerationConfig(eos_token_id=[0, 7], do_sample=True, temperature=0.6).save_pretrained(base)
    train(tmp_path / "run", spec_of({"pretrained": str(base)}))
    written = AutoModelForCausalLM.from_pretrained(RunPaths(tmp_path / "run").pretrained).generation_config
    assert (written.eos_token_id, written.do_sample, written.temperature) == ([0, 7], True, 0.6)


def test_the_tokenizer_of_a_spec_makes_the_tokens_of_the_run(pretrained: Path, tmp_path: Path) -> None:
    """Neither that of the pretrained model nor the class of the model's type replaces it."""
    base = shutil.copytree(pretrained, tmp_path / "base")
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = Tokenizer(models.BPE({"a": 1, "Ġ": 2, "Ġa": 3, "b": 4}, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    path = tmp_path / "own.json"
    tokenizer.save(str(path))
    (tmp_path / "rows.txt").write_text("a b\nb a\n" * 20)
    data = {"kind": "records", "paths": [str(tmp_path / "rows.txt")], "tokenizer": str(path)}
    train(tmp_path / "run", spec_of({"pretrained": str(base)}, data=data))
    written = AutoTokenizer.from_pretrained(RunPaths(tmp_path / "run").pretrained)
    assert written("a b a")["input_ids"] == tokenizer.encode("a b a").ids == [3, 2, 4, 3]


def test_the_model_card_has_the_plan_and_its_evidence(pretrained: Path, tmp_path: Path) -> None:
    """And the evaluations, but no path of this machine; the hub reads its front matter."""
    spec = spec_of({"pretrained": str(pretrained)}, evaluation={"fraction": 0.2, "metrics": ["perplexity"]})
    train(tmp_path, spec)
    card = ModelCard.load(RunPaths(tmp_path).pretrained / "README.md")
    assert (card.data.library_name, card.data.tags) == ("transformers", ["batchwright"])
    proof = recommendation(spec, 10, 4).evidence.proof.statement
    assert proof
    for text in (
        "| 4 + 3 + 3 |",
        "10 samples per update",
        proof,
        "| updates | 4 |",
        f"last, after update {UPDATES} | loss",
    ):
        assert text in card.text
    assert str(pretrained.parent) not in card.content
    assert "pretrained weights of a local folder" in card.text


def test_a_resumed_run_needs_no_folder(pretrained: Path, tmp_path: Path) -> None:
    """Checkpoints hold all weights: the folder may be gone, and the end is the same to the bit."""
    folder = tmp_path / "folder"
    shutil.copytree(pretrained, folder)
    spec = spec_of({"pretrained": str(folder)})
    _, undisturbed = train(tmp_path / "undisturbed", spec)
    found, request = recommendation(spec, 10, 4), TrainingRequest(updates=UPDATES, checkpoint_every=2)
    paths = RunPaths(tmp_path / "run")
    stopped = Trainer(build_run(found, request, paths, open_device("cpu")))
    made: list[int] = []
    outcome = stopped.run(lambda progress: made.append(progress.update), lambda: len(made) == UPDATES // 2)
    assert outcome is RunOutcome.STOPPED
    shutil.rmtree(folder)
    _, resumed = train(tmp_path / "run", spec)
    assert resumed == undisturbed


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_fine_tune_a_classifier(pretrained: Path, tmp_path: Path, strategy: str) -> None:
    """Both start from the same weights and the same random head, sharded or not, and one of them writes the model."""
    for ranks in (1, 2):
        spec = spec_of(
            {"pretrained": str(pretrained), "task": "sequence-classification", "config": {"num_labels": 3}},
            parallelism={"strategy": strategy, "world_size": ranks},
        )
        directory = tmp_path / str(ranks)
        result = run_to_end(directory, recommendation(spec, 10, 4), TrainingRequest(updates=UPDATES))
        assert result.outcome is RunOutcome.SUCCEEDED, result
        assert sum("`score.weight` of the model are not in" in note for note in result.notes) == 1
        model = AutoModelForSequenceClassification.from_pretrained(RunPaths(directory).pretrained)
        assert relative_distance(model.state_dict(), weights_of(tmp_path / "1")) < 1e-6
