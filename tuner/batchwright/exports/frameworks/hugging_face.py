"""Hugging Face Transformers: ``TrainingArguments`` as JSON, or as the command line of ``HfArgumentParser``.

Read from transformers 5.23.0, 5.0.0 and 4.57.6: ``training_args.py``, ``trainer.py``, ``trainer_optimizer.py``.
"""

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import json_file, json_word
from batchwright.exports.spec_advice import (
    OF_THE_WORKLOAD,
    dropped_samples,
    left_out,
    nodes,
    token_weighting,
    torch_call,
)
from batchwright.schemas.workload import TransformersModel, WorkloadSpec

NEWEST, FIVE, FOUR = "5.23", "5.0", "4.57"

_TOKENS = (
    "Every token counts equally only if the model's `forward` takes `num_items_in_batch` in its keyword "
    "arguments, like the library's own language models. For any other model pass the Trainer a "
    "`compute_loss_func` that divides the summed loss by `num_items_in_batch`; otherwise it averages the "
    "means of the micro-batches."
)


def _write(context: ExportContext) -> TargetOutput:
    return TargetOutput(
        (json_file("training_arguments.json", training_arguments(context)),), warnings=_warnings(context)
    )


def training_arguments(context: ExportContext) -> dict[str, JsonValue]:
    """Keyword arguments of ``TrainingArguments``. Important values are explicit even if they are defaults."""
    spec, plan = context.spec, context.plan
    warms_up = spec.schedule.name == "constant" and spec.schedule.warmup_updates
    return {
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "dataloader_drop_last": True,
        "bf16": spec.precision == "bf16-mixed",
        "fp16": spec.precision == "fp16-mixed",
        "max_grad_norm": spec.gradient_clipping or 0.0,
        **_checkpointing(context),
        **_optimizer(context),
        "lr_scheduler_type": "constant_with_warmup" if warms_up else spec.schedule.name,  # `linear` by default
        "warmup_steps": spec.schedule.warmup_updates,
        **_smoothing(context),
        **({"torch_compile": True} if spec.compile else {}),
        **({"use_cpu": True} if context.on_cpu else {}),
    }


def _smoothing(context: ExportContext) -> dict[str, JsonValue]:
    """Label smoothing, where the Trainer divides the smoothed loss by the labels of the whole update (since 5.23)."""
    smoothing = context.spec.label_smoothing
    return {"label_smoothing_factor": smoothing} if smoothing and context.version == NEWEST else {}


def _checkpointing(context: ExportContext) -> dict[str, JsonValue]:
    wanted = context.spec.activation_checkpointing
    if context.version == NEWEST:
        return {"activation_checkpointing": wanted}
    kwargs: dict[str, JsonValue] = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}  # as was measured
    return {"gradient_checkpointing": wanted, **(kwargs if wanted else {})}


def _optimizer(context: ExportContext) -> dict[str, JsonValue]:
    optimizer = context.spec.optimizer
    if not _has_optimizer(context):
        return {}
    common: dict[str, JsonValue] = {"learning_rate": optimizer.learning_rate, "weight_decay": optimizer.weight_decay}
    if optimizer.name == "sgd":
        momentum: dict[str, JsonValue] = {"optim_args": f"momentum={optimizer.momentum!r}"}
        return {"optim": "sgd", **common, **(momentum if optimizer.momentum else {})}
    torch_name = "adamw_torch_fused" if optimizer.implementation == "fused" else "adamw_torch"
    name = optimizer.trainer_name or torch_name
    return {"optim": name, **common, "adam_beta1": optimizer.betas[0], "adam_beta2": optimizer.betas[1]}


def _has_optimizer(context: ExportContext) -> bool:
    """Return whether the Trainer can make the measured implementation of the spec's optimizer."""
    optimizer = context.spec.optimizer
    if optimizer.arguments or optimizer.groups:
        return False
    if optimizer.trainer_name is not None:
        return True
    usual = "for-loop" if context.on_cpu else "foreach"  # torch's default
    if optimizer.name == "sgd":
        able = optimizer.momentum == 0.0 or context.version == NEWEST
        return able and optimizer.implementation in {"default", usual}
    # Adam with a weight decay, or any other optimizer, is no AdamW
    is_adamw = optimizer.name == "adamw" or (optimizer.name == "adam" and optimizer.weight_decay == 0.0)
    return is_adamw and optimizer.implementation in {"default", usual, "fused"}


def _warnings(context: ExportContext) -> Warnings:
    found: Warnings = {}
    spec, ranks = context.spec, context.plan.world_size
    machines, processes = nodes(context)
    start = f"`torchrun --nproc-per-node={processes}`" if ranks > 1 else "`python` with `CUDA_VISIBLE_DEVICES=0`"
    if machines > 1:
        start = f"`torchrun --nnodes={machines} --nproc-per-node={processes}` on each of {machines} machines"
    found["world-size"] = (
        f"TrainingArguments do not set the number of ranks: start exactly {ranks}, one per device ({start}). "
        "One process that sees several devices runs `DataParallel`, and takes "
        f"{context.plan.micro_batch_size} samples for each of them."
    )
    found |= token_weighting(context, _TOKENS)
    found["tail-window"] = (
        "The last update of an epoch has fewer micro-batches, correctly weighted. "
        f"{dropped_samples(context, '`dataloader_drop_last`')} If the dataset has no length, that update is "
        "never made, and its gradient joins the next epoch's first update: give the dataset a length."
    )
    if context.plan.gradient_accumulation_steps > 1 and _has_large_samples(spec):
        found["samples-on-device"] = (
            "The Trainer moves all samples of an update to the device before it begins; the probes had one micro-batch "
            "there. Given the effective batch, `batchwright estimate --loop hugging-face` counts them."
        )
    if _has_optimizer(context):
        found |= left_out(context, "default-learning-rate")
    else:
        found["optimizer-in-code"] = (
            "The Trainer has no `optim` for the measured optimizer: pass "
            f"`optimizers=({torch_call(spec.optimizer)}, None)`."
        )
    if spec.precision == "bf16":
        found |= left_out(context, "model-dtype")
    elif context.version != FOUR:
        found["model-dtype"] = (
            "The probes had parameters in fp32, but `from_pretrained` loads them in the checkpoint's own "
            "type, often bf16: set `dtype=torch.float32`."
        )
    parts = OF_THE_WORKLOAD[:-1] if _smoothing(context) else OF_THE_WORKLOAD
    return found | left_out(context, "sharding-left-out", *parts)


def _has_large_samples(spec: WorkloadSpec) -> bool:
    """Return whether a sample may be more than some numbers for each token, such as an image or a recording."""
    hears = isinstance(spec.model, TransformersModel) and spec.model.task in {"speech-seq2seq", "ctc", "contrastive"}
    return hears or spec.batch.image_size is not None or spec.model.kind == "python"


def _arguments(context: ExportContext) -> tuple[str, ...]:
    return tuple(f"--{name}={json_word(value)}" for name, value in training_arguments(context).items())


TARGET = Target(
    name="hugging-face",
    title="Hugging Face TrainingArguments",
    kind="framework",
    loop="hugging-face",
    versions=(NEWEST, FIVE, FOUR),
    repeats_one_size=True,
    takes=frozenset({"processes_per_node"}),
    write=_write,
    arguments=_arguments,
    checked="5.23 loaded by transformers and trained with; 5.0 and 4.57 against the fields of their sources",
)
