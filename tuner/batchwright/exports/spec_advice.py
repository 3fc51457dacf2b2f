"""Translation of the spec for frameworks, and warnings of the parts of a spec that an export leaves to the program."""

from typing import Literal, assert_never

from batchwright.errors import ExportError
from batchwright.exports.base import ExportContext, Warnings
from batchwright.schemas.model.adapter import LoraAdapter
from batchwright.schemas.optimizer import OptimizerSpec, ScheduleSpec
from batchwright.schemas.workload import (
    Mlp,
    PythonModel,
    ReferenceModel,
    ResNet,
    TransformersModel,
    WorkloadSpec,
)
from batchwright.units import counted

LARGEST_NODE = 8
"""Devices of a node, unless the options say otherwise."""
_WHOLE_SAMPLES = {"sequence-classification", "image-classification", "ctc", "contrastive"}
"""Tasks whose loss counts samples, not tokens."""


def counts_tokens(spec: WorkloadSpec) -> bool:
    """Return whether the loss may weigh samples by tokens, so that a mean of micro-batches' means differs."""
    model = spec.model
    match model:
        case TransformersModel():
            return model.task not in _WHOLE_SAMPLES and spec.preference is None
        case ReferenceModel():
            return not isinstance(model.architecture, (Mlp, ResNet))
        case PythonModel():
            return True
        case _:
            assert_never(model)


def nodes(context: ExportContext) -> tuple[int, int]:
    """Nodes, and processes per node: the requested number, or the largest up to 8 that divides the world size.

    Raises:
        ExportError: when they do not divide it.
    """
    world, per_node = context.plan.world_size, context.options.processes_per_node
    if per_node is None:
        per_node = max(count for count in range(1, LARGEST_NODE + 1) if world % count == 0)
    if world % per_node:
        fitting = ", ".join(str(count) for count in range(1, min(world, 64) + 1) if world % count == 0)
        raise ExportError(
            "wrong-option",
            f"{world} processes (one per device) cannot be spread over nodes of {per_node}: `processes_per_node` must "
            f"divide {world}: use one of {fitting}",
        )
    return world // per_node, per_node


# --- the optimizer and the adapter ---


def torch_call(optimizer: OptimizerSpec) -> str:
    """The Python expression that makes the optimizer, without the groups of the spec.

    Of `muon`, which is two optimizers of torch, and of those that are none, it is a call of
    ``batchwright.training.optimizers``.
    """
    if not optimizer.is_of_torch:
        fields = optimizer.model_dump(mode="json", exclude_defaults=True, exclude={"groups"})
        return f"build_optimizer(OptimizerSpec.model_validate({fields!r}), model)"
    arguments = "".join(f", {name}={value!r}" for name, value in optimizer.torch_arguments().items())
    return f"torch.optim.{optimizer.torch_class}(model.parameters(){arguments})"


def writable_adapter(context: ExportContext) -> LoraAdapter | None:
    """The adapter, where frameworks have keys for all of it: whole `alpha`, named modules, no biases, `kaiming`."""
    adapter = context.spec.adapter
    if adapter is None or adapter.target_modules is None or not adapter.alpha.is_integer():
        return None
    return adapter if adapter.bias == "none" and adapter.init_lora_weights == "kaiming" else None


# --- warnings of what an export does not have ---


Part = Literal[
    "longest-sample",
    "packing-in-code",
    "preference-in-code",
    "evaluation",
    "optimizer-of-the-workload",
    "optimizer-in-code",
    "optimizer-not-written",
    "parameter-groups",
    "default-learning-rate",
    "schedule-in-code",
    "moving-average",
    "label-smoothing",
    "adapter-in-code",
    "activation-checkpointing-in-code",
    "compile-in-code",
    "sharding-left-out",
    "model-dtype",
]
"""Codes of the warnings of parts of the spec, which a target lists if it does not write them."""

OF_THE_WORKLOAD: tuple[Part, ...] = (
    "longest-sample",
    "optimizer-of-the-workload",
    "parameter-groups",
    "moving-average",
    "adapter-in-code",
    "packing-in-code",
    "preference-in-code",
    "evaluation",
    "label-smoothing",
)
"""Parts of the spec that no framework can configure, from the longest sample to the loss, whose labels come last."""


