"""Workloads: every kind builds, its losses are sums with their weights, and a wrong one says what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from batchwright.errors import SpecError, WorkloadError
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.workloads.base import WeighsLosses
from batchwright.workloads.build import build_model, build_workload, check_workload, summarize
from tests.support.factories import gpt_spec, mlp_spec, python_spec, resnet_spec, transformers_spec

SMALL_GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 256}
SMALL_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
SMALL_BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 256,
}
SMALL_T5: dict[str, Any] = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 256,
}
SMALL_VIT: dict[str, Any] = {
    "model_type": "vit",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 8,
}
SMALL_VIT |= {"image_size": 32, "patch_size": 8}
TEXT = {"batch": {"sequence_length": 12}}

SPECS: dict[str, WorkloadSpec] = {
    "mlp": mlp_spec(),
    "gpt": gpt_spec(),
    "resnet": resnet_spec(),
    "causal-lm": transformers_spec("causal-lm", SMALL_GPT2, **TEXT),
    "masked-lm": transformers_spec("masked-lm", SMALL_BERT, **TEXT),
    "seq2seq-lm": transformers_spec("seq2seq-lm", SMALL_T5, **TEXT),
    "sequence-classification": transformers_spec("sequence-classification", SMALL_GPT2, **TEXT),
    "token-classification": transformers_spec("token-classification", SMALL_BERT, **TEXT),
    "image-classification": transformers_spec("image-classification", SMALL_VIT),
}


@pytest.mark.parametrize("name", SPECS)
def test_loss_terms_are_sums_with_their_weight(name: str) -> None:
    """Twice the batch gives the sum of both halves' losses and weights, which no mean does."""
    torch.manual_seed(0)
    spec = SPECS[name]
    workload = build_workload(spec)
    model = build_model(spec, workload).eval()
    batch = workload.make_batch(4)
    halves = [{key: value[part] for key, value in batch.items()} for part in (slice(0, 1), slice(1, 4))]
    (whole, weight), *_ = workload.loss_terms(model, batch).values()
    parts = [next(iter(workload.loss_terms(model, half).values())) for half in halves]
    assert float(whole.detach()) == pytest.approx(sum(float(loss.detach()) for loss, _ in parts), rel=1e-4)
    assert weight == sum(float(part) for _, part in parts)


@pytest.mark.parametrize("name", SPECS)
def test_labels_are_smoothed_as_by_the_trainer_of_transformers(name: str) -> None:
    """The mean over the labels equals that of its `LabelSmoother`, ignored positions left out."""
    torch.manual_seed(0)
    smoothed, plain = (SPECS[name].model_copy(update={"label_smoothing": share}) for share in (0.2, 0.0))
    model = build_model(plain, build_workload(plain)).eval()
    batch = build_workload(plain).make_batch(3)
    logits = torch.empty(0)

    def record(_module: object, _arguments: object, output: Any) -> None:
        nonlocal logits
        logits = (output if isinstance(output, torch.Tensor) else output.logits).detach()

    model.register_forward_hook(record)
    ((loss_sum, weight),) = build_workload(smoothed).loss_terms(model, batch).values()
    shifts = name in {"gpt", "causal-lm"}
    expected = LabelSmoother(0.2)({"logits": logits}, batch["labels"], shift_labels=shifts)
    torch.testing.assert_close(loss_sum.detach() / weight, expected)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            lambda: parse_spec({"model": {"kind": "python", "target": "mine:build"}, "label_smoothing": 0.1}),
            "a `python` target has its own loss",
        ),
        (lambda: transformers_spec("ctc", {"model_type": "wav2vec2"}, label_smoothing=0.1), "ctc does not have"),
        (lambda: mlp_spec(label_smoothing=1.0), "label_smoothing"),
    ],
)
def test_labels_are_smoothed_only_in_a_cross_entropy(spec: Callable[[], WorkloadSpec], words: str) -> None:
    """Other losses do not take the field, and a share of all would leave no label."""
    with pytest.raises(SpecError, match=words):
        spec()


@pytest.mark.parametrize("name", ["masked-lm", "seq2seq-lm", "sequence-classification", "token-classification"])
def test_a_probe_of_an_encoder_has_a_mask_that_masks(name: str) -> None:
    """At least one position is masked, also for one sample: some attention implementations drop a mask of ones."""
    for size in (1, 3):
        batch = build_workload(SPECS[name]).make_batch(size)
        padded = batch["attention_mask"] == 0
        assert padded.any()
        assert padded.sum() == padded[:, -1].sum()
        if batch["labels"].dim() > 1:
            assert (batch["labels"][padded] == -100).all()


@pytest.mark.parametrize("name", ["gpt", "causal-lm"])
def test_a_probe_of_a_causal_model_has_no_mask(name: str) -> None:
    """A causal model does not attend to padding on the right."""
    assert set(build_workload(SPECS[name]).make_batch(2)) == {"input_ids", "labels"}


