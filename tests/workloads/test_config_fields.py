"""Configurations of transformers models: no route out of the spec, no unknown field, no number without sense."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors, hf_hub_download

from batchwright.errors import SpecError
from batchwright.schemas.workload import parse_spec
from batchwright.workloads import config_safety
from batchwright.workloads.build import build_model, build_workload, check_workload
from batchwright.workloads.hugging_face import config_notes
from batchwright.workloads.preload import forbid_hub_kernels
from tests.support.factories import gpt_spec, transformers_spec

GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
BART: dict[str, Any] = {"model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
GEMMA3: dict[str, Any] = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 1}}
HUB = "somebody/kernels"

TEXT = {"batch": {"sequence_length": 12}}


def problem_of(config: dict[str, Any], task: str = "causal-lm") -> tuple[str, str]:
    """The invalid field, and the message about it."""
    with pytest.raises(SpecError) as caught:
        check_workload(transformers_spec(task, config, **TEXT))
    problem = caught.value.problems[0]
    return problem.field, problem.message


ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("attention of a hub", {"attn_implementation": HUB}, "attn_implementation"),
    ("attention of a hub, by part", {"attn_implementation": {"": HUB}}, "attn_implementation"),
    ("attention of a hub, past the public name", {"_attn_implementation": HUB}, "_attn_implementation"),
    ("the same, by part", {"_attn_implementation": {"": HUB, "text_config": HUB}}, "_attn_implementation"),
    ("the same, by its innermost name", {"_attn_implementation_internal": HUB}, "_attn_implementation_internal"),
    ("paged attention of a hub", {"attn_implementation": f"paged|{HUB}"}, "attn_implementation"),
    ("attention of a hub in one layer", {"per_layer_config": {"0": {"_attn_implementation": HUB}}}, "_attn"),
    ("the same by its public name", {"per_layer_config": {"0": {"attn_implementation": HUB}}}, "attn_implementation"),
    ("experts of a hub", {"experts_implementation": "sonicmoe"}, "experts_implementation"),
    ("the same, past the public name", {"_experts_implementation": "deepgemm"}, "_experts_implementation"),
    ("code of a hub", {"auto_map": {"AutoModelForCausalLM": "somebody/model--m.Model"}}, "auto_map"),
    ("code of a hub, trusted", {"trust_remote_code": True}, "trust_remote_code"),
    ("the name of a model", {"name_or_path": "somebody/model"}, "name_or_path"),
    ("the same, past the public name", {"_name_or_path": "/etc"}, "_name_or_path"),
    ("a pipeline of a hub", {"custom_pipelines": {"a": {"impl": "m.P"}}}, "custom_pipelines"),
    (
        "quantisation",
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "quantization_config",
    ),
    ("a backbone of a hub", {"backbone": "somebody/backbone"}, "backbone"),
    ("a backbone with weights", {"use_pretrained_backbone": True}, "use_pretrained_backbone"),
    ("a backbone of timm", {"use_timm_backbone": True}, "use_timm_backbone"),
    ("arguments for timm", {"backbone_kwargs": {"checkpoint_path": "/etc/passwd"}}, "backbone_kwargs"),
    ("kernels", {"use_kernels": True}, "use_kernels"),
    ("a file of weights", {"transformers_weights": "../other/model.safetensors"}, "transformers_weights"),
    ("modules that are fused while weights are loaded", {"fusion_config": {"patch_embeddings": True}}, "fusion_config"),
    ("another precision", {"dtype": "float16"}, "dtype"),
    ("the same by its old name", {"torch_dtype": "bfloat16"}, "torch_dtype"),
    ("a method", {"to_dict": 1}, "to_dict"),
    ("a method that is called while building", {"get_text_config": {}}, "get_text_config"),
    ("a read-only property", {"use_return_dict": False}, "use_return_dict"),
    ("the classes of inner configurations", {"sub_configs_defaults": {}}, "sub_configs_defaults"),
    ("other names of the fields", {"attribute_map": {"n_layer": "_attn_implementation"}}, "attribute_map"),
    ("a plan for tensor parallelism", {"base_model_tp_plan": {"*": "colwise"}}, "base_model_tp_plan"),
    ("another type", {"_auto_class": "AutoModel"}, "_auto_class"),
    ("files of a decision head", {"extra_files": ["head.safetensors"]}, "extra_files"),
    ("something deep within", {"task_specific_params": {"a": [{"auto_map": {"AutoModel": "x--y.Z"}}]}}, "auto_map"),
]


@pytest.mark.parametrize(("config", "field"), [route[1:] for route in ROUTES], ids=[route[0] for route in ROUTES])
def test_no_field_leads_out_of_the_spec(config: dict[str, Any], field: str) -> None:
    """Each field is refused by name before transformers reads it."""
    named, message = problem_of({**GPT2, **config})
    assert f"config.{field}" in named or f".{field}" in named
    assert any(words in message for words in ("leave it out", "must be one of", "backbone_config", "python"))


@pytest.mark.parametrize(("config", "field"), [route[1:] for route in ROUTES], ids=[route[0] for route in ROUTES])
def test_no_field_within_a_configuration_leads_out_of_the_spec(config: dict[str, Any], field: str) -> None:
    """Configurations of text, vision and sound within others are no way around."""
    named, _ = problem_of({"model_type": "gemma3", "text_config": {"num_hidden_layers": 1, **config}})
    assert named.startswith("model.config.text_config.")
    assert field in named


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:somebody/model"}}, "backbone"),
        ({"backbone_config": {"model_type": "timm_backbone", "backbone": "local-dir:/etc"}}, "backbone"),
        ({"backbone_config": {"model_type": "resnet", "_attn_implementation": HUB}}, "_attn_implementation"),
    ],
)
def test_no_backbone_leads_out_of_the_spec(config: dict[str, Any], field: str) -> None:
    """Nor does a backbone's configuration."""
    named, _ = problem_of({"model_type": "dpt", **config}, task="image-classification")
    assert named == f"model.config.backbone_config.{field}"


