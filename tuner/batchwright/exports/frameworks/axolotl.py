"""axolotl: keys of its YAML file."""

from pydantic import JsonValue

from batchwright.exports import advice
from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import yaml_file
from batchwright.exports.spec_advice import Part, products_in_8_bits, writable_adapter
from batchwright.schemas.model.adapter import LoraAdapter
from batchwright.schemas.workload import TransformersModel


def _batch(context: ExportContext) -> dict[str, int]:
    plan = context.plan
    return {
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }


def _settings(context: ExportContext) -> dict[str, JsonValue]:
    spec = context.spec
    settings: dict[str, JsonValue] = {**_batch(context), "auto_find_batch_size": False}
    if spec.batch.sequence_length is not None:
        settings["sequence_len"] = spec.batch.sequence_length
    if spec.batch.packing == "bfd":
        settings |= {"sample_packing": True, "attn_implementation": _attention(context)}
    settings["gradient_checkpointing"] = spec.activation_checkpointing
    settings["max_grad_norm"] = spec.gradient_clipping or 0.0
    if spec.precision == "fp32":
        settings |= {"bf16": False, "fp16": False}
    if spec.precision == "bf16":
        settings["bf16"] = True
    if spec.optimizer.trainer_name is not None:
        settings["optimizer"] = spec.optimizer.trainer_name
    return settings | _preference(context) | _adapter(context)


def _attention(context: ExportContext) -> str:
    """The attention of the spec, or `sdpa`: by default axolotl has none that keeps records apart."""
    model = context.spec.model
    return str(model.config.get("attn_implementation", "sdpa")) if isinstance(model, TransformersModel) else "sdpa"


def _preference(context: ExportContext) -> dict[str, JsonValue]:
    """The keys of preference pairs; none for smoothed labels, which axolotl hands to a loss of TRL that has none."""
    preference = context.spec.preference
    if preference is None or preference.label_smoothing:
        return {}
    return {"rl": "dpo", "rl_beta": preference.beta, "dpo_loss_type": [preference.loss]}


def _adapter(context: ExportContext) -> dict[str, JsonValue]:
    """The keys of the adapter, where axolotl has one for each of its fields."""
    adapter = writable_adapter(context)
    if adapter is None:
        return {}
    targets = adapter.target_modules
    return {
        "adapter": "qlora" if adapter.is_in_4_bits else "lora",
        "lora_r": adapter.rank,
        "lora_alpha": int(adapter.alpha),
        "lora_dropout": adapter.dropout,
        **({"lora_target_modules": list(targets)} if isinstance(targets, tuple) else {"lora_target_linear": True}),
        **({"lora_modules_to_save": list(adapter.modules_to_save)} if adapter.modules_to_save else {}),
        **({"peft_use_rslora": True} if adapter.use_rslora else {}),
        **_quantization(adapter),
    }


def _quantization(adapter: LoraAdapter) -> dict[str, JsonValue]:
    """The keys of a base in 4 or 8 bits."""
    if adapter.quantization is None:
        return {}
    if adapter.quantization.kind == "int8":
        return {"load_in_8bit": True}
    config: dict[str, JsonValue] = {
        "bnb_4bit_quant_type": adapter.quantization.kind,
        "bnb_4bit_use_double_quant": adapter.quantization.double_quantization,
    }
    return {"load_in_4bit": True, "bnb_config_kwargs": config}


def _write(context: ExportContext) -> TargetOutput:
    return TargetOutput((yaml_file("axolotl.yaml", context, _settings(context)),), warnings=_warnings(context))


def _arguments(context: ExportContext) -> tuple[str, ...]:
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in _batch(context).items())


def _warnings(context: ExportContext) -> Warnings:
    spec, length = context.spec, context.spec.batch.sequence_length
    written: set[Part] = {"optimizer-not-written"}
    written |= {"adapter-in-code"} if writable_adapter(context) else set()
    written |= {"preference-in-code"} if _preference(context) else set()
    found = advice.measured_elsewhere(context, "axolotl", written)
    if _preference(context):
        found |= advice.without_dropout("axolotl")
    found |= advice.packing(context, "`sample_packing: true`", is_written=True)
    if spec.batch.packing == "bfd":
        found["packing-attention"] = (
            f"`attn_implementation: {_attention(context)}` keeps the records of a row of {length} tokens "
            "apart, as in the probes (use `eager` for models without `sdpa`). Without this key records "
            "attend to each other. With `flash_attention_2` or `flex_attention` axolotl joins a micro-batch "
            "into one row; that memory was not measured."
        )
    found |= products_in_8_bits(context, "axolotl")
    found |= advice.data_parallel_ranks(context, "`tensor_parallel_size` x `context_parallel_size`")
    found["drop-batch-size"] = (
        "Put these keys into your axolotl file and remove `batch_size`: axolotl rejects it together with "
        "`gradient_accumulation_steps`."
    )
    if length is not None:
        found["longer-samples-dropped"] = (
            f"Samples above `sequence_len` ({length} tokens) are dropped; set `excess_length_strategy: truncate` to "
            "cut them instead."
        )
    if context.plan.world_size > 1:
        found["token-weighting"] = (
            "axolotl turns `average_tokens_across_devices` off: each rank's loss is averaged over its own "
            "tokens, so ranks with fewer labelled tokens count as much as others. Sequences of equal length "
            "are exact."
        )
    if spec.precision.endswith("mixed"):
        is_here = "`bf16: true` and `fp16: true` also load the weights in 16 bits."
        found |= advice.precision_differs(context, is_here)
    return found


TARGET = Target(
    name="axolotl",
    title="axolotl",
    kind="framework",
    loop="hugging-face",
    versions=("0.19",),
    repeats_one_size=True,
    write=_write,
    arguments=_arguments,
    arguments_leave="`sequence_len`, `gradient_checkpointing`, `max_grad_norm` and the precision",
    checked="validated by axolotl's own schema of hyperparameters; other keys compared with the recorded ones",
)