def test_a_padded_sample_has_the_loss_of_the_sample_alone() -> None:
    """The mask reaches the model, and masked positions do not change the loss."""
    spec = SPECS["masked-lm"]
    workload = build_workload(spec)
    model = build_model(spec, workload).eval()
    batch = workload.make_batch(1)
    alone = {name: value[:, :-1] for name, value in batch.items()}
    other = batch | {"input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, -1] = 5
    losses = [next(iter(workload.loss_terms(model, tensor).values()))[0].detach() for tensor in (batch, alone, other)]
    torch.testing.assert_close(losses[1:], [losses[0], losses[0]])


def test_a_model_that_takes_no_mask_gets_none() -> None:
    """FNet mixes all positions alike."""
    config = {"model_type": "fnet", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    spec = transformers_spec("masked-lm", config | {"vocab_size": 64}, **TEXT)
    workload = build_workload(spec)
    workload.loss_terms(build_model(spec, workload), workload.make_batch(2))


def test_a_text_of_one_token_is_not_all_padding() -> None:
    """A sample with only masked positions would have a loss of NaN."""
    spec = transformers_spec("masked-lm", SMALL_BERT, batch={"sequence_length": 1})
    assert build_workload(spec).make_batch(2)["attention_mask"].tolist() == [[1], [1]]


@pytest.mark.parametrize("name", SPECS)
def test_weights_without_a_forward_pass_agree(name: str) -> None:
    """`loss_weights` returns the weights of `loss_terms`."""
    spec = SPECS[name]
    workload = build_workload(spec)
    assert isinstance(workload, WeighsLosses)
    batch = workload.make_batch(3)
    terms = workload.loss_terms(build_model(spec, workload), batch)
    assert workload.loss_weights(batch) == {key: float(weight) for key, (_, weight) in terms.items()}


@pytest.mark.parametrize("name", SPECS)
def test_a_check_needs_no_memory_for_tensors(name: str) -> None:
    """All specs pass the check on the meta device."""
    check_workload(SPECS[name])


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "causal-lm"])
def test_activation_checkpointing_changes_no_gradient(name: str) -> None:
    """Recomputing activations gives the same gradient."""
    gradients = []
    for recompute in (False, True):
        spec = SPECS[name].model_copy(update={"activation_checkpointing": recompute})
        torch.manual_seed(0)
        workload = build_workload(spec)
        model = build_model(spec, workload)
        if name == "causal-lm":
            model.eval()  # no dropout
        (loss, _), *_ = workload.loss_terms(model, workload.make_batch(2)).values()
        torch.autograd.backward(loss)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_bf16_models_hold_bf16_parameters() -> None:
    """`bf16` means the parameters themselves, unlike the mixed precisions."""
    spec = mlp_spec(precision="bf16")
    model = build_model(spec, build_workload(spec))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "task", "field", "words"),
    [
        ({"model_type": "gpt9"}, "causal-lm", "model.config.model_type", "gpt2"),
        ({"model_type": "gpt2", "n_layers": 2}, "causal-lm", "model.config.n_layers", "n_layer"),
        ({"model_type": "gpt2", "n_layer": "two"}, "causal-lm", "model.config", "n_layer"),
        ({"model_type": "gpt2", "n_head": 7}, "causal-lm", "model.config", "divisible"),
        ({"model_type": "vit"}, "causal-lm", "model.task", "ViTConfig"),
        ({"model_type": "bert", "max_position_embeddings": 8}, "masked-lm", "(document)", "8"),
        ({**SMALL_BERT, "num_labels": 1}, "token-classification", "model.config.num_labels", "at least 2"),
        (
            {**SMALL_BERT, "attn_implementation": "somebody/attention"},
            "masked-lm",
            "model.config.attn_implementation",
            "one of eager, sdpa",
        ),
        (
            {**SMALL_BERT, "attn_implementation": "flash_attention_2"},
            "masked-lm",
            "model.config.attn_implementation",
            "sdpa",
        ),
    ],
)
def test_a_config_that_transformers_refuses_names_the_field(
    config: dict[str, Any], task: str, field: str, words: str
) -> None:
    """Unknown types, unknown fields (which transformers itself lets pass) and impossible sizes are spec errors."""
    with pytest.raises(SpecError) as caught:
        check_workload(transformers_spec(task, config, **TEXT))
    problem = caught.value.problems[0]
    assert problem.field == field
    assert words in problem.message


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_requested_attention_is_used(attention: str) -> None:
    """The implementation of attention determines the memory of long sequences."""
    spec = transformers_spec("masked-lm", {**SMALL_BERT, "attn_implementation": attention}, **TEXT)
    model: Any = build_model(spec, build_workload(spec))
    assert model.config._attn_implementation == attention


def test_the_longest_position_of_a_default_config_is_checked() -> None:
    """A sequence longer than the model's default positions would fail deep inside an embedding otherwise."""
    with pytest.raises(SpecError, match="1024"):
        check_workload(transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 2000}))


