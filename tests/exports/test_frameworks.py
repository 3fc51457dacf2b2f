"""Exports to frameworks: the translation of a spec, and the warnings. Pure."""

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from batchwright.errors import ExportError
from batchwright.exports.base import Export, ExportOptions
from batchwright.exports.registry import TARGETS, export
from batchwright.schemas.dataset.preference_spec import PreferenceSpec
from batchwright.schemas.workload import WorkloadSpec
from tests.support.exports.plans import plan
from tests.support.factories import CPU, CUDA, gpt_spec, mlp_spec, python_spec, resnet_spec, transformers_spec

SCHEMAS = Path(__file__).parent / "schemas"
FRAMEWORKS = ("pytorch", "hugging-face", "accelerate", "lightning", "deepspeed")


def made(  # noqa: PLR0913 - what the cases vary
    name: str,
    spec: WorkloadSpec | None = None,
    *,
    batch: int = 16,
    ranks: int = 1,
    version: str | None = None,
    cpu: bool = False,
    **options: Any,
) -> Export:
    """The export of a plan with micro-batches of at most 8."""
    recommended = plan(batch, ranks, spec=spec, device=CPU if cpu else CUDA)
    return export(recommended, name, version=version, options=ExportOptions(**options))


def read(given: Export) -> Any:
    """The first file, parsed."""
    return yaml.safe_load(given.files[0].content)


def warned(given: Export) -> dict[str, str]:
    """Messages by their codes."""
    return {warning.code: warning.message for warning in given.warnings}


# --- all of them ---


@pytest.mark.parametrize("name", ["accelerate", "lightning", "deepspeed"])
def test_a_schedule_of_the_program_is_warned_about(name: str) -> None:
    """With its shape and its warm-up; a constant rate needs no word."""
    scheduled = gpt_spec(schedule={"name": "cosine", "warmup_updates": 10})

    assert "`cosine` after 10 updates" in warned(made(name, scheduled))["schedule-in-code"]
    assert "schedule-in-code" not in warned(made(name, gpt_spec()))
    assert ("schedule-steps-per-rank" in warned(made(name, scheduled, ranks=2))) is (name == "accelerate")


@pytest.mark.parametrize("name", ["hugging-face", "llama-factory"])
def test_the_start_of_ranks_is_described(name: str) -> None:
    """The file does not hold their number, and with another one the effective batch is another."""
    assert "start exactly 4" in warned(made(name, ranks=4))["world-size"]


def test_ranks_of_several_machines_are_started_on_each() -> None:
    """As many as a machine has devices, not all of them on one."""
    message = warned(made("hugging-face", ranks=8, processes_per_node=4))["world-size"]

    assert "--nnodes=2 --nproc-per-node=4" in message
    assert "each of 2 machines" in message


@pytest.mark.parametrize(("name", "file"), [("accelerate", "launch.sh"), ("megatron", "megatron_arguments.sh")])
def test_scripts_unset_variables_that_the_probes_did_not_have(name: str, file: str) -> None:
    """A setting of the allocator that is left over in the shell; on the CPU there is none."""
    (script,) = (item.content for item in made(name).files if item.name == file)
    (on_cpu,) = (item.content for item in made(name, cpu=True).files if item.name == file)

    assert "unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF\n" in script
    assert "unset" not in on_cpu


