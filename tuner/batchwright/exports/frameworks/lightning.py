"""Lightning: arguments of ``Trainer`` and the DataModule's batch size, as ``LightningCLI`` reads them.

Read from lightning 2.6.6: ``pytorch/trainer/trainer.py``, ``pytorch/plugins/precision/fsdp.py``, the loops.
"""

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import json_word, yaml_file
from batchwright.exports.spec_advice import OF_THE_WORKLOAD, dropped_samples, left_out, nodes, token_weighting
from batchwright.schemas.workload import Precision

PRECISIONS: dict[Precision, str] = {
    "fp32": "32-true",
    "bf16": "bf16-true",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "16-mixed",
}
"""Lightning's names of precisions."""

_TOKENS = (
    "Lightning divides each micro-batch's loss by `accumulate_grad_batches`, so an update takes the mean of means: "
    "tokens of short micro-batches count for more. Pack or bucket samples so that micro-batches have as many "
    "tokens, or use `automatic_optimization = False` and divide by the window's tokens; the `pytorch` export does."
)


def _write(context: ExportContext) -> TargetOutput:
    comments = (
        "Read by `LightningCLI(Model, DataModule)`: python train.py fit --config lightning.yaml",
        "or by hand: Trainer(**settings['trainer']), DataModule(**settings['data']).",
    )
    document: dict[str, JsonValue] = {**_settings(context)}
    return TargetOutput(
        (yaml_file("lightning.yaml", context, document, comments=comments),), warnings=_warnings(context)
    )


def _settings(context: ExportContext) -> dict[str, dict[str, JsonValue]]:
    """Keyword arguments of ``Trainer`` and of the DataModule."""
    spec = context.spec
    machines, devices = nodes(context)
    strategy = "fsdp" if _sharded(context) and not _cannot_clip(context) else "ddp"
    trainer: dict[str, JsonValue] = {
        "accelerator": "cpu" if context.on_cpu else "gpu",
        "devices": devices,
        "num_nodes": machines,
        "strategy": strategy if context.plan.world_size > 1 else "auto",
        "precision": PRECISIONS[spec.precision],
        "accumulate_grad_batches": context.plan.gradient_accumulation_steps,
        "gradient_clip_val": spec.gradient_clipping,
        **({"gradient_clip_algorithm": "norm"} if spec.gradient_clipping else {}),
    }
    return {"trainer": trainer, "data": {"batch_size": context.plan.micro_batch_size}}


def _sharded(context: ExportContext) -> bool:
    return context.spec.parallelism.strategy == "fsdp" and not context.on_cpu


def _cannot_clip(context: ExportContext) -> bool:
    """Return whether the strategy is replaced: Lightning's FSDP cannot clip by norm (``FSDPPrecision``)."""
    return _sharded(context) and context.spec.gradient_clipping is not None


def _arguments(context: ExportContext) -> tuple[str, ...]:
    settings = _settings(context).items()
    words = (f"--{name}.{key}={json_word(value)}" for name, values in settings for key, value in values.items())
    return ("fit", *words)


def _warnings(context: ExportContext) -> Warnings:
    found: Warnings = {}
    plan = context.plan
    found["data-loader-batch"] = (
        "Your DataModule sets the micro-batch: pass `batch_size` on to the training DataLoader (with "
        f"`drop_last=True`), {plan.micro_batch_size} samples on every rank."
    )
    found |= token_weighting(context, _TOKENS)
    found["tail-window"] = (
        "The last update of an epoch has fewer micro-batches, but each loss is still divided by "
        f"{plan.gradient_accumulation_steps}: the step is too small. Cut the epoch to a multiple of "
        f"{plan.effective_batch_size} samples, or make `limit_train_batches` a multiple of "
        f"{plan.gradient_accumulation_steps}. {dropped_samples(context, '`drop_last`')}"
    )
    if _cannot_clip(context):
        found["sharding-left-out"] = (
            "The strategy is `ddp`, because Lightning's `fsdp` cannot clip by norm. The probes measured a "
            "whole copy of the model on each device, so it fits."
        )
    found |= left_out(context, "optimizer-in-code", "schedule-in-code")
    return found | left_out(context, "activation-checkpointing-in-code", "compile-in-code", *OF_THE_WORKLOAD)


TARGET = Target(
    name="lightning",
    title="Lightning Trainer and DataModule",
    kind="framework",
    loop="lightning",
    versions=("2.6",),
    repeats_one_size=True,
    takes=frozenset({"processes_per_node"}),
    write=_write,
    arguments=_arguments,
    checked="loaded by lightning and trained with",
)
