"""Hugging Face Transformers: ``TrainingArguments`` as JSON, or as the command line of ``HfArgumentParser``.

Read from transformers 5.23.0, 5.0.0 and 4.57.6: ``training_args.py``, ``trainer.py``, ``trainer_optimizer.py``.
"""

from __future__ import annotations

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput
from batchwright.exports.rendering import json_file, json_word
from batchwright.exports.spec_advice import (
    TRAINER_NAMES,
    dropped_samples,
    learning_rate,
    lower_precision_in_code,
    nodes,
    of_the_workload,
    on_cpu,
    replicated,
    spec_of,
    token_weighting,
    torch_call,
)
from batchwright.schemas.optimizer import ScheduleSpec
from batchwright.schemas.recommendation import Advice

NEWEST, FIVE, FOUR = "5.23", "5.0", "4.57"

_TOKENS = (
    "Each token counts alike only if the model's `forward` takes `num_items_in_batch` in its keyword arguments, as "
    "the library's own language models do. For any other model pass the Trainer a `compute_loss_func` that divides "
    "the summed loss by `num_items_in_batch`; else it steps with the mean of micro-batches' means."
)


def _write(context: ExportContext) -> TargetOutput:
    return TargetOutput(
        (json_file("training_arguments.json", training_arguments(context)),), warnings=_warnings(context)
    )


def training_arguments(context: ExportContext) -> dict[str, JsonValue]:
    """Keyword arguments of ``TrainingArguments``. Important values are explicit even if they are defaults."""
    spec, plan = spec_of(context), context.plan
    return {
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "dataloader_drop_last": True,
        "bf16": spec.precision == "bf16-mixed",
        "fp16": spec.precision == "fp16-mixed",
        "max_grad_norm": spec.gradient_clipping or 0.0,
        **_checkpointing(context),
        **_optimizer(context),
        **_schedule(spec.schedule),
        **_smoothing(context),
        **({"torch_compile": True} if spec.compile else {}),
        **({"use_cpu": True} if on_cpu(context) else {}),
    }


def _smoothing(context: ExportContext) -> dict[str, JsonValue]:
    """Label smoothing, where the Trainer divides the smoothed loss by the labels of the whole update (since 5.23)."""
    smoothing = spec_of(context).label_smoothing
    return {"label_smoothing_factor": smoothing} if smoothing and context.version == NEWEST else {}


def _checkpointing(context: ExportContext) -> dict[str, JsonValue]:
    wanted = spec_of(context).activation_checkpointing
    if context.version == NEWEST:
        return {"activation_checkpointing": wanted}
    kwargs: dict[str, JsonValue] = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}  # as was measured
    return {"gradient_checkpointing": wanted, **(kwargs if wanted else {})}


def _optimizer(context: ExportContext) -> dict[str, JsonValue]:
    optimizer = spec_of(context).optimizer
    if not _has_optimizer(context):
        return {}
    common: dict[str, JsonValue] = {"learning_rate": optimizer.learning_rate, "weight_decay": optimizer.weight_decay}
    if optimizer.name == "sgd":
        momentum: dict[str, JsonValue] = {"optim_args": f"momentum={optimizer.momentum!r}"}
        return {"optim": "sgd", **common, **(momentum if optimizer.momentum else {})}
    torch_name = "adamw_torch_fused" if optimizer.implementation == "fused" else "adamw_torch"
    name = TRAINER_NAMES.get(optimizer.name, torch_name)
    return {"optim": name, **common, "adam_beta1": optimizer.betas[0], "adam_beta2": optimizer.betas[1]}


def _has_optimizer(context: ExportContext) -> bool:
    """Return whether the Trainer can make the measured implementation of the spec's optimizer."""
    optimizer = spec_of(context).optimizer
    if optimizer.arguments or optimizer.groups:
        return False
    if optimizer.name in TRAINER_NAMES:
        return True
    usual = "for-loop" if on_cpu(context) else "foreach"  # torch's default
    if optimizer.name == "sgd":
        able = optimizer.momentum == 0.0 or context.version == NEWEST
        return able and optimizer.implementation in {"default", usual}
    # Adam with a weight decay, or any other optimizer, is no AdamW
    is_adamw = optimizer.name == "adamw" or (optimizer.name == "adam" and optimizer.weight_decay == 0.0)
    return is_adamw and optimizer.implementation in {"default", usual, "fused"}


def _schedule(schedule: ScheduleSpec) -> dict[str, JsonValue]:
    """The schedule, always written because the library's default is `linear`."""
    warm_up = schedule.warmup_updates
    name = "constant_with_warmup" if schedule.name == "constant" and warm_up else schedule.name
    return {"lr_scheduler_type": name, "warmup_steps": warm_up}


# --- warnings ---


def _warnings(context: ExportContext) -> tuple[Advice, ...]:
    return (
        _processes(context),
        *token_weighting(context, _TOKENS),
        _tail(context),
        *_own_optimizer(context),
        *_loaded_type(context),
        *replicated(context),
        *of_the_workload(context, smooths_labels=bool(_smoothing(context))),
    )


def _processes(context: ExportContext) -> Advice:
    ranks, micro = context.plan.world_size, context.plan.micro_batch_size
    machines, processes = nodes(context)
    start = f"`torchrun --nproc-per-node={processes}`" if ranks > 1 else "`python` with `CUDA_VISIBLE_DEVICES=0`"
    if machines > 1:
        start = f"`torchrun --nnodes={machines} --nproc-per-node={processes}` on each of {machines} machines"
    message = (
        f"TrainingArguments do not hold the number of ranks: start exactly {ranks}, one per device ({start}). One "
        f"process that sees several devices runs `DataParallel`, and takes {micro} samples for each of them."
    )
    return Advice(code="world-size", message=message)


def _tail(context: ExportContext) -> Advice:
    message = (
        f"The last update of an epoch is made with the micro-batches that are left, correctly weighted. "
        f"{dropped_samples(context, '`dataloader_drop_last`')} A dataset without a length never makes that update, and "
        "its gradient joins the next epoch's first: give it a length."
    )
    return Advice(code="tail-window", message=message)


def _own_optimizer(context: ExportContext) -> tuple[Advice, ...]:
    if _has_optimizer(context):
        return learning_rate(context)
    message = (
        f"No `optim` of the Trainer is what was measured: pass `optimizers=({torch_call(spec_of(context).optimizer)}, "
        "None)`."
    )
    return (Advice(code="optimizer-in-code", message=message),)


def _loaded_type(context: ExportContext) -> tuple[Advice, ...]:
    """Warn that `from_pretrained` of 5.x uses the type of the checkpoint."""
    if spec_of(context).precision == "bf16" or context.version == FOUR:
        return lower_precision_in_code(context)
    message = (
        "Parameters in fp32 were measured, and `from_pretrained` loads them in the checkpoint's own type, often bf16: "
        "set `dtype=torch.float32`."
    )
    return (Advice(code="model-dtype", message=message),)


# --- its command line ---


def _arguments(context: ExportContext) -> tuple[str, ...]:
    return tuple(f"--{name}={json_word(value)}" for name, value in training_arguments(context).items())


TARGET = Target(
    name="hugging-face",
    title="Hugging Face TrainingArguments",
    kind="framework",
    versions=(NEWEST, FIVE, FOUR),
    repeats_one_size=True,
    takes=frozenset({"processes_per_node"}),
    write=_write,
    arguments=_arguments,
    checked="5.23 loaded by transformers and trained with; 5.0 and 4.57 against the fields of their sources",
)