def test_a_model_without_a_longest_position_is_not_refused() -> None:
    """Xlnet states -1 positions, and takes any length."""
    config = {"model_type": "xlnet", "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 64}
    check_workload(transformers_spec("sequence-classification", config, **TEXT))


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's, in the working directory."""
    (tmp_path / "user_workloads.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Workload:\n"
        "    def __init__(self, width): self.width = width\n"
        "    def build_model(self): return nn.Linear(self.width, 1)\n"
        "    def make_batch(self, size): return torch.randn(size, self.width)\n"
        "    def loss_terms(self, model, batch): return {'l2': (model(batch).square().sum(), len(batch))}\n"
        "def build(width): return Workload(width)\n"
        "def half(): return object()\n"
        "def faulty(): return len(3)\n"
        "constant = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_workloads", raising=False)
    return "user_workloads"


def test_a_python_target_is_built_with_its_arguments(user_module: str) -> None:
    """The factory gets the spec's arguments by name."""
    spec = python_spec(f"{user_module}:build", width=5)
    assert summarize(build_model(spec, build_workload(spec))).parameters == 6


@pytest.mark.parametrize(
    ("name", "arguments", "field"),
    [("missing", {}, "model.target"), ("constant", {}, "model.target"), ("build", {"depth": 1}, "model.arguments")],
)
def test_a_wrong_target_is_a_spec_error(user_module: str, name: str, arguments: dict[str, Any], field: str) -> None:
    """A factory that is not there, is not callable or takes other arguments is named."""
    with pytest.raises(SpecError) as caught:
        build_workload(python_spec(f"{user_module}:{name}", **arguments))
    assert caught.value.problems[0].field == field


def test_a_fault_inside_a_factory_is_its_own(user_module: str) -> None:
    """A TypeError inside the user's code is raised with its traceback, not as an error about the arguments."""
    with pytest.raises(TypeError, match="has no len") as caught:
        build_workload(python_spec(f"{user_module}:faulty"))
    assert caught.traceback[-1].path.name == "user_workloads.py"  # type: ignore[union-attr]


def test_a_missing_module_is_a_spec_error() -> None:
    """The message names the folder that was searched."""
    with pytest.raises(SpecError, match="no module `nowhere`"):
        build_workload(python_spec("nowhere.at_all:build"))


def test_the_missing_methods_of_a_workload_are_named(user_module: str) -> None:
    """The contract is checked before any probe."""
    with pytest.raises(WorkloadError, match="build_model, make_batch, loss_terms"):
        build_workload(python_spec(f"{user_module}:half"))


def test_batch_norm_is_reported() -> None:
    """A summary names the modules that couple the samples of a micro-batch."""
    spec = resnet_spec()
    summary = summarize(build_model(spec, build_workload(spec)))
    assert summary.batch_coupled_modules[0] == "stem.1 (BatchNorm2d)"


class Frozen(nn.Sequential):
    """A network whose second BatchNorm stays in eval mode in training."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        self.train()

    def train(self, mode: bool = True) -> Frozen:  # noqa: FBT001, FBT002 - as torch defines it
        """Keep the second one."""
        super().train(mode)
        self[2].eval()
        return self


def _partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[2].eval()
    return model


class Given:
    """A workload of a model that is there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def build_model(self) -> nn.Module:
        """Return the model."""
        return self._model


class Kept(Given):
    """One of a caller who trains the model in its modes."""

    keeps_modes = True


@pytest.mark.parametrize(
    ("workload", "in_training", "coupled", "in_eval_mode"),
    [
        (Given(Frozen()), [True, True, True, False], 1, False),
        (Given(_partly_frozen()), [True, True, True, False], 1, False),
        (Given(_partly_frozen().eval()), [True] * 4, 2, False),
        (Kept(_partly_frozen()), [True, True, True, False], 1, False),
        (Kept(_partly_frozen().eval()), [False] * 4, 0, True),
        (Kept(nn.Sequential(nn.Linear(2, 2)).eval()), [False] * 2, 0, False),
    ],
)
def test_modules_keep_the_modes_that_training_has(
    workload: Any, in_training: list[bool], coupled: int, *, in_eval_mode: bool
) -> None:
    """A whole model in eval mode is as a hub loads it, and trained, unless the caller trains it in that mode."""
    model = build_model(python_spec("a:b"), workload)
    summary = summarize(model)
    assert [module.training for module in model.modules()] == in_training
    assert len(summary.batch_coupled_modules) == coupled
    assert summary.in_eval_mode is in_eval_mode


def test_tied_parameters_are_counted_once() -> None:
    """The GPT's embedding is its head as well."""
    spec = gpt_spec()
    model = build_model(spec, build_workload(spec))
    assert summarize(model).parameters == sum(
        tensor.numel() for tensor in {id(p): p for p in model.parameters()}.values()
    )


@pytest.mark.parametrize("length", [1, 2, 12])
def test_an_encoder_and_decoder_classifies_texts_with_one_end_each(length: int) -> None:
    """BART finds a text by its end-of-sequence token, and refuses texts of which some have more of them."""
    config = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 8}
    config |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    spec = transformers_spec("sequence-classification", config, batch={"sequence_length": length})
    workload = build_workload(spec)
    model = build_model(spec, workload)
    batch = workload.make_batch(16)
    assert ((batch["input_ids"] == 2).sum(1) == 1).all()
    assert torch.isfinite(workload.loss_terms(model, batch)["cross_entropy"][0])