@pytest.mark.parametrize("architecture", ["hf-hub:somebody/model", "hf_hub:somebody/model", "local-dir:/etc", "a/b"])
def test_timm_gets_the_plain_name_of_a_model(architecture: str) -> None:
    """Timm reads other names from a hub or from a folder."""
    config = {"model_type": "timm_wrapper", "architecture": architecture}
    assert problem_of(config, task="image-classification")[0] == "model.config.architecture"


def test_fields_that_the_spec_did_not_set_are_checked_too() -> None:
    """A built configuration that refers to code or files, from any field, is refused."""
    spec = transformers_spec("causal-lm", GPT2, **TEXT)
    workload: Any = build_workload(spec)
    workload.config._attn_implementation = HUB
    with pytest.raises(SpecError, match="attn_implementation"):
        config_safety.check_config(workload.config)
    workload.config._attn_implementation = None
    workload.config.auto_map = {"AutoModelForCausalLM": "somebody/model--m.Model"}
    with pytest.raises(SpecError, match="auto_map"):
        config_safety.check_config(workload.config)


def test_a_built_model_is_checked_too() -> None:
    """A part of it that points elsewhere is found where it is."""
    spec = transformers_spec("causal-lm", GPT2, **TEXT)
    model: Any = build_model(spec, build_workload(spec))
    model.transformer.h[0].config = type(model.config)(**{**GPT2, "attn_implementation": HUB})
    with pytest.raises(SpecError, match="attn_implementation"):
        config_safety.check_model(model)


