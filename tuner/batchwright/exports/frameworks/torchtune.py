"""torchtune: keys of a recipe's YAML file, and overrides for its command line."""

from __future__ import annotations

from pydantic import JsonValue

from batchwright.exports import advice
from batchwright.exports.base import ExportContext, Target, TargetOutput
from batchwright.exports.rendering import yaml_file
from batchwright.schemas.recommendation import Advice

_DTYPES = {"fp32": "fp32", "bf16": "bf16"}


def _batch(context: ExportContext) -> dict[str, int]:
    plan = context.plan
    return {
        "batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
    }


def _settings(context: ExportContext) -> dict[str, JsonValue]:
    spec = context.recommendation.request.workload
    settings: dict[str, JsonValue] = {
        **_batch(context),
        "clip_grad_norm": spec.gradient_clipping,
        "enable_activation_checkpointing": spec.activation_checkpointing,
    }
    if spec.precision in _DTYPES:
        settings["dtype"] = _DTYPES[spec.precision]
    return settings


def _write(context: ExportContext) -> TargetOutput:
    return TargetOutput((yaml_file("torchtune.yaml", context, _settings(context)),), warnings=_warnings(context))


def _arguments(context: ExportContext) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in _batch(context).items())


def _warnings(context: ExportContext) -> tuple[Advice, ...]:
    spec, plan = context.recommendation.request.workload, context.plan
    found = [
        *advice.measured_elsewhere(context, "torchtune"),
        *advice.packing(context, "`dataset.packed: True`"),
        advice.data_parallel_ranks(context, "`tensor_parallel_dim`"),
    ]
    if plan.gradient_accumulation_steps > 1:
        found.append(
            Advice(
                code="tail-leaks",
                message="Micro-batches that are left over at the end of an epoch join the first update of the next. "
                f"A `max_steps_per_epoch` of the data's samples // {plan.effective_batch_size} drops them.",
            )
        )
        found.append(
            Advice(
                code="token-weighting",
                message="A micro-batch is weighted by its labels before they are shifted: exact where each sample's "
                "first label is masked, as in prompts that are not trained on, else slightly off.",
            )
        )
        found.append(
            Advice(
                code="needs-separate-optimizer",
                message="`optimizer_in_bwd: True` is refused with more than one accumulation step: keep it False.",
            )
        )
    if spec.batch.sequence_length is not None:
        found.append(
            Advice(
                code="length-not-written",
                message=f"Set `tokenizer.max_seq_len: {spec.batch.sequence_length}`: longer samples take more memory "
                "than was probed.",
            )
        )
    if spec.precision not in _DTYPES:
        found.append(advice.precision_differs(context, is_here="`dtype` is the type of the weights, without autocast."))
    return tuple(found)


TARGET = Target(
    name="torchtune",
    title="torchtune",
    kind="framework",
    versions=("0.6",),
    repeats_one_size=True,
    write=_write,
    arguments=_arguments,
    arguments_leave="`clip_grad_norm`, `enable_activation_checkpointing` and `dtype`",
    checked="merged by torchtune's own parser of overrides; keys compared with those that its recipe reads",
)
