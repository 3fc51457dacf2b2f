"""Preference pairs beside TRL's `DPOTrainer`: equal tokens, losses, gradients and rewards."""

import copy
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from batchwright.schemas.workload import WorkloadSpec
from batchwright.workloads.base import IGNORED_LABEL
from batchwright.workloads.build import build_model, build_workload
from batchwright.workloads.causal.preference_pairs import PreferenceWorkload
from tests.support.factories import transformers_spec
from tests.support.sources import built
from tests.training.test_adapters import LLAMA

pytestmark = [pytest.mark.exports, pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

LENGTH, PAIRS = 40, 8
CONFIG = {**LLAMA, "vocab_size": 272, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
TARGETS = ["q_proj", "v_proj"]
ROWS = [
    {
        "prompt": f"Question {number}: what an ",
        "chosen": "answer the question " * (1 + number % 3) + "<eos>",
        "rejected": "other tan " * (1 + number % 4) + "<eos>",
    }
    for number in range(PAIRS)
]
"""Some of more than ``LENGTH`` tokens, and with a token of the last letter of the prompt and the first of an answer."""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkloadSpec:
    """A small Llama on the rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("Ġ", "a"), ("e", "r")]
    words = ["<pad>", "<eos>", *alphabet, *map("".join, merges)]
    made = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.add_special_tokens(["<pad>", "<eos>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {
        "kind": "records",
        "paths": [str(tmp_path / "rows.jsonl")],
        "tokenizer": str(tmp_path / "tokenizer.json"),
    }
    return transformers_spec(
        "causal-lm", CONFIG, batch={"sequence_length": LENGTH}, preference={"kind": "dpo"}, data=data
    )


def trainer_of(base: nn.Module, spec: WorkloadSpec, folder: Path) -> Any:
    """TRL's trainer of the spec, from the weights of a model."""
    trl, transformers, peft = (importlib.import_module(name) for name in ("trl", "transformers", "peft"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")),
        pad_token="<pad>",  # noqa: S106 - a token of text
        eos_token="<eos>",  # noqa: S106
    )
    assert spec.preference is not None
    arguments = trl.DPOConfig(
        output_dir=str(folder / "out"),
        beta=spec.preference.beta,
        loss_type=[spec.preference.loss],
        max_length=LENGTH,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        per_device_train_batch_size=PAIRS,
    )
    adapter = spec.adapter and peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    return trl.DPOTrainer(
        model=base,
        ref_model=None if adapter else copy.deepcopy(base),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tokenizer,
        peft_config=adapter,
    )


def moved_alike(ours: nn.Module, theirs: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The trained parameters of two models, after an equal step away from the reference."""
    named = {name.removeprefix("base_model.model."): value for name, value in theirs.named_parameters()}
    pairs = [(value, named[name]) for name, value in ours.named_parameters() if value.requires_grad]
    with torch.no_grad():
        for one, other in pairs:
            one.add_(torch.randn_like(one), alpha=0.05)
            other.copy_(one)
    return pairs


def assert_equal_tokens(batch: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """TRL has all chosen sequences first, and a mask of the completions."""
    assert torch.equal(batch["input_ids"].transpose(0, 1).flatten(0, 1), theirs["input_ids"])
    assert torch.equal(batch["labels"].transpose(0, 1).flatten(0, 1) != IGNORED_LABEL, theirs["completion_mask"].bool())


@pytest.mark.parametrize(("loss", "beta"), [("sigmoid", 0.1), ("sigmoid", 0.5), ("ipo", 0.1)])
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 4, "target_modules": TARGETS}])
def test_pairs_are_trained_as_by_trl(spec: WorkloadSpec, tmp_path: Path, adapter: Any, loss: str, beta: float) -> None:
    """Whole or by an adapter: a batch has TRL's loss, gradient, reward accuracy and margin."""
    changes = {"adapter": adapter, "preference": {"kind": "dpo", "loss": loss, "beta": beta}}
    spec = WorkloadSpec.model_validate({**spec.model_dump(), **changes})
    torch.manual_seed(0)
    workload = build_workload(spec)
    assert isinstance(workload, PreferenceWorkload)
    model = build_model(spec, workload)
    alone = spec.model_copy(update={"adapter": None, "preference": None})
    base = build_model(alone, build_workload(alone))
    state = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    base.load_state_dict({name: value for name, value in state.items() if ".lora_" not in name})

    trainer = trainer_of(base, spec, tmp_path)
    parameters = moved_alike(model, trainer.model)
    theirs = trainer.data_collator([trainer.train_dataset[index] for index in range(PAIRS)])
    expected = trainer.compute_loss(trainer.model.train(), theirs)
    expected.backward()
    batch = built(spec).batch(range(PAIRS))
    assert_equal_tokens(batch, theirs)
    scores = workload.score_rewards(model, batch)
    found = scores.terms["preference"][0] / PAIRS
    found.backward()  # type: ignore[no-untyped-call]

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
    largest = max(float(value.grad.abs().max()) for _, value in parameters if value.grad is not None)
    for one, other in parameters:
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5 * largest)
    margins = scores.rewards[:, 0] - scores.rewards[:, 1]
    figures = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert float((margins > 0).float().mean()) == pytest.approx(figures["rewards/accuracies"])
    assert float(margins.mean()) == pytest.approx(figures["rewards/margins"], rel=1e-4)