@pytest.mark.parametrize("name", FRAMEWORKS[1:])
@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        (gpt_spec(), True),
        (python_spec("mine:build"), True),
        (mlp_spec(), False),
        (transformers_spec("image-classification", {"model_type": "vit"}), False),
    ],
)
def test_token_weighting_is_warned_about_where_tokens_may_count(name: str, spec: WorkloadSpec, counts: bool) -> None:  # noqa: FBT001 - a case's expectation
    """A loss over whole samples is weighed rightly by all of them."""
    assert ("token-weighting" in warned(made(name, spec))) is counts


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_longest_sample_is_warned_about(name: str) -> None:
    """Longer ones were not measured."""
    assert "16 tokens" in warned(made(name))["longest-sample"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_average_of_weights_is_kept_or_warned_about(name: str) -> None:
    """Our script keeps it; the others' is the user's."""
    given = made(name, gpt_spec(ema_decay=0.99))

    assert ("1 - 0.99)" in given.files[0].content) is (name == "pytorch")
    assert ("moving-average" in warned(given)) is (name != "pytorch")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_optimizer_of_the_workload_is_warned_about(name: str) -> None:
    """Only a `python` workload may have one."""
    assert (
        "mine:build has a `build_optimizer`"
        in warned(made(name, python_spec("mine:build")))["optimizer-of-the-workload"]
    )
    assert "optimizer-of-the-workload" not in warned(made(name))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_evaluation_is_warned_about(name: str) -> None:
    """No export holds samples out."""
    assert "hold samples out" in warned(made(name, gpt_spec(evaluation={"count": 5})))["evaluation"]
    assert "evaluation" not in warned(made(name))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_smoothed_labels_are_written_or_warned_about(name: str) -> None:
    """The Trainer has an argument for them, our script the call, and other programs their own loss."""
    given = made(name, gpt_spec(label_smoothing=0.1))
    is_written = name in {"hugging-face", "pytorch"}
    assert ("label_smoothing" in given.files[0].content) is is_written
    assert ("label-smoothing" in warned(given)) is not is_written


@pytest.mark.parametrize("name", ["accelerate", "lightning", "deepspeed", "pytorch"])
def test_activation_checkpointing_of_the_model_is_warned_about(name: str) -> None:
    """Without it the micro-batch would not fit."""
    spec = gpt_spec(activation_checkpointing=True)

    assert "activation-checkpointing-in-code" in warned(made(name, spec))
    assert "activation-checkpointing-in-code" not in warned(made(name))


@pytest.mark.parametrize("name", ["hugging-face", "accelerate", "lightning", "deepspeed"])
def test_more_steps_for_one_size_are_warned_about(name: str) -> None:
    """20 samples in micro-batches of at most 8 are 7, 7, 6; of one size, four of 5."""
    given = made(name, batch=20)

    assert (given.plan.micro_batch_size, given.plan.gradient_accumulation_steps) == (5, 4)
    assert warned(given)["more-steps"].startswith("4 accumulation steps instead of 3")


def test_another_effective_batch_must_be_allowed_and_is_warned_about() -> None:
    """21 samples on two ranks: the refusal names what can be reached, and the export by how much it differs."""
    with pytest.raises(ExportError, match="allow_inexact") as refused:
        made("hugging-face", batch=21, ranks=2)
    given = made("hugging-face", batch=21, ranks=2, allow_inexact=True)

    assert refused.value.reason == "inexact"
    assert not given.plan.exact
    difference = f"({given.plan.effective_batch_size - 21:+d})"
    assert difference in warned(given)["effective-batch-changed"]


def test_processes_per_node_must_divide_the_ranks() -> None:
    """Else a node would have fewer."""
    with pytest.raises(ExportError, match="nodes of 3: `processes_per_node` must divide 8: use one of 1, 2, 4, 8"):
        made("lightning", ranks=8, processes_per_node=3)


@pytest.mark.parametrize("name", ["hugging-face", "deepspeed"])
def test_a_default_learning_rate_is_warned_about(name: str) -> None:
    """It takes the place of the framework's own default."""
    chosen = gpt_spec(optimizer={"learning_rate": 3e-4})

    assert "0.001" in warned(made(name))["default-learning-rate"]
    assert "default-learning-rate" not in warned(made(name, chosen))


# --- Hugging Face ---


@pytest.mark.parametrize("version", ["5.0", "4.57"])
def test_arguments_of_earlier_transformers_are_those_of_their_sources(version: str) -> None:
    """Names, types and allowed values, whatever the spec."""
    schema = json.loads((SCHEMAS / f"hugging-face-{version}.json").read_text("utf-8"))
    validator = jsonschema_rs.Draft202012Validator(schema)
    optimizers = [{"name": "adamw", "implementation": "fused"}, {"name": "sgd", "momentum": 0.9}, {"name": "sgd"}]
    for precision, optimizer, flag in itertools.product(("fp32", "bf16-mixed", "bf16"), optimizers, (False, True)):
        spec = gpt_spec(precision=precision, optimizer=optimizer, activation_checkpointing=flag, compile=flag)
        given = made("hugging-face", spec, version=version, cpu=flag)
        assert [str(error) for error in validator.iter_errors(read(given))] == []


def test_no_clipping_is_written() -> None:
    """The library's own default clips at 1.0."""
    assert read(made("hugging-face"))["max_grad_norm"] == 0.0
    assert read(made("hugging-face", gpt_spec(gradient_clipping=0.5)))["max_grad_norm"] == 0.5


def test_checkpointing_has_the_name_and_the_kind_that_was_measured() -> None:
    """It was renamed; before that it was reentrant unless told otherwise."""
    spec = gpt_spec(activation_checkpointing=True)

    assert read(made("hugging-face", spec))["activation_checkpointing"] is True
    older = read(made("hugging-face", spec, version="4.57"))
    assert (older["gradient_checkpointing"], older["gradient_checkpointing_kwargs"]) == (True, {"use_reentrant": False})


@pytest.mark.parametrize(
    ("optimizer", "version", "cpu"),
    [
        ({"name": "adam", "weight_decay": 0.1}, "5.23", False),
        ({"implementation": "foreach"}, "5.23", True),
        ({"implementation": "for-loop"}, "5.23", False),
        ({"name": "sgd", "momentum": 0.9}, "4.57", False),
        ({"name": "sgd", "implementation": "fused"}, "5.23", False),
    ],
)
def test_an_optimizer_the_trainer_cannot_make_is_the_users(optimizer: dict[str, Any], version: str, cpu: bool) -> None:  # noqa: FBT001 - a case's device
    """Nothing like it is written in its place: `optim` would take other memory, or step otherwise."""
    given = made("hugging-face", gpt_spec(optimizer=optimizer), version=version, cpu=cpu)

    assert "optim" not in read(given)
    assert "torch.optim." in warned(given)["optimizer-in-code"]


def test_arguments_on_the_command_line_are_those_of_the_file() -> None:
    """A launcher passes on each of them."""
    spec = gpt_spec(activation_checkpointing=True)
    launched = made("torchrun", spec, arguments_of="hugging-face").files[0].content

    words = shlex.split(launched, comments=True)
    passed = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    for name, value in read(made("hugging-face", spec)).items():
        assert passed[name] == (value if isinstance(value, str) else json.dumps(value))


# --- Accelerate ---


def test_accelerates_steps_are_in_the_environment_and_the_micro_batch_in_words() -> None:
    """Its configuration holds neither."""
    given = made("accelerate", batch=32)

    assert given.environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert "export ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4\n" in given.files[1].content
    assert "batch_size=8, drop_last=True" in warned(given)["data-loader-batch"]
    assert "batch_size=8, drop_last=True" in given.files[0].content


def test_accelerate_starts_ranks_on_cpus_by_torchrun() -> None:
    """`accelerate launch` starts one there, unless it is told of MPI."""
    given = made("accelerate", ranks=2, cpu=True)

    assert "exec torchrun --standalone --nproc-per-node=2 train.py" in given.files[1].content
    assert "ranks-on-cpu" in warned(given)
    assert "ranks-on-cpu" not in warned(made("accelerate", ranks=2))


@pytest.mark.parametrize("cpu", [True, False])
def test_a_script_that_looks_like_an_option_is_still_accelerates_script(cpu: bool) -> None:  # noqa: FBT001 - a case's device
    """Else it would start another number of ranks, or a module."""
    given = made("accelerate", ranks=2, cpu=cpu, script="--nproc-per-node=1")

    assert given.files[1].content.endswith(' ./--nproc-per-node=1 "$@"\n')


def test_accelerate_on_several_machines_says_what_each_needs() -> None:
    """The file is the same on all of them."""
    given = made("accelerate", ranks=16)

    assert (read(given)["num_processes"], read(given)["num_machines"]) == (16, 2)
    assert "--machine_rank" in warned(given)["several-machines"]


# --- Lightning ---


def test_lightning_clips_or_shards() -> None:
    """Its FSDP refuses to clip by norm: whole copies, as measured, do not."""
    sharded = {"parallelism": {"strategy": "fsdp"}}

    assert read(made("lightning", gpt_spec(**sharded), ranks=2))["trainer"]["strategy"] == "fsdp"
    clipped = made("lightning", gpt_spec(gradient_clipping=0.5, **sharded), ranks=2)
    assert read(clipped)["trainer"]["strategy"] == "ddp"
    assert "sharding-left-out" in warned(clipped)


# --- DeepSpeed ---


def test_deepspeeds_batch_is_the_product_and_clipping_is_always_written() -> None:
    """It asserts the one, and clips at 1.0 without the other."""
    settings = read(made("deepspeed", batch=64, ranks=2))

    product = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"] * 2
    assert settings["train_batch_size"] == product == 64
    assert settings["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("precision", "autocast"),
    [
        ("fp32", {"enabled": False}),
        ("bf16", {"enabled": False}),
        ("bf16-mixed", {"enabled": True, "dtype": "bfloat16"}),
        ("fp16-mixed", {"enabled": True, "dtype": "float16"}),
    ],
)
def test_deepspeed_keeps_no_copies_that_were_not_measured(precision: str, autocast: dict[str, Any]) -> None:
    """Its own bf16 and fp16 do, so mixed precision is torch's."""
    settings = read(made("deepspeed", gpt_spec(precision=precision)))

    assert settings["torch_autocast"] == autocast
    assert (settings["bf16"], settings["fp16"]) == ({"enabled": False}, {"enabled": False})


def test_deepspeed_allows_untested_optimizers_for_sgd_shards() -> None:
    """Else it refuses every optimizer that is not on its list; whole copies need no such word."""
    spec = gpt_spec(optimizer={"name": "sgd"}, parallelism={"strategy": "fsdp"})

    assert read(made("deepspeed", spec, ranks=2))["zero_allow_untested_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in read(made("deepspeed", spec))


def test_images_on_the_device_are_warned_of() -> None:
    """The Trainer has those of all micro-batches there; numbers for tokens are few, and so is a single micro-batch."""
    assert "samples-on-device" in warned(made("hugging-face", resnet_spec()))
    assert "samples-on-device" not in warned(made("hugging-face", resnet_spec(), batch=8))
    assert "samples-on-device" not in warned(made("hugging-face", gpt_spec()))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_adapter_is_warned_of(name: str) -> None:
    """An export that does not make the adapter tells it in words that peft takes."""
    adapter = {"kind": "lora", "rank": 4, "alpha": 8, "target_modules": ["c_attn"]}
    spec = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8}, adapter=adapter)
    found = {advice.code: advice.message for advice in made(name, spec).warnings}
    assert "LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=['c_attn']" in found["adapter-in-code"]


