"""Lightning: arguments of ``Trainer`` and the DataModule's batch size, as ``LightningCLI`` reads them.

Read from lightning 2.6.6: ``pytorch/trainer/trainer.py``, ``pytorch/plugins/precision/fsdp.py``, the loops.
"""

from __future__ import annotations

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput
from batchwright.exports.rendering import json_word, yaml_file
from batchwright.exports.spec_advice import (
    checkpointing_in_code,
    compile_in_code,
    dropped_samples,
    nodes,
    of_the_workload,
    on_cpu,
    optimizer_in_code,
    schedule_in_code,
    spec_of,
    token_weighting,
)
from batchwright.schemas.recommendation import Advice
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
    document: dict[str, JsonValue] = {"trainer": _trainer(context), "data": _data(context)}
    return TargetOutput(
        (yaml_file("lightning.yaml", context, document, comments=comments),), warnings=_warnings(context)
    )


def _trainer(context: ExportContext) -> dict[str, JsonValue]:
    """Keyword arguments of ``Trainer``."""
    spec = spec_of(context)
    machines, devices = nodes(context)
    strategy = "fsdp" if _sharded(context) and not _cannot_clip(context) else "ddp"
    return {
        "accelerator": "cpu" if on_cpu(context) else "gpu",
        "devices": devices,
        "num_nodes": machines,
        "strategy": strategy if context.plan.world_size > 1 else "auto",
        "precision": PRECISIONS[spec.precision],
        "accumulate_grad_batches": context.plan.gradient_accumulation_steps,
        "gradient_clip_val": spec.gradient_clipping,
        **({"gradient_clip_algorithm": "norm"} if spec.gradient_clipping else {}),
    }


def _sharded(context: ExportContext) -> bool:
    return spec_of(context).parallelism.strategy == "fsdp" and not on_cpu(context)


def _cannot_clip(context: ExportContext) -> bool:
    """Return whether the strategy is replaced: Lightning's FSDP cannot clip by norm (``FSDPPrecision``)."""
    return _sharded(context) and spec_of(context).gradient_clipping is not None


def _data(context: ExportContext) -> dict[str, JsonValue]:
    """Keyword arguments of the DataModule."""
    return {"batch_size": context.plan.micro_batch_size}


def _arguments(context: ExportContext) -> tuple[str, ...]:
    sections = {"trainer": _trainer(context), "data": _data(context)}
    return (
        "fit",
        *(f"--{name}.{key}={json_word(value)}" for name, values in sections.items() for key, value in values.items()),
    )


# --- warnings ---


def _warnings(context: ExportContext) -> tuple[Advice, ...]:
    return (
        _loader(context),
        *token_weighting(context, _TOKENS),
        _tail(context),
        *_unsharded(context),
        optimizer_in_code(context),
        *schedule_in_code(context),
        *checkpointing_in_code(context),
        *compile_in_code(context),
        *of_the_workload(context),
    )


def _loader(context: ExportContext) -> Advice:
    message = (
        f"The micro-batch is your DataModule's: pass `batch_size` on to the training DataLoader (with "
        f"`drop_last=True`), {context.plan.micro_batch_size} samples on every rank."
    )
    return Advice(code="data-loader-batch", message=message)


def _tail(context: ExportContext) -> Advice:
    plan = context.plan
    message = (
        f"The last update of an epoch is made with the micro-batches that are left, each divided by "
        f"{plan.gradient_accumulation_steps} all the same: too small a step. Cut the epoch to a multiple of "
        f"{plan.effective_batch_size} samples, or make `limit_train_batches` a multiple of "
        f"{plan.gradient_accumulation_steps}. {dropped_samples(context, '`drop_last`')}"
    )
    return Advice(code="tail-window", message=message)


def _unsharded(context: ExportContext) -> tuple[Advice, ...]:
    if not _cannot_clip(context):
        return ()
    message = (
        "The strategy is `ddp` instead of `fsdp`, which cannot clip by norm in Lightning. A whole copy of the model on "
        "each device was measured, so it fits."
    )
    return (Advice(code="sharding-left-out", message=message),)


TARGET = Target(
    name="lightning",
    title="Lightning Trainer and DataModule",
    kind="framework",
    versions=("2.6",),
    repeats_one_size=True,
    takes=frozenset({"processes_per_node"}),
    write=_write,
    arguments=_arguments,
    checked="loaded by lightning and trained with",
)
