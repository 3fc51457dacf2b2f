"""Composer: arguments of its ``Trainer``, and the DataLoader's batch, which is a rank's part of an update.

Read from mosaicml 0.32.1: ``trainer/trainer.py``, ``core/data_spec.py``, ``core/precision.py``. Composer divides a
rank's batch into micro-batches of one size and what is left, and weighs each by its samples, so that no batch needs to
be a multiple of the micro-batch; all ranks' batches are taken to be alike.
"""

from __future__ import annotations

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput
from batchwright.exports.rendering import yaml_file
from batchwright.exports.spec_advice import (
    checkpointing_in_code,
    counts_tokens,
    lower_precision_in_code,
    nodes,
    of_the_workload,
    on_cpu,
    optimizer_in_code,
    replicated,
    schedule_in_code,
    spec_of,
)
from batchwright.schemas.recommendation import Advice

_PRECISIONS = {"fp32": "fp32", "bf16": "fp32", "bf16-mixed": "amp_bf16", "fp16-mixed": "amp_fp16"}


def _write(context: ExportContext) -> TargetOutput:
    comments = ("Trainer(**settings['trainer'], ...), DataLoader(..., **settings['train_dataloader']).",)
    document: dict[str, JsonValue] = {
        "trainer": _trainer(context),
        "train_dataloader": {"batch_size": context.plan.samples_per_rank, "drop_last": True},
    }
    return TargetOutput(
        (yaml_file("composer.yaml", context, document, comments=comments),), warnings=_warnings(context)
    )


def _trainer(context: ExportContext) -> dict[str, JsonValue]:
    """Keyword arguments of ``composer.Trainer``."""
    spec = spec_of(context)
    return {
        "device_train_microbatch_size": context.plan.micro_batch_size,
        "precision": _precision(context),
        "device": "cpu" if on_cpu(context) else "gpu",
        **({"compile_config": {}} if spec.compile else {}),
    }


def _precision(context: ExportContext) -> str:
    """Composer's precision: only fp32 on the CPU."""
    return "fp32" if on_cpu(context) else _PRECISIONS[spec_of(context).precision]


# --- warnings ---


def _warnings(context: ExportContext) -> tuple[Advice, ...]:
    return (
        _processes(context),
        *_tokens(context),
        _tail(context),
        *_autocast(context),
        *_clipping(context),
        optimizer_in_code(context),
        *schedule_in_code(context),
        *checkpointing_in_code(context),
        *lower_precision_in_code(context),
        *replicated(context),
        *of_the_workload(context),
    )


def _processes(context: ExportContext) -> Advice:
    plan, (machines, processes) = context.plan, nodes(context)
    start = f"`composer -n {processes} {context.options.script}`"
    if machines > 1:
        start += f" on each of {machines} machines, with its options `--world_size`, `--node_rank` and `--master_addr`"
    message = (
        f"The DataLoader's batch is that of one rank ({plan.samples_per_rank} samples of {plan.effective_batch_size}): "
        f"start exactly {plan.world_size} ({start})."
    )
    return Advice(code="world-size", message=message)


def _tokens(context: ExportContext) -> tuple[Advice, ...]:
    if not counts_tokens(spec_of(context)):
        return ()
    message = (
        "Micro-batches are weighed by their samples, so tokens of short ones count for more. Pass the Trainer "
        "`accumulate_train_batch_on_tokens=True`, and the DataLoader in a `DataSpec` whose `get_num_tokens_in_batch` "
        "returns the labels that count, as `{'total': ..., 'loss_generating': ...}`: without one the padded length "
        "counts, and batches other than dicts with `input_ids` count nothing."
    )
    return (Advice(code="token-weighting", message=message),)


def _tail(context: ExportContext) -> Advice:
    message = (
        f"`drop_last` leaves out the update at the end of an epoch that would have fewer than "
        f"{context.plan.effective_batch_size} samples. Use false to keep this update: its weight is correct."
    )
    return Advice(code="tail-window", message=message)


def _autocast(context: ExportContext) -> tuple[Advice, ...]:
    precision = spec_of(context).precision
    if not on_cpu(context) or precision in {"fp32", "bf16"}:
        return ()
    message = f"Composer has no {precision} on the CPU: this sets fp32, which takes more memory than was measured."
    return (Advice(code="precision", message=message),)


def _clipping(context: ExportContext) -> tuple[Advice, ...]:
    norm = spec_of(context).gradient_clipping
    if norm is None:
        return ()
    message = (
        "Clipping is an algorithm: pass the Trainer "
        f"`algorithms=[composer.algorithms.GradientClipping(clipping_type='norm', clipping_threshold={norm!r})]`."
    )
    return (Advice(code="gradient-clipping", message=message),)


TARGET = Target(
    name="composer",
    title="Composer Trainer arguments",
    kind="framework",
    versions=("0.32",),
    repeats_one_size=False,
    divides_shares=True,
    takes=frozenset({"script", "processes_per_node"}),
    write=_write,
    checked="loaded by composer and trained with",
)
