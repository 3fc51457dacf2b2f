"""Megatron-LM: flags of its training scripts. It derives the accumulation steps from the two batch sizes."""

import shlex

from batchwright.exports import advice
from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import export_lines, origin, script_file, unset_line


def _arguments(context: ExportContext) -> tuple[str, ...]:
    spec, plan = context.spec, context.plan
    words = [
        f"--micro-batch-size={plan.micro_batch_size}",
        f"--global-batch-size={plan.effective_batch_size}",
        f"--clip-grad={spec.gradient_clipping or 0.0}",
    ]
    if spec.batch.sequence_length is not None:
        words.append(f"--seq-length={spec.batch.sequence_length}")
    if spec.activation_checkpointing:
        words += ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    return tuple(words)


def _write(context: ExportContext) -> TargetOutput:
    lines = "".join(f"  {shlex.quote(word)}\n" for word in _arguments(context))
    content = (
        f"{origin(context)}"
        "# To be sourced by a bash script that then passes them on:\n"
        '#   torchrun ... pretrain_gpt.py "${BATCH_ARGS[@]}" "${MODEL_ARGS[@]}" ...\n'
        f"{unset_line(context)}{export_lines(context.recommendation.environment)}"
        f"BATCH_ARGS=(\n{lines})\n"
    )
    return TargetOutput((script_file("megatron_arguments.sh", content),), warnings=_warnings(context))


def _warnings(context: ExportContext) -> Warnings:
    spec, plan = context.spec, context.plan
    found = advice.measured_elsewhere(context, "Megatron-LM")
    found |= advice.data_parallel_ranks(context, "tensor x pipeline x context parallel size")
    found["batch-size-schedules"] = (
        "`--rampup-batch-size` and `--step-batch-size-schedule` start with another effective batch, and "
        "`--decrease-batch-size-if-needed` lowers it silently: leave them out to train with "
        f"{plan.effective_batch_size} samples per update."
    )
    if spec.batch.packing is not None:
        flags = "`--reset-position-ids`, `--reset-attention-mask` and `--eod-mask-loss`"
        found |= advice.packing(context, flags)
    if plan.gradient_accumulation_steps * plan.world_size > 1:
        found["token-weighting"] = (
            "Each micro-batch's loss is averaged over its own tokens, so accumulated updates differ from "
            "full-batch ones if samples have different numbers of labelled tokens: add "
            "`--calculate-per-token-loss`."
        )
    if spec.precision != "fp32":
        is_here = "`--bf16` and `--fp16` hold the weights in 16 bits, with a 32-bit copy in the optimizer."
        found |= advice.precision_differs(context, is_here)
    return found


TARGET = Target(
    name="megatron",
    title="Megatron-LM",
    kind="framework",
    versions=("0.16",),
    repeats_one_size=True,
    write=_write,
    arguments=_arguments,
    checked="flags compared with the recorded ones of Megatron-LM; steps derived by megatron-core's own calculator",
)
