"""NeMo AutoModel: keys of a recipe's YAML file. It derives the accumulation steps from the two batch sizes."""

from pydantic import JsonValue

from batchwright.exports import advice
from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import yaml_file
from batchwright.exports.spec_advice import left_out

_NEVER_REACHED = 1e9
"""Limit that turns clipping off: by default gradients are clipped at a norm of 1.0."""


def _batch(context: ExportContext) -> dict[str, int]:
    plan = context.plan
    return {"global_batch_size": plan.effective_batch_size, "local_batch_size": plan.micro_batch_size}


def _write(context: ExportContext) -> TargetOutput:
    spec = context.spec
    settings: dict[str, JsonValue] = {"step_scheduler": {**_batch(context)}}
    settings["clip_grad_norm"] = {"max_norm": spec.gradient_clipping or _NEVER_REACHED}
    settings["distributed"] = {"activation_checkpointing": spec.activation_checkpointing}
    return TargetOutput((yaml_file("nemo_automodel.yaml", context, settings),), warnings=_warnings(context))


def _arguments(context: ExportContext) -> tuple[str, ...]:
    return tuple(f"--step_scheduler.{name}={value}" for name, value in _batch(context).items())


def _warnings(context: ExportContext) -> Warnings:
    found = advice.measured_elsewhere(context, "NeMo AutoModel")
    found |= left_out(context, "longest-sample")
    found |= advice.packing(context, "`packed_sequence`")
    found |= advice.data_parallel_ranks(context, "`tp_size` x `pp_size` x `cp_size`")
    found["last-update-smaller"] = (
        "The last update of an epoch has fewer samples than the effective batch, and is weighted by its own tokens."
    )
    if context.spec.precision != "fp32":
        is_here = "it follows from `model.torch_dtype` and the strategy's mixed precision policy."
        found |= advice.precision_differs(context, is_here)
    return found


TARGET = Target(
    name="nemo-automodel",
    title="NeMo AutoModel",
    kind="framework",
    versions=("0.7",),
    repeats_one_size=True,
    write=_write,
    arguments=_arguments,
    arguments_leave="`clip_grad_norm` and `distributed`",
    checked="built into AutoModel's own step scheduler; other keys compared with the recorded ones",
)
