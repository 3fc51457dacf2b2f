"""LLaMA-Factory: keys of its YAML file, for its trainer (0.9) and for the new one (v1, with `USE_V1=1`)."""

from pydantic import JsonValue

from batchwright.exports import advice
from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import yaml_file
from batchwright.exports.spec_advice import Part, products_in_8_bits, writable_adapter
from batchwright.schemas.model.adapter import LoraAdapter

_V1 = "v1"
_PRECISIONS: dict[str, dict[str, JsonValue]] = {
    "fp32": {"bf16": False, "fp16": False, "pure_bf16": False},
    "bf16-mixed": {"bf16": True, "fp16": False, "pure_bf16": False},
    "fp16-mixed": {"bf16": False, "fp16": True, "pure_bf16": False},
    "bf16": {"bf16": False, "fp16": False, "pure_bf16": True},
}


def _batch(context: ExportContext) -> dict[str, int]:
    plan = context.plan
    if context.version == _V1:
        return {"micro_batch_size": plan.micro_batch_size, "global_batch_size": plan.effective_batch_size}
    return {
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }


def _settings(context: ExportContext) -> dict[str, JsonValue]:
    spec = context.spec
    settings: dict[str, JsonValue] = {**_batch(context)}
    if spec.batch.sequence_length is not None:
        settings["cutoff_len"] = spec.batch.sequence_length
    if context.version != _V1:
        settings["max_grad_norm"] = spec.gradient_clipping or 0.0
        if spec.batch.packing == "bfd":  # with `neat_packing` the records of a sequence do not see each other
            settings |= {"stage": "sft", "packing": True, "neat_packing": True}
        settings["disable_gradient_checkpointing"] = not spec.activation_checkpointing
        if spec.optimizer.trainer_name is not None:
            settings["optim"] = spec.optimizer.trainer_name
        return settings | _PRECISIONS[spec.precision] | _preference(context) | _adapter(context)
    settings["max_grad_norm"] = float("inf") if spec.gradient_clipping is None else spec.gradient_clipping
    settings["enable_activation_checkpointing"] = spec.activation_checkpointing
    if spec.precision in {"fp32", "bf16-mixed"}:
        settings["bf16"] = spec.precision != "fp32"
    return settings


def _preference(context: ExportContext) -> dict[str, JsonValue]:
    """The keys of preference pairs for the trainer of 0.9, whose losses are those of the spec."""
    preference = context.spec.preference
    if preference is None:
        return {}
    smoothing: dict[str, JsonValue] = {"dpo_label_smoothing": preference.label_smoothing}
    return {
        "stage": "dpo",
        "pref_beta": preference.beta,
        "pref_loss": preference.loss,
        **(smoothing if preference.label_smoothing else {}),
    }


def _adapter(context: ExportContext) -> dict[str, JsonValue]:
    """The keys of the adapter for the trainer of 0.9, where it has one for each of the adapter's fields."""
    adapter = writable_adapter(context)
    if adapter is None or context.version == _V1:
        return {}
    targets = adapter.target_modules
    return {
        "finetuning_type": "lora",
        "lora_rank": adapter.rank,
        "lora_alpha": int(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "lora_target": ",".join(targets) if isinstance(targets, tuple) else "all",
        **({"additional_target": ",".join(adapter.modules_to_save)} if adapter.modules_to_save else {}),
        **({"use_rslora": True} if adapter.use_rslora else {}),
        **_quantization(adapter),
    }


def _quantization(adapter: LoraAdapter) -> dict[str, JsonValue]:
    """The keys of a base in 4 or 8 bits, which its default method makes by bitsandbytes."""
    if adapter.quantization is None:
        return {}
    if adapter.quantization.kind == "int8":
        return {"quantization_bit": 8}
    kind, double = adapter.quantization.kind, adapter.quantization.double_quantization
    return {"quantization_bit": 4, "quantization_type": kind, "double_quantization": double}


def _write(context: ExportContext) -> TargetOutput:
    return TargetOutput((yaml_file("llama_factory.yaml", context, _settings(context)),), warnings=_warnings(context))


def _arguments(context: ExportContext) -> tuple[str, ...]:
    """Overrides of the preceding YAML file."""
    return tuple(f"{name}={value}" for name, value in _batch(context).items())


def _warnings(context: ExportContext) -> Warnings:
    spec, is_v1 = context.spec, context.version == _V1
    written: set[Part] = set() if is_v1 else {"optimizer-not-written", "preference-in-code"}
    written |= {"adapter-in-code"} if _adapter(context) else set()
    found = advice.measured_elsewhere(context, "LLaMA-Factory", written)
    if spec.batch.sequence_length is not None:
        is_shared = spec.preference is not None and not is_v1
        shared = ", prompt and completions alike: those of the spec at the end" if is_shared else ""
        found["longer-samples-cut"] = f"Samples are cut at `cutoff_len` ({spec.batch.sequence_length} tokens){shared}."
    return found | (_warnings_of_v1(context) if is_v1 else _warnings_of_0_9(context))


def _warnings_of_0_9(context: ExportContext) -> Warnings:
    found: Warnings = {}
    ranks, batch = context.plan.world_size, context.spec.batch
    found["world-size"] = (
        f"The file does not set the number of ranks: start exactly {ranks}, or the effective batch is not "
        f"{context.plan.effective_batch_size}. `llamafactory-cli` starts one for each visible device: set "
        f"`NPROC_PER_NODE={ranks}` and as many `CUDA_VISIBLE_DEVICES`."
    )
    found |= advice.packing(context, "`packing: true`, which `stage: pt` turns on by itself,", is_written=True)
    if batch.packing == "bfd":
        found["packing-stage"] = (
            "Only `stage: sft` has `neat_packing`, which keeps records apart: with another stage "
            "LLaMA-Factory rejects the file. It pads a sequence to `cutoff_len` + 1 tokens, and the probes "
            f"used {batch.sequence_length}. Leave `flash_attn` at `auto` or `sdpa`: with `fa2` a micro-batch "
            "must be one sequence."
        )
    if context.spec.preference is not None:
        found |= advice.without_dropout("LLaMA-Factory")
    return found | products_in_8_bits(context, "LLaMA-Factory")


def _warnings_of_v1(context: ExportContext) -> Warnings:
    found: Warnings = {}
    found["needs-use-v1"] = (
        "These keys are for the new trainer: run `llamafactory-cli` with `USE_V1=1` in the environment."
    )
    if context.spec.batch.packing is not None:
        found["packing-not-written"] = (
            "The spec packs records into sequences of equal length, which the new trainer cannot do: export "
            "for the trainer of 0.9, or tune without packing."
        )
    else:
        found["packing-changes-samples"] = (
            "Leave `batching_strategy` at `normal`: the others fill micro-batches by tokens, and the effective batch "
            "then varies."
        )
    found |= advice.data_parallel_ranks(context, "`cp_size`")
    if context.spec.precision != "fp32":
        is_here = "Weights are loaded in the checkpoint's own type, and `bf16` only takes effect under `dist_config`."
        found |= advice.precision_differs(context, is_here)
    return found


TARGET = Target(
    name="llama-factory",
    title="LLaMA-Factory",
    kind="framework",
    loop="hugging-face",
    versions=("0.9", _V1),
    repeats_one_size=True,
    write=_write,
    arguments=_arguments,
    arguments_leave="`cutoff_len`, `disable_gradient_checkpointing`, `max_grad_norm` and the precision",
    checked="parsed into the argument classes of LLaMA-Factory 0.9.5, those of v1 among them",
)