def left_out(context: ExportContext, *parts: Part) -> Warnings:
    """Warn of these parts, in this order, if the spec has them."""
    spec = context.spec
    found = _of_samples(spec) | _of_optimizer(spec) | _of_model(spec) | _of_adapter(spec)
    return {part: found[part] for part in parts if part in found}


def _of_samples(spec: WorkloadSpec) -> dict[Part, str]:
    found: dict[Part, str] = {}
    batch, preference = spec.batch, spec.preference
    worst = [f"{batch.sequence_length} tokens"] if batch.sequence_length else []
    worst += [f"{batch.image_size} x {batch.image_size} pixels"] if batch.image_size else []
    worst += [f"an audio_length of {batch.audio_length}"] if batch.audio_length else []
    if worst:
        found["longest-sample"] = (
            f"The probes used samples of {' and '.join(worst)}: truncate or resize longer ones, which would "
            "take more memory."
        )
    if batch.packing is not None:
        found["packing-in-code"] = (
            "Packing is not part of this export, and a sample of this plan is a full sequence of records. "
            f"Pack them into {batch.sequence_length} tokens in your own code: restart `position_ids` at each "
            "record, and ignore its first label. With TRL it is `SFTConfig(packing=True, "
            f'packing_strategy="{batch.packing}", max_length={batch.sequence_length})`; with its `wrapped`, '
            "records attend to each other."
        )
    if preference is not None:
        smoothing = (
            f" Its loss `{preference.loss}` does not smooth labels: apply the label_smoothing of "
            f"{preference.label_smoothing!r} in your program."
        )
        found["preference-in-code"] = (
            "The preference loss is not part of this export, and a sample of this plan is a pair of "
            "sequences. With TRL it is `DPOTrainer` and these fields of its `DPOConfig`: "
            f'`beta={preference.beta!r}, loss_type=["{preference.loss}"], '
            f"max_length={batch.sequence_length}, disable_dropout=False`. Its reference is also the starting "
            "model: with an adapter the frozen base, otherwise a copy, which was "
            f"measured.{smoothing if preference.label_smoothing else ''}"
        )
    if spec.evaluation is not None:
        found["evaluation"] = (
            "The evaluation of the spec is not part of this export: hold samples out in your own program. A batch "
            "without gradients takes less memory than the micro-batch that was measured."
        )
    return found


def _of_optimizer(spec: WorkloadSpec) -> dict[Part, str]:
    found: dict[Part, str] = {}
    optimizer, schedule = spec.optimizer, spec.schedule
    found["optimizer-in-code"] = f"Your program builds the optimizer: the probes used `{torch_call(optimizer)}`."
    if isinstance(spec.model, PythonModel):
        found["optimizer-of-the-workload"] = (
            f"If {spec.model.target} has a `build_optimizer` or a `build_lr_scheduler`, the probes used them, "
            "but this export does not: call them instead of the spec's optimizer and schedule."
        )
    if optimizer.trainer_name is not None:
        found["optimizer-not-written"] = (
            f"The optimizer is not part of this export: `{optimizer.name}`, whose state in 8 bits was measured, is "
            f"`{optimizer.torch_class}` of bitsandbytes. With a state in fp32 the micro-batch may not fit."
        )
    if optimizer.groups:
        listed = "; ".join(f"{', '.join(group.parameters)}: {group.changes}" for group in optimizer.groups)
        found["parameter-groups"] = (
            "The parameter groups of the spec are not part of this export: give them to the optimizer in your own code "
            f"({listed})."
        )
    if (rate := optimizer.learning_rate) == OptimizerSpec().learning_rate:
        found["default-learning-rate"] = (
            f"The learning rate of {rate} is the spec's default, not this framework's: check that you want it."
        )
    if schedule != ScheduleSpec():
        found["schedule-in-code"] = (
            f"This export does not set the learning-rate schedule: `{schedule.name}` after "
            f"{counted(schedule.warmup_updates, 'update')} of warm-up. Step it once per update, not per "
            "micro-batch."
        )
    return found