def test_nothing_is_fetched_while_a_model_is_built() -> None:
    """The hub's own client refuses, so that a route that nobody has thought of ends in an error."""
    with config_safety.offline(), pytest.raises((errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        hf_hub_download("somebody/model", "config.json")


_SPY = """
import json, sys
CALLS = {calls!r}
def get_kernel(*arguments, **more):
    open(CALLS, "a").write(json.dumps([str(argument) for argument in arguments]) + "\\n")
    raise FileNotFoundError("nothing is fetched in a test")
class _Any:
    def __init__(self, *a, **k): pass
    def __call__(self, *a, **k): return self
    def __getattr__(self, name): return _Any()
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    return _Any
"""
_MAMBA = """
from tests.support.factories import transformers_spec
from batchwright.workloads.build import build_model, build_workload
config = dict(model_type="mamba", hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=64)
spec = transformers_spec("causal-lm", config, batch=dict(sequence_length=8))
workload = build_workload(spec)
from transformers.utils import is_kernels_available
assert is_kernels_available(), "the spy was not taken for the package"
workload.loss_terms(build_model(spec, workload), workload.make_batch(2))
"""


def test_kernels_of_a_hub_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that transformers reads is set, unless the user has set it."""
    for given, expected in ((None, "0"), ("1", "1")):
        monkeypatch.delenv("USE_HUB_KERNELS", raising=False)
        if given is not None:
            monkeypatch.setenv("USE_HUB_KERNELS", given)
        forbid_hub_kernels()
        assert os.environ["USE_HUB_KERNELS"] == expected


@pytest.mark.thorough
def test_a_model_that_fetches_its_kernels_does_not(tmp_path: Path) -> None:
    """Mamba asks a hub for kernels where the package `kernels` is installed, which runs what it finds there."""
    calls = tmp_path / "calls"
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(_SPY.format(calls=str(calls)))
    (tmp_path / "kernels-0.18.2.dist-info").mkdir()
    (tmp_path / "kernels-0.18.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "USE_HUB_KERNELS"}
    done = subprocess.run(
        [sys.executable, "-c", _MAMBA],
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not calls.exists(), calls.read_text()


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "field", "near"),
    [
        ({**GPT2, "n_layers": 2}, "n_layers", "did you mean n_layer"),
        ({**GPT2, "hidden_sise": 2}, "hidden_sise", "did you mean hidden_size"),
        ({**GPT2, "vocabsize": 2}, "vocabsize", "did you mean vocab_size"),
        (
            {"model_type": "gemma3", "text_config": {"hiden_size": 8}},
            "text_config.hiden_size",
            "did you mean hidden_size",
        ),
        ({**GPT2, "attn_implementation": "sdp"}, "attn_implementation", "eager, sdpa, flex_attention"),
        ({"model_type": "gpt-2"}, "model_type", "did you mean gpt2"),
        ({"model_type": "Llama"}, "model_type", "did you mean llama"),
    ],
)
def test_a_name_that_is_not_there_has_near_ones(config: dict[str, Any], field: str, near: str) -> None:
    """A misspelt field is refused at every depth, though transformers would ignore it."""
    named, message = problem_of(config)
    assert named == f"model.config.{field}"
    assert near in message


@pytest.mark.parametrize(
    "config",
    [
        {**GPT2, "num_hidden_layers": 1, "hidden_size": 16},
        {**GPT2, "attn_implementation": {"": "eager"}},
        {**GPT2, "_name_or_path": "", "torch_dtype": "float32", "quantization_config": None, "architectures": ["G"]},
        {**GPT2, "output_attentions": False, "num_labels": 3, "transformers_version": "5.0.0", "use_cache": True},
        {**GPT2, "summary_type": "cls_index", "pad_token_id": -1, "reorder_and_upcast_attn": True},
    ],
)
def test_a_configuration_as_transformers_writes_it_is_taken(config: dict[str, Any]) -> None:
    """Aliases of a field, empty private fields, and fields without effect are accepted."""
    check_workload(transformers_spec("causal-lm", config, **TEXT))


DEBERTA: dict[str, Any] = {"model_type": "deberta-v2", "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
DEBERTA |= {"num_hidden_layers": 1, "intermediate_size": 16, "relative_attention": True, "pos_att_type": "p2c|c2p"}
NEOX: dict[str, Any] = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64}
NEOX |= {"num_hidden_layers": 1, "intermediate_size": 16}


def test_a_field_that_no_class_declares_is_accepted_with_a_note() -> None:
    """DeBERTa-v2's code reads `position_buckets`, and nothing reads `style`: which is which cannot be known."""
    spec = transformers_spec("masked-lm", {**DEBERTA, "position_buckets": 256, "style": "old", "unused": None}, **TEXT)
    check_workload(spec)
    workload: Any = build_workload(spec)
    assert workload.config.position_buckets == 256
    (note,) = config_notes(spec)
    assert note.startswith("transformers does not declare `config.position_buckets`, `config.style`. Unless")


def test_fields_that_the_class_declares_or_converts_need_no_note() -> None:
    """Pythia's `rotary_pct` is converted, and other kinds of models have no fields."""
    assert config_notes(transformers_spec("causal-lm", {**NEOX, "rotary_pct": 0.5}, **TEXT)) == ()
    assert config_notes(gpt_spec()) == ()


def test_a_field_that_only_the_configurations_code_reads_is_taken() -> None:
    """Pythia is published with `rotary_pct`, which GPT-NeoX's class converts."""
    workload: Any = build_workload(transformers_spec("causal-lm", {**NEOX, "rotary_pct": 0.5}, **TEXT))
    assert workload.config.rope_parameters["partial_rotary_factor"] == 0.5


def test_a_type_with_several_models_for_a_task_has_a_first() -> None:
    """DeiT comes with one head and with two; a configuration without `architectures` means the first."""
    small = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "deit", "intermediate_size": 16, **small}
    names = {}
    for given in ({}, {"architectures": ["DeiTForImageClassificationWithTeacher"]}):
        spec = transformers_spec("image-classification", {**config, **given})
        names[len(given)] = type(build_model(spec, build_workload(spec))).__name__
    assert names == {0: "DeiTForImageClassification", 1: "DeiTForImageClassificationWithTeacher"}


def test_recomputation_is_decided_by_the_spec() -> None:
    """A false value of published configurations is accepted; true is refused in favour of the spec's own field."""
    off = transformers_spec("causal-lm", {**GPT2, "gradient_checkpointing": False}, **TEXT)
    check_workload(off)
    named, message = problem_of({**GPT2, "gradient_checkpointing": True})
    assert named == "model.config.gradient_checkpointing"
    assert "activation_checkpointing" in message


# --- numbers ---------------------------------------------------------------------------------------------------------


LAYERS = [
    (GPT2, "causal-lm", "n_layer"),
    (GPT2, "causal-lm", "num_hidden_layers"),
    (BART, "seq2seq-lm", "encoder_layers"),
    (BART, "seq2seq-lm", "decoder_layers"),
    ({"model_type": "vit"}, "image-classification", "num_hidden_layers"),
    (GEMMA3, "causal-lm", "text_config.num_hidden_layers"),
]
SIZES = [
    (GPT2, "causal-lm", "n_embd"),
    (GPT2, "causal-lm", "n_head"),
    (GPT2, "causal-lm", "vocab_size"),
    (BART, "seq2seq-lm", "decoder_ffn_dim"),
    ({"model_type": "vit"}, "image-classification", "patch_size"),
]


@pytest.mark.parametrize(
    ("config", "task", "field", "value"),
    [
        *((*case, value) for case in (*LAYERS, *SIZES) for value in (-1, -(2**40), 2**31, 10**30)),
        *((*case, 0) for case in LAYERS),
    ],
)
def test_a_size_without_sense_is_refused_by_name(config: dict[str, Any], task: str, field: str, value: int) -> None:
    """Of -1 layers transformers would build a model without layers, which always fits."""
    *parents, name = field.split(".")
    asked: dict[str, Any] = {**config, **{parent: {**config[parent], name: value} for parent in parents}}
    named, message = problem_of(asked if parents else {**config, name: value}, task)
    assert named == f"model.config.{field}"
    assert "must be at" in message


@pytest.mark.parametrize(
    ("config", "task", "field", "value"),
    [*((*case, 0) for case in SIZES), (GPT2, "causal-lm", "n_inner", 0), (GPT2, "causal-lm", "n_inner", -1)],
)
def test_a_size_that_leaves_nothing_to_train_is_refused(
    config: dict[str, Any], task: str, field: str, value: int
) -> None:
    """The model would have an empty parameter, or cannot be built."""
    named, message = problem_of({**config, field: value}, task)
    assert named == "model.config"
    assert "describes an invalid model" in message or "describes a model that cannot be built" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_layer", 10_001), ("num_labels", 1_000_001), ("n_positions", -1), ("n_ctx", -5)],
)
def test_a_number_beyond_its_bounds_is_refused_by_name(field: str, value: int) -> None:
    """A configuration stores a name for every label: a billion names would use up the host's memory."""
    if field == "n_ctx":
        field, config = "attention_window", {"model_type": "longformer", "attention_window": [-4]}
        assert problem_of(config, "masked-lm")[0] == "model.config.attention_window"
    else:
        assert problem_of({**GPT2, field: value})[0] == f"model.config.{field}"