def adapted(**fields: Any) -> WorkloadSpec:
    """A language model with an adapter."""
    adapter = {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.1, **fields}
    return transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8}, adapter=adapter)


def test_axolotl_gets_the_keys_of_the_adapter() -> None:
    """All fields of it, so that no word says that the whole model would be trained."""
    given = made("axolotl", adapted(target_modules=["c_attn", "c_fc"], modules_to_save=["lm_head"], use_rslora=True))
    wanted = {
        "adapter": "lora",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "lora_target_modules": ["c_attn", "c_fc"],
        "lora_modules_to_save": ["lm_head"],
        "peft_use_rslora": True,
    }
    assert read(given).items() >= wanted.items()
    assert "adapter-in-code" not in warned(given)
    linear = read(made("axolotl", adapted(target_modules="all-linear")))
    assert linear["lora_target_linear"] is True
    assert not {"lora_target_modules", "lora_modules_to_save", "peft_use_rslora"} & set(linear)


def test_llama_factory_gets_the_keys_of_the_adapter() -> None:
    """Of its trainer; for the new one the adapter stays in words."""
    spec = adapted(target_modules=["c_attn", "c_fc"], modules_to_save=["lm_head"], use_rslora=True)
    given = made("llama-factory", spec)
    wanted = {
        "finetuning_type": "lora",
        "lora_rank": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "lora_target": "c_attn,c_fc",
        "additional_target": "lm_head",
        "use_rslora": True,
    }
    assert read(given).items() >= wanted.items()
    assert "adapter-in-code" not in warned(given)
    assert read(made("llama-factory", adapted(target_modules="all-linear")))["lora_target"] == "all"
    assert "adapter-in-code" in warned(made("llama-factory", spec, version="v1"))


