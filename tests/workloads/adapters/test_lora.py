"""An adapter of a spec: what is trained, which names are refused, and what a fingerprint holds."""

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from batchwright.errors import SpecError
from batchwright.planning.fingerprint import memory_part, relevant_versions
from batchwright.schemas.workload import WorkloadSpec, parse_spec
from batchwright.workloads.build import build_model, build_workload, check_workload, summarize
from batchwright.workloads.preload import late_imports
from tests.support.factories import CPU, mlp_spec, transformers_spec

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def adapted(task: str = "causal-lm", config: dict[str, Any] | None = None, **adapter: Any) -> WorkloadSpec:
    """A spec with an adapter of a small GPT-2."""
    changes = {"batch": {"sequence_length": 16}, "adapter": {"kind": "lora", **adapter}}
    return transformers_spec(task, {**GPT2, **(config or {})}, **changes)


def built(spec: WorkloadSpec) -> torch.nn.Module:
    """The model of a spec."""
    return build_model(spec, build_workload(spec))


def trained(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of what is trained."""
    return {name: tuple(value.shape) for name, value in model.named_parameters() if value.requires_grad}


def scales(model: torch.nn.Module) -> list[float]:
    """The factors of the updates, one for each module that is adapted."""
    from peft.tuners.lora import LoraLayer

    return [module.scaling["default"] for module in model.modules() if isinstance(module, LoraLayer)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize(
    ("fields", "own"),
    [
        ({}, {}),
        ({"rank": 3, "alpha": 6.5, "dropout": 0.2}, {"r": 3, "lora_alpha": 6.5, "lora_dropout": 0.2}),
        ({"target_modules": "all-linear"}, {"target_modules": "all-linear"}),
        ({"target_modules": ["h.0.mlp.c_fc", "wte"]}, {"target_modules": ["h.0.mlp.c_fc", "wte"]}),
        ({"modules_to_save": ["ln_f"], "bias": "lora_only"}, {"modules_to_save": ["ln_f"], "bias": "lora_only"}),
        ({"bias": "all", "use_rslora": True}, {"bias": "all", "use_rslora": True}),
    ],
)
def test_an_adapter_trains_what_peft_trains(fields: dict[str, Any], own: dict[str, Any]) -> None:
    """Names, shapes, and the scale of the update are those of ``get_peft_model``."""
    import peft

    model = built(adapted(**fields))
    config = peft.LoraConfig(task_type="CAUSAL_LM", **own)
    expected = peft.get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2)), config)
    assert trained(model) == {
        name.removeprefix("base_model.model."): shape for name, shape in trained(expected).items()
    }
    assert scales(model) == scales(expected)
    assert summarize(model).trainable_parameters < summarize(model).parameters


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
def test_the_head_of_a_classifier_is_trained() -> None:
    """As peft does for the task, since a new head starts from random values."""
    import peft

    labels = {"num_labels": 3}
    model = built(adapted("sequence-classification", labels))
    network = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**GPT2, **labels))
    expected = peft.get_peft_model(network, peft.LoraConfig(task_type="SEQ_CLS"))
    assert "score.modules_to_save.default.weight" in trained(model)
    assert {f"base_model.model.{name}" for name in trained(model)} == set(trained(expected))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["c_atn"]}, r"target_modules: fits no module of GPT2LMHeadModel; did you mean `c_attn`\?"),
        ({"target_modules": ["c_attn", "q_proj"]}, r"can be adapted: `c_attn`, `c_fc`.*\(got q_proj\)"),
        ({"target_modules": ["ln_1"]}, r"target_modules: cannot be adapted: Target module LayerNorm.* is not supp"),
        ({"modules_to_save": ["ln_x"]}, r"modules_to_save: fits no module of .*; did you mean `ln_f`\? Its modules: "),
    ],
)
def test_names_that_fit_no_module_are_refused(fields: dict[str, Any], message: str) -> None:
    """Before the first probe, with the names that there are."""
    with pytest.raises(SpecError, match=message):
        check_workload(adapted(**fields))


QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}
"""Experts that are one parameter, beside a shared expert of linear layers."""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["q_proj", "down_proj"]}, r"target_modules: also names experts of .*\(got down_proj\)"),
        ({"quantization": {"kind": "nf4"}}, r"quantization: cannot quantise \d\d% of the weights: Qwen2Moe.*"),
        ({"quantization": {"kind": "int8"}}, r"stacks such as `model\.layers\.0\.mlp\.experts\.gate_up_proj`"),
    ],
)
def test_experts_are_not_left_out_silently(fields: dict[str, Any], message: str) -> None:
    """What reaches linear layers alone is refused with the parameter that it misses."""
    with pytest.raises(SpecError, match=message):
        check_workload(adapted(config=QWEN2_MOE, **fields))


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern")  # of peft, although it has used the patterns
def test_experts_that_are_adapted_are_no_problem() -> None:
    """Peft adapts the experts of Mixtral, whatever the name of their parameter."""
    config = {**QWEN2_MOE, "model_type": "mixtral", "num_local_experts": 4}
    model = built(adapted(config=config, target_modules="all-linear"))
    assert any(".mlp.experts.lora_A" in name for name in trained(model))


def test_a_model_without_default_targets_needs_them() -> None:
    """The error names the field, and what can be adapted."""
    config = {
        "model_type": "fnet",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "vocab_size": 64,
    }
    spec = transformers_spec("masked-lm", config, batch={"sequence_length": 16}, adapter={"kind": "lora"})
    with pytest.raises(SpecError, match=r"adapter\.target_modules: is required: peft knows no default for this type"):
        check_workload(spec)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 8}, r"adapter\.r: is not a field here; did you mean `rank`\?"),
        ({"lora_alpha": 8}, r"adapter\.lora_alpha: is not a field here; did you mean `alpha`\?"),
        ({"lora_dropout": 0.1}, r"adapter\.lora_dropout: is not a field here; did you mean `dropout`\?"),
        ({"load_in_8bit": True}, r"adapter\.load_in_8bit: is not a field here; a frozen base in 4 bits is `adapter: "),
        ({"quantization": {"kind": "int4"}}, r"adapter\.quantization\.kind: must be one of 'nf4', 'fp4', 'int8'"),
        (
            {"quantization": {"kind": "int8", "double_quantization": True}},
            r"`double_quantization` is for `nf4` and `fp4`: `int8` has few scales",
        ),
        ({"quantization": {"kind": "int8", "llm_int8_threshold": 6.0}}, r"inputs are not quantised, so they have"),
        ({"target_modules": "linear"}, r"adapter\.target_modules: must be `all-linear` or a list .* \(got 'linear'\)"),
        ({"rank": 0}, r"adapter\.rank: must be at least 1 \(got 0\)"),
        ({"dropout": 1.0}, r"adapter\.dropout: must be below 1"),
        ({"kind": "lorra"}, r"adapter\.kind: must be 'lora'; did you mean 'lora'\?"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    """With the field's name here, for the names that peft has."""
    with pytest.raises(SpecError, match=message):
        adapted(**fields)


@pytest.mark.parametrize("place", [(), ("model",)], ids=["spec", "model"])
@pytest.mark.parametrize("field", ["quantization", "quantization_config", "load_in_4bit"])
def test_a_quantised_base_is_refused_with_words(place: tuple[str, ...], field: str) -> None:
    """Wherever it is named, with what can be had instead."""
    document = adapted().model_dump(mode="json")
    inner = document
    for part in place:
        inner = inner[part]
    inner[field] = {"bits": 4}
    with pytest.raises(SpecError, match=rf"{'.'.join((*place, field))}: is not a field here; a frozen base in"):
        parse_spec(document)


def test_only_transformers_models_have_adapters() -> None:
    """The error says what to do for a model of one's own."""
    with pytest.raises(SpecError, match=r"`adapter` is for `transformers` models, and this one is `reference`"):
        mlp_spec(adapter={"kind": "lora"})


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that has it."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SpecError, match=r"adapter: needs the package `peft`.*pip install 'batchwright\[peft\]'"):
        check_workload(adapted())


def test_a_fingerprint_holds_the_adapter() -> None:
    """As far as memory depends on it, with the version of peft."""
    part = memory_part(adapted())
    changing: list[dict[str, Any]] = [{"rank": 4}, {"dropout": 0.1}, {"target_modules": ["c_fc"]}, {"bias": "all"}]
    assert all(memory_part(adapted(**change)) != part for change in changing)
    scaling: list[dict[str, Any]] = [{"alpha": 4}, {"use_rslora": True}, {"init_lora_weights": "gaussian"}]
    assert all(memory_part(adapted(**change)) == part for change in scaling)
    versions = {"torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2"}
    assert relevant_versions(adapted(), CPU, versions) == versions
    plain = transformers_spec("causal-lm", GPT2, batch={"sequence_length": 16})
    assert "peft" not in relevant_versions(plain, CPU, versions)


def test_peft_is_imported_before_memory_is_measured() -> None:
    """For a spec with an adapter alone."""
    assert "peft" in late_imports(adapted())
    assert "peft" not in late_imports(transformers_spec("causal-lm", GPT2, batch={"sequence_length": 16}))