def test_a_model_that_cannot_be_built_is_no_traceback() -> None:
    """Each size alone is valid, but their product exceeds any tensor."""
    named, message = problem_of({**GPT2, "n_embd": 2**31 - 1, "n_head": 1})
    assert named == "model.config"
    assert "cannot be built" in message


def test_a_model_with_an_empty_parameter_is_refused() -> None:
    """The parameter is named, for any field that caused it."""
    model: Any = torch.nn.Linear(2, 2)
    model.empty = torch.nn.Parameter(torch.empty(0, 4))
    with pytest.raises(SpecError, match=r"`empty` is empty \(0x4\)"):
        config_safety.check_model(model)


@pytest.mark.parametrize("value", [0, -1, 10**12])
@pytest.mark.parametrize("field", ["layers", "heads", "width", "vocabulary_size"])
def test_a_reference_model_has_bounds_too(field: str, value: int) -> None:
    """The field is named before a model is built."""
    architecture = {"name": "gpt", "layers": 1, "heads": 1, "width": 8, "vocabulary_size": 16, field: value}
    with pytest.raises(SpecError) as caught:
        parse_spec({"model": {"kind": "reference", "architecture": architecture}, "batch": {"sequence_length": 8}})
    assert caught.value.problems[0].field == f"model.architecture.{field}"


def test_a_reference_model_that_cannot_be_built_is_no_traceback() -> None:
    """The error is a SpecError, as for transformers."""
    architecture = {"name": "gpt", "layers": 1, "heads": 1, "width": 2**31 - 1, "vocabulary_size": 16}
    with pytest.raises(SpecError, match="cannot be built"):
        check_workload(gpt_spec(model={"kind": "reference", "architecture": architecture}))