def test_a_base_in_4_bits_is_written_with_its_adapter() -> None:
    """As both hand it to bitsandbytes; elsewhere in words that transformers takes."""
    quantization = {"kind": "nf4", "double_quantization": True}
    spec = adapted(target_modules=["c_attn"], quantization=quantization)
    of_axolotl = {
        "adapter": "qlora",
        "load_in_4bit": True,
        "bnb_config_kwargs": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    }
    assert read(made("axolotl", spec)).items() >= of_axolotl.items()
    of_llama_factory = {"quantization_bit": 4, "quantization_type": "nf4", "double_quantization": True}
    assert read(made("llama-factory", spec)).items() >= of_llama_factory.items()
    words = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True)"
    assert words in warned(made("torchtitan", spec))["adapter-in-code"]


def test_a_base_in_8_bits_is_written_with_its_adapter() -> None:
    """With a warning of products that also quantise inputs; elsewhere in words that transformers takes."""
    spec = adapted(target_modules=["c_attn"], quantization={"kind": "int8"})
    written: dict[str, dict[str, Any]] = {
        "axolotl": {"adapter": "lora", "load_in_8bit": True},
        "llama-factory": {"quantization_bit": 8},
    }
    for name, keys in written.items():
        assert read(made(name, spec)).items() >= keys.items()
        assert not {"load_in_4bit", "quantization_type"} & set(read(made(name, spec)))
        assert "with unquantised inputs" in warned(made(name, spec))["products-in-8-bits"]
    assert "`BitsAndBytesConfig(load_in_8bit=True)`" in warned(made("torchtitan", spec))["adapter-in-code"]


