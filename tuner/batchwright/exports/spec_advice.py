"""Translation of the spec for frameworks, and the warnings that several frameworks share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import assert_never

from batchwright.errors import ExportError
from batchwright.exports.base import ExportContext
from batchwright.schemas.model.adapter import LoraAdapter
from batchwright.schemas.optimizer import OptimizerName, OptimizerSpec, ScheduleSpec
from batchwright.schemas.recommendation import Advice
from batchwright.schemas.workload import (
    Mlp,
    PythonModel,
    ReferenceModel,
    ResNet,
    TransformersModel,
    WorkloadSpec,
)

_MOST_PER_NODE = 8
_WHOLE_SAMPLES = {"sequence-classification", "image-classification", "ctc", "contrastive"}
"""Tasks whose loss counts samples, not tokens."""


def spec_of(context: ExportContext) -> WorkloadSpec:
    """The spec of the recommendation."""
    return context.recommendation.request.workload


def on_cpu(context: ExportContext) -> bool:
    """Return whether the CPU was probed."""
    return context.recommendation.device.kind == "cpu"


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
        per_node = max(count for count in range(1, _MOST_PER_NODE + 1) if world % count == 0)
    if world % per_node:
        fitting = ", ".join(str(count) for count in range(1, min(world, 64) + 1) if world % count == 0)
        raise ExportError(
            "wrong-option",
            f"{world} processes (one per device) cannot be spread over nodes of {per_node}: `processes_per_node` must "
            f"divide {world}: use one of {fitting}",
        )
    return world // per_node, per_node


# --- the optimizer ---


TRAINER_NAMES: Mapping[OptimizerName, str] = MappingProxyType({"adamw8bit": "adamw_bnb_8bit", "lion8bit": "lion_8bit"})
"""Optimizers with a state in 8 bits, as `optim` of the Trainer of transformers (and its likes) names them.

Like the probes, the Trainer keeps the state of embeddings in fp32.
"""


def torch_call(optimizer: OptimizerSpec, parameters: str = "model.parameters()") -> str:
    """The Python expression that makes the optimizer, without the groups of the spec.

    Of `muon`, which is two optimizers of torch, and of those that are none, it is a call of
    ``batchwright.training.optimizers``.
    """
    if not optimizer.is_of_torch:
        fields = optimizer.model_dump(mode="json", exclude_defaults=True, exclude={"groups"})
        return f"build_optimizer(OptimizerSpec.model_validate({fields!r}), model)"
    arguments = "".join(f", {name}={value!r}" for name, value in optimizer.torch_arguments().items())
    return f"torch.optim.{optimizer.torch_class}({parameters}{arguments})"


# --- warnings ---


def of_the_workload(context: ExportContext, *, smooths_labels: bool = False) -> tuple[Advice, ...]:
    """Warn of parts of the spec that no framework can configure, from the longest sample to the loss.

    Args:
        context: the export.
        smooths_labels: whether the export sets the label smoothing of the spec.
    """
    return (
        *longest_sample(context),
        *optimizer_of_the_workload(context),
        *parameter_groups(context),
        *moving_average(context),
        *adapter_in_code(context),
        *packing_in_code(context),
        *preference_in_code(context),
        *held_out_samples(context),
        *(() if smooths_labels else smoothed_labels(context)),
    )


def longest_sample(context: ExportContext) -> tuple[Advice, ...]:
    """Name the size of the samples with which the memory was measured."""
    batch = spec_of(context).batch
    worst = [f"{batch.sequence_length} tokens"] if batch.sequence_length else []
    worst += [f"{batch.image_size} x {batch.image_size} pixels"] if batch.image_size else []
    worst += [f"an audio_length of {batch.audio_length}"] if batch.audio_length else []
    if not worst:
        return ()
    message = (
        f"What fits was measured with samples of {' and '.join(worst)}: truncate or resize longer ones, or they take "
        "more memory than was measured."
    )
    return (Advice(code="longest-sample", message=message),)


def optimizer_of_the_workload(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the optimizer that a `python` workload may have of its own is not written."""
    model = spec_of(context).model
    if not isinstance(model, PythonModel):
        return ()
    message = (
        f"Where {model.target} has a `build_optimizer` or a `build_lr_scheduler`, they were measured and are not part "
        "of this export: call them in place of the optimizer and the schedule of the spec."
    )
    return (Advice(code="optimizer-of-the-workload", message=message),)