def _of_model(spec: WorkloadSpec) -> dict[Part, str]:
    found: dict[Part, str] = {}
    if spec.ema_decay is not None:
        found["moving-average"] = (
            f"The moving average of the weights (decay {spec.ema_decay}) is not part of this export: keep it in your "
            "own code, with `torch.optim.swa_utils.AveragedModel`. Its memory was measured."
        )
    if spec.label_smoothing:
        found["label-smoothing"] = (
            "Your program computes the loss, and must smooth labels: the probes used `cross_entropy(..., "
            f"label_smoothing={spec.label_smoothing!r})`."
        )
    if spec.activation_checkpointing:
        found["activation-checkpointing-in-code"] = (
            "Turn on activation checkpointing in your program: call `model.gradient_checkpointing_enable()` "
            "(transformers), or use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` in the "
            "model. Without it the micro-batch does not fit."
        )
    if spec.compile:
        found["compile-in-code"] = (
            "The probes ran with `model = torch.compile(model)`, which changes memory: compile the model in "
            "your program too."
        )
    if spec.parallelism.strategy == "fsdp":
        found["sharding-left-out"] = (
            "Sharding (FSDP) is not part of this export. The probes measured a whole copy of the model on "
            "each device, so it fits without sharding; sharded, it takes less."
        )
    if spec.precision == "bf16":
        found["model-dtype"] = (
            "The probes had parameters and gradients in bf16: load or convert the model to match "
            "(`dtype=torch.bfloat16`, `model.to(torch.bfloat16)`)."
        )
    return found


def _of_adapter(spec: WorkloadSpec) -> dict[Part, str]:
    found: dict[Part, str] = {}
    adapter = spec.adapter
    if adapter is None:
        return found
    targets = list(adapter.target_modules) if isinstance(adapter.target_modules, tuple) else adapter.target_modules
    call = (
        f"LoraConfig(r={adapter.rank}, lora_alpha={adapter.alpha:g}, lora_dropout={adapter.dropout}, "
        f"target_modules={targets!r}, modules_to_save={list(adapter.modules_to_save) or None!r}, "
        f"bias={adapter.bias!r}, use_rslora={adapter.use_rslora})"
    )
    base = ""
    if adapter.quantization is not None:
        arguments = (
            f"load_in_4bit=True, bnb_4bit_quant_type={adapter.quantization.kind!r}, "
            f"bnb_4bit_use_double_quant={adapter.quantization.double_quantization}"
        )
        bits, given = (4, arguments) if adapter.is_in_4_bits else (8, "load_in_8bit=True")
        base = f" Its base was in {bits} bits: load it with `BitsAndBytesConfig({given})` of transformers."
    found["adapter-in-code"] = (
        f"The adapter is not part of this export, and the whole model takes more memory than was measured: train it "
        f"with `{call}` of peft, or these values in your framework's own LoRA settings.{base}"
    )
    return found


def products_in_8_bits(context: ExportContext, framework: str) -> Warnings:
    """Warn that a framework's products with a base in 8 bits are not those that were measured."""
    found: Warnings = {}
    adapter = context.spec.adapter
    if adapter is not None and adapter.quantization is not None and not adapter.is_in_4_bits:
        found["products-in-8-bits"] = (
            f"{framework} multiplies an 8-bit base with LLM.int8(). On a card this also quantises the inputs, "
            "except the outlier columns of the micro-batch, and keeps them for the backward pass. The probes "
            "used the same codes with unquantised inputs. So a sample's loss may depend on the other "
            "samples, and the micro-batch may not fit."
        )
    return found


def token_weighting(context: ExportContext, message: str) -> Warnings:
    """Warn of how the target weighs tokens, if the loss counts them."""
    return {"token-weighting": message} if counts_tokens(context.spec) else {}


def dropped_samples(context: ExportContext, loader: str) -> str:
    """Explain why the last, short micro-batch of an epoch is dropped, and how to lose no sample."""
    batch = context.plan.effective_batch_size
    return (
        f"{loader} drops a short last micro-batch of an epoch, which would otherwise count as much as a full "
        f"one, or be filled up with samples already seen. An epoch with a multiple of {batch} samples loses "
        "none."
    )