@pytest.mark.parametrize("name", ["axolotl", "llama-factory"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_modules": ["c_attn"], "alpha": 8.5},
        {"target_modules": ["c_attn"], "bias": "all"},
        {"target_modules": ["c_attn"], "init_lora_weights": "gaussian"},
    ],
)
def test_an_adapter_without_a_key_for_each_field_stays_in_words(name: str, fields: dict[str, Any]) -> None:
    """Half of it in the file would be another adapter."""
    given = made(name, adapted(**fields))
    assert "LoraConfig(r=4" in warned(given)["adapter-in-code"]
    assert not [key for key in read(given) if "lora" in key or key in {"adapter", "finetuning_type"}]


# --- packing ---


def packed(packing: str = "bfd") -> WorkloadSpec:
    """A language model on packed records."""
    batch = {"sequence_length": 8, "packing": packing}
    return transformers_spec("causal-lm", {"model_type": "gpt2"}, batch=batch)


def test_packing_is_written_where_records_stay_apart() -> None:
    """With the keys of axolotl, and of the trainer of LLaMA-Factory that masks attention between records."""
    of_axolotl = {"sample_packing": True, "attn_implementation": "sdpa"}
    assert read(made("axolotl", packed())).items() >= of_axolotl.items()
    of_llama_factory = {"stage": "sft", "packing": True, "neat_packing": True}
    assert read(made("llama-factory", packed())).items() >= of_llama_factory.items()
    for name in ("axolotl", "llama-factory"):
        assert not {"packing-not-written", "packing-changes-samples"} & set(warned(made(name, packed())))
        unpacked = made(name, transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8}))
        assert not {key for key in read(unpacked) if "packing" in key or key in {"stage", "attn_implementation"}}
        assert "packing-changes-samples" in warned(unpacked)