def parameter_groups(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the export gives all parameters the same rates."""
    groups = spec_of(context).optimizer.groups
    if not groups:
        return ()
    listed = "; ".join(f"{', '.join(group.parameters)}: {group.changes}" for group in groups)
    message = (
        f"The parameter groups of the spec are not part of this export: give them to the optimizer in your own code "
        f"({listed})."
    )
    return (Advice(code="parameter-groups", message=message),)


def moving_average(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the export does not keep the average of the weights in the spec."""
    decay = spec_of(context).ema_decay
    if decay is None:
        return ()
    message = (
        f"The moving average of the weights (decay {decay}) is not part of this export: keep it in your own code, with "
        "`torch.optim.swa_utils.AveragedModel`. Its memory was measured."
    )
    return (Advice(code="moving-average", message=message),)


def held_out_samples(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the export does not evaluate as the spec does."""
    evaluation = spec_of(context).evaluation
    if evaluation is None:
        return ()
    message = (
        "The evaluation of the spec is not part of this export: hold samples out in your own program. A batch without "
        "gradients takes less memory than the micro-batch that was measured."
    )
    return (Advice(code="evaluation", message=message),)


def smoothed_labels(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the user's program computes the loss, whose labels the spec smooths."""
    smoothing = spec_of(context).label_smoothing
    if not smoothing:
        return ()
    message = (
        f"The loss is your program's, which has to smooth labels: `cross_entropy(..., label_smoothing={smoothing!r})` "
        "was measured."
    )
    return (Advice(code="label-smoothing", message=message),)


def writable_adapter(context: ExportContext) -> LoraAdapter | None:
    """The adapter, where frameworks have keys for all of it: whole `alpha`, named modules, no biases, `kaiming`."""
    adapter = spec_of(context).adapter
    if adapter is None or adapter.target_modules is None or not adapter.alpha.is_integer():
        return None
    return adapter if adapter.bias == "none" and adapter.init_lora_weights == "kaiming" else None


def optimizer_in_8_bits(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the export does not name the optimizer of the spec, whose state in 8 bits was measured."""
    name = spec_of(context).optimizer.name
    if name not in TRAINER_NAMES:
        return ()
    message = (
        f"The optimizer is not part of this export: `{name}`, whose state in 8 bits was measured, is "
        f"`{spec_of(context).optimizer.torch_class}` of bitsandbytes. With a state in fp32 the micro-batch may not fit."
    )
    return (Advice(code="optimizer-not-written", message=message),)


def adapter_in_code(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the export does not make the adapter of the spec."""
    adapter = spec_of(context).adapter
    if adapter is None:
        return ()
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
    message = (
        f"The adapter is not part of this export, and the whole model takes more memory than was measured: train it "
        f"with `{call}` of peft, or these values in your framework's own LoRA settings.{base}"
    )
    return (Advice(code="adapter-in-code", message=message),)


def products_in_8_bits(context: ExportContext, framework: str) -> tuple[Advice, ...]:
    """Warn that a framework's products with a base in 8 bits are not those that were measured."""
    adapter = spec_of(context).adapter
    if adapter is None or adapter.quantization is None or adapter.is_in_4_bits:
        return ()
    message = (
        f"{framework} multiplies with a base in 8 bits by LLM.int8(), which on a card also quantises the inputs, "
        "except for the columns in which the micro-batch has outliers, and keeps them for the backward pass. Products "
        "with the same codes and unquantised inputs were measured: there a sample may have another loss beside other "
        "samples, and the micro-batch may not fit."
    )
    return (Advice(code="products-in-8-bits", message=message),)


def packing_in_code(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the export does not pack the records, as the spec does."""
    batch = spec_of(context).batch
    if batch.packing is None:
        return ()
    message = (
        "Packing is not part of this export, and a sample of these figures is a full sequence of records: pack them in "
        f"your own code into {batch.sequence_length} tokens, with `position_ids` that restart at each record and its "
        f'first label ignored. With TRL it is `SFTConfig(packing=True, packing_strategy="{batch.packing}", '
        f"max_length={batch.sequence_length})`; its `wrapped` lets records see each other."
    )
    return (Advice(code="packing-in-code", message=message),)


def preference_in_code(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the export does not make the loss of the spec's preference pairs, and name TRL's settings for it."""
    preference, length = spec_of(context).preference, spec_of(context).batch.sequence_length
    if preference is None:
        return ()
    message = (
        "The loss of preference pairs is not part of this export, and a sample of these figures is a pair, of two "
        "sequences. With TRL it is `DPOTrainer` and these fields of its `DPOConfig`: "
        f'`beta={preference.beta!r}, loss_type=["{preference.loss}"], max_length={length}, '
        f"disable_dropout=False`. Its reference is the model that it starts from too: of an adapter the frozen base, "
        "else a copy, which was measured."
    )
    if preference.label_smoothing:
        message += (
            f" Its `{preference.loss}` smooths no labels: the label_smoothing of {preference.label_smoothing!r} is your"
            " program's."
        )
    return (Advice(code="preference-in-code", message=message),)


def optimizer_in_code(context: ExportContext) -> Advice:
    """Warn that the user's program makes the optimizer."""
    call = torch_call(spec_of(context).optimizer)
    message = f"The optimizer is your program's: `{call}` is what was measured."
    return Advice(code="optimizer-in-code", message=message)


def learning_rate(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the learning rate is the default of the spec."""
    rate = spec_of(context).optimizer.learning_rate
    if rate != OptimizerSpec().learning_rate:
        return ()
    message = f"The learning rate of {rate} is the default of a spec, in place of this framework's: is it yours?"
    return (Advice(code="default-learning-rate", message=message),)


def schedule_in_code(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the user's program makes the learning-rate schedule."""
    schedule = spec_of(context).schedule
    if schedule == ScheduleSpec():
        return ()
    message = (
        f"The learning-rate schedule is not written: `{schedule.name}` after {schedule.warmup_updates} updates of "
        "warm-up, one step of it per update, whatever the accumulation."
    )
    return (Advice(code="schedule-in-code", message=message),)


def checkpointing_in_code(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that activation checkpointing has to be set in the user's program."""
    if not spec_of(context).activation_checkpointing:
        return ()
    message = (
        "Activation checkpointing is your program's: call `model.gradient_checkpointing_enable()` (transformers), or "
        "use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` in the model. Without it the micro-batch "
        "does not fit."
    )
    return (Advice(code="activation-checkpointing-in-code", message=message),)


def compile_in_code(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the model has to be compiled in the user's program."""
    if not spec_of(context).compile:
        return ()
    message = "Compiling is your program's: `model = torch.compile(model)`. It changes memory, and was measured."
    return (Advice(code="compile-in-code", message=message),)


def replicated(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the export does not shard the model although the spec does."""
    if spec_of(context).parallelism.strategy != "fsdp":
        return ()
    message = (
        "Sharding (FSDP) is not part of this export. A whole copy of the model on each device was measured, so it fits "
        "without; sharded, it takes less."
    )
    return (Advice(code="sharding-left-out", message=message),)


def lower_precision_in_code(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that the user's program has to convert the model to bf16."""
    if spec_of(context).precision != "bf16":
        return ()
    message = (
        "Parameters and gradients in bf16 were measured: load or convert the model so (`dtype=torch.bfloat16`, "
        "`model.to(torch.bfloat16)`)."
    )
    return (Advice(code="model-dtype", message=message),)


def token_weighting(context: ExportContext, message: str) -> tuple[Advice, ...]:
    """Warn of how the target weighs tokens, if the loss counts them."""
    return (Advice(code="token-weighting", message=message),) if counts_tokens(spec_of(context)) else ()


def dropped_samples(context: ExportContext, loader: str) -> str:
    """Explain why the last, short micro-batch of an epoch is dropped, and how to lose no sample."""
    batch = context.plan.effective_batch_size
    return (
        f"{loader} drops the last micro-batch of an epoch when it is short: kept, it would count as much as a full "
        "one, or be filled up with samples that were seen already. An epoch that is a multiple of "
        f"{batch} samples loses none."
    )