def test_written_packing_names_what_it_needs() -> None:
    """The attention of axolotl that was measured, and the only stage in which LLaMA-Factory packs so."""
    assert "joins a micro-batch into one row" in warned(made("axolotl", packed()))["packing-attention"]
    assert "Only `stage: sft` has" in warned(made("llama-factory", packed()))["packing-stage"]


def test_the_attention_of_a_packed_spec_is_written() -> None:
    """`eager`, for a model without `sdpa`."""
    config = {"model_type": "gpt2", "attn_implementation": "eager"}
    spec = transformers_spec("causal-lm", config, batch={"sequence_length": 8, "packing": "bfd"})
    assert read(made("axolotl", spec))["attn_implementation"] == "eager"


@pytest.mark.parametrize("name", ["axolotl", "llama-factory"])
def test_wrapped_packing_is_warned_of(name: str) -> None:
    """No framework cuts records as `wrapped` does and keeps their parts apart."""
    given = made(name, packed("wrapped"))
    assert "(`wrapped`), which this export does not set" in warned(given)["packing-not-written"]
    assert not [key for key in read(given) if "packing" in key]


@pytest.mark.parametrize("name", ["megatron", "nemo-automodel", "torchtitan"])
def test_packing_that_is_not_written_is_warned_of(name: str) -> None:
    """With the switch of the framework."""
    assert "which this export does not set: turn " in warned(made(name, packed()))["packing-not-written"]


def test_the_new_trainer_of_llama_factory_does_not_pack_so() -> None:
    """Its micro-batches are filled by tokens."""
    assert "packing-not-written" in warned(made("llama-factory", packed(), version="v1"))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_packing_of_your_own_program_is_warned_of(name: str) -> None:
    """The advice names the settings of TRL."""
    words = warned(made(name, packed()))["packing-in-code"]
    assert 'SFTConfig(packing=True, packing_strategy="bfd", max_length=8)' in words


# --- preference pairs ---


@pytest.mark.parametrize("name", [target.name for target in TARGETS.values() if target.kind == "framework"])
def test_preference_pairs_are_warned_of(name: str) -> None:
    """Each framework has the settings of TRL, and none of a spec without pairs."""
    texts = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8})
    pairs = texts.model_copy(update={"preference": PreferenceSpec(kind="dpo", beta=0.2, label_smoothing=0.1)})
    version = "v1" if name == "llama-factory" else None  # 0.9 has keys for pairs
    assert "preference-in-code" not in warned(made(name, texts, version=version))
    words = warned(made(name, pairs, version=version))["preference-in-code"]
    assert 'beta=0.2, loss_type=["sigmoid"], max_length=8' in words
    assert "apply the label_smoothing of 0.1" in words


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_axolotl_trains_preference_pairs_without_smoothing(loss: str) -> None:
    """The label smoothing of its keys would be lost in TRL's loss."""
    texts = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8})
    pairs = PreferenceSpec.model_validate({"kind": "dpo", "beta": 0.2, "loss": loss})
    given = made("axolotl", texts.model_copy(update={"preference": pairs}))
    assert read(given).items() >= {"rl": "dpo", "rl_beta": 0.2, "dpo_loss_type": [loss]}.items()
    jsonschema_rs.validate(json.loads((SCHEMAS / "axolotl-0.19.json").read_text()), read(given))
    assert "preference-in-code" not in warned(given)
    assert "sets the model's dropout to zero" in warned(given)["dropout-off"]
    assert not {"rl", "rl_beta"} & set(read(made("axolotl", texts)))


@pytest.mark.parametrize(
    ("preference", "keys"),
    [
        ({"beta": 0.2, "loss": "ipo"}, {"stage": "dpo", "pref_beta": 0.2, "pref_loss": "ipo"}),
        ({"label_smoothing": 0.1}, {"pref_beta": 0.1, "pref_loss": "sigmoid", "dpo_label_smoothing": 0.1}),
    ],
)
def test_llama_factory_trains_preference_pairs(preference: dict[str, Any], keys: dict[str, Any]) -> None:
    """With the loss of the spec, and pairs as its samples; that it cuts prompts too is said."""
    texts = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8})
    given = made("llama-factory", texts.model_copy(update={"preference": PreferenceSpec(kind="dpo", **preference)}))
    assert read(given).items() >= keys.items()
    jsonschema_rs.validate(json.loads((SCHEMAS / "llama-factory-0.9.json").read_text()), read(given))
    assert "preference-in-code" not in warned(given)
    assert "those of the spec at the end" in warned(given)["longer-samples-cut"]
    assert not {"stage", "pref_beta"} & set(read(made("llama-factory", texts)))


# --- our own script ---


def test_our_script_is_python_for_any_spec() -> None:
    """Every combination of what changes a line of it compiles, and imports neither service nor command line."""
    optimizers = [{"name": name, "implementation": "fused"} for name in ("adamw", "adam", "sgd")]
    schedules = [{}, {"name": "cosine", "warmup_updates": 3}]
    values = itertools.product(
        ("fp32", "bf16", "bf16-mixed", "fp16-mixed"), optimizers, schedules, (None, 0.9), (None, 1.5)
    )
    for precision, optimizer, schedule, decay, limit in values:
        spec = gpt_spec(
            precision=precision, optimizer=optimizer, schedule=schedule, ema_decay=decay, gradient_clipping=limit
        )
        script = made("pytorch", spec).files[0].content
        compile(script, "train.py", "exec")
        assert "service" not in script.replace("no service", "")


MUON = {"name": "muon", "momentum": 0.95, "learning_rate": 0.02, "arguments": {"nesterov": True}}


@pytest.mark.parametrize("scheduled", [False, True])
def test_our_script_makes_muon_with_adamw(scheduled: bool) -> None:  # noqa: FBT001 - a case
    """By the function that the probes used, imported beside that of the schedule: the program runs to there."""
    spec = gpt_spec(optimizer=MUON, **({"schedule": {"name": "cosine"}} if scheduled else {}))
    script = made("pytorch", spec).files[0].content
    compile(script, "train.py", "exec")
    (line,) = [line.strip() for line in script.splitlines() if line.strip().startswith("optimizer = ")]
    assert line == (
        "optimizer = build_optimizer(OptimizerSpec.model_validate({'name': 'muon', 'learning_rate': 0.02, "
        "'momentum': 0.95, 'arguments': {'nesterov': True}}), model)"
    )
    for name in ("OptimizerSpec", "build_optimizer", *["ScheduleSpec", "build_schedule"] * scheduled):
        assert re.search(rf"^from batchwright import .*\b{name}\b", script, flags=re.MULTILINE)


@pytest.mark.parametrize("name", FRAMEWORKS[1:])
def test_muon_with_adamw_is_the_users(name: str) -> None:
    """No framework makes both, so that none is named in a file."""
    found = made(name, gpt_spec(optimizer=MUON))
    assert "build_optimizer(OptimizerSpec.model_validate(" in warned(found)["optimizer-in-code"]
    if name == "deepspeed":
        assert "optimizer" not in read(found)


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "hugging-face", "pytorch"])
def test_lion_is_made_by_the_function_of_the_probes(name: str) -> None:
    """DeepSpeed's own Lion and that of bitsandbytes were not measured."""
    found = made(name, gpt_spec(optimizer={"name": "lion", "betas": [0.9, 0.99]}))
    call = "build_optimizer(OptimizerSpec.model_validate({'name': 'lion', 'betas': [0.9, 0.99]}), model)"
    assert call in (found.files[0].content if name == "pytorch" else warned(found)["optimizer-in-code"])
    assert name == "pytorch" or "optimizer" not in read(found)


EIGHT_BIT = {"name": "adamw8bit", "betas": [0.9, 0.95]}


@pytest.mark.parametrize(("name", "named"), [("adamw8bit", "adamw_bnb_8bit"), ("lion8bit", "lion_8bit")])
def test_a_state_in_8_bits_has_the_name_of_the_trainer(name: str, named: str) -> None:
    """In what becomes its arguments: the file for it, and those of axolotl and LLaMA-Factory."""
    spec = gpt_spec(optimizer={**EIGHT_BIT, "name": name, "learning_rate": 2e-4})
    arguments = read(made("hugging-face", spec))
    assert (arguments["optim"], arguments["learning_rate"], arguments["adam_beta2"]) == (named, 2e-4, 0.95)
    assert read(made("axolotl", spec))["optimizer"] == named
    assert read(made("llama-factory", spec))["optim"] == named
    for target in ("hugging-face", "axolotl", "llama-factory"):
        assert not {"optimizer-in-code", "optimizer-not-written"} & set(warned(made(target, spec)))


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "lightning", "pytorch"])
def test_a_state_in_8_bits_is_made_by_the_function_of_the_probes(name: str) -> None:
    """With the embeddings in fp32, of which the class alone knows nothing."""
    found = made(name, gpt_spec(optimizer=EIGHT_BIT))
    call = "build_optimizer(OptimizerSpec.model_validate({'name': 'adamw8bit', 'betas': [0.9, 0.95]}), model)"
    assert call in (found.files[0].content if name == "pytorch" else warned(found)["optimizer-in-code"])


@pytest.mark.parametrize(
    ("name", "version"), [("llama-factory", "v1"), *((name, "") for name in ("megatron", "torchtitan"))]
)
def test_a_state_in_8_bits_that_is_not_written_is_warned_of(name: str, version: str) -> None:
    """A state in fp32 takes four times the memory."""
    spec = gpt_spec(optimizer=EIGHT_BIT)
    found = made(name, spec, version=version) if version else made(name, spec)
    assert "`AdamW8bit` of bitsandbytes" in warned(found)["optimizer-not-written"]


def test_our_script_has_the_environment_of_the_probes() -> None:
    """It is set before anything of it is read, by starting anew."""
    recommended = plan(16, environment={"PYTORCH_ALLOC_CONF": "a'b\"c\\d"})
    script = export(recommended, "pytorch").files[0].content

    head = script.split("import torch\n")[0]
    assert "'PYTORCH_ALLOC_CONF': 'a\\'b\"c\\\\d'" in head
    assert "UNSET = ('PYTORCH_CUDA_ALLOC_CONF',)" in head
    assert "os.execve(" in head


def test_our_script_runs_where_was_measured() -> None:
    """What fits a processor was not tried on a card that happens to be there."""
    assert "cuda" not in made("pytorch", cpu=True).files[0].content
    assert 'torch.device("cuda", local_rank())' in made("pytorch").files[0].content


def test_our_script_checks_the_loss_that_its_user_puts_in() -> None:
    """The exception is a tuning that was told to accept coupled samples."""
    assert "checks_coupling" not in made("pytorch").files[0].content
    recommended = plan(16)
    request = recommended.request.model_copy(update={"allow_batch_coupling": True})
    script = export(recommended.model_copy(update={"request": request}), "pytorch").files[0].content
    assert "checks_coupling=False" in script


def test_our_script_keeps_averages_in_fp32() -> None:
    """As the engine does: in bf16 a decay near 1 would never move them."""
    script = made("pytorch", gpt_spec(precision="bf16", ema_decay=0.999)).files[0].content

    assert "p.detach().to(torch.float32, copy=True) for p in accumulation.parameters" in script
    assert "average.lerp_(parameter.detach().float(), 1 - 0.999)" in script


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (1, ("python", "train.py")),
        (8, ("torchrun", "--standalone", "--nproc-per-node=8", "train.py")),
        (16, ()),
    ],
)
def test_our_script_names_its_start_command(ranks: int, command: tuple[str, ...]) -> None:
    """Over several machines that is a launcher's to say."""
    given = made("pytorch", ranks=ranks, batch=2 * ranks)

    assert given.command == command
    assert ("several-machines" in warned(given)) is (ranks == 16)
