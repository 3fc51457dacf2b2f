"""Accelerate: the configuration of ``accelerate launch``, and the environment that its ``Accelerator`` reads.

Read from accelerate 1.15.0: ``commands/config/config_args.py``, ``commands/launch.py``, ``accelerator.py``. A
configuration holds no micro-batch, which is the DataLoader's, and no accumulation steps but DeepSpeed's; those are read
from ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, which wins over the argument of ``Accelerator``.
"""

import shlex

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import (
    export_lines,
    origin,
    plan_variables,
    program_path,
    script_file,
    unset_line,
    yaml_file,
)
from batchwright.exports.spec_advice import OF_THE_WORKLOAD, dropped_samples, left_out, nodes, token_weighting
from batchwright.schemas.optimizer import ScheduleSpec
from batchwright.schemas.workload import TransformersModel

_CONFIG, _LAUNCH = "accelerate.yaml", "launch.sh"
_PRECISIONS = {"fp32": "no", "bf16": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


def _write(context: ExportContext) -> TargetOutput:
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(context.plan.gradient_accumulation_steps)}
    files = (
        yaml_file(_CONFIG, context, _configuration(context), comments=(_describe_loader(context),)),
        script_file(_LAUNCH, _launch(context, {**plan_variables(context), **variables})),
    )
    return TargetOutput(files, ("sh", _LAUNCH), _warnings(context), variables)


def _configuration(context: ExportContext) -> dict[str, JsonValue]:
    """Fields of ``ClusterConfig``."""
    spec = context.spec
    machines, _ = nodes(context)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(context),
        "num_processes": context.plan.world_size,
        "num_machines": machines,
        "machine_rank": 0,
        "mixed_precision": _PRECISIONS[spec.precision],
        "use_cpu": context.on_cpu,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "debug": False,
        "enable_cpu_affinity": False,
        **({"fsdp_config": _sharding(context)} if _kind(context) == "FSDP" else {}),
        **({"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if spec.compile else {}),
    }


def _kind(context: ExportContext) -> str:
    if context.plan.world_size == 1:
        return "NO"
    if context.on_cpu:
        return "MULTI_CPU"
    return "FSDP" if context.spec.parallelism.strategy == "fsdp" else "MULTI_GPU"


def _sharding(context: ExportContext) -> dict[str, JsonValue]:
    spec = context.spec
    by_block = isinstance(spec.model, TransformersModel)  # the library's models name their blocks
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if by_block else "NO_WRAP",
        "fsdp_activation_checkpointing": spec.activation_checkpointing,
    }


def _launch(context: ExportContext, variables: dict[str, str]) -> str:
    script = program_path(context.options.script)
    command: tuple[str, ...] = ("accelerate", "launch", "--config_file", _CONFIG, script)
    if _kind(context) == "MULTI_CPU":  # without MPI, `accelerate launch` would start one rank
        spec = context.spec
        compiled = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"} if spec.compile else {}
        own = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": _PRECISIONS[spec.precision]}
        variables = {**variables, **own, **compiled}  # that `accelerate launch` sets for its processes
        machines, processes = nodes(context)
        where = f"--nnodes={machines}" if machines > 1 else "--standalone"
        command = ("torchrun", where, f"--nproc-per-node={processes}", script)
    settings = f"{unset_line(context)}{export_lines(variables)}"
    return f'#!/bin/sh\n{origin(context)}set -eu\n{settings}exec {shlex.join(command)} "$@"\n'


# --- warnings ---


def _warnings(context: ExportContext) -> Warnings:
    found: Warnings = {}
    found["data-loader-batch"] = _describe_loader(context)
    plan, kind, norm = context.plan, _kind(context), context.spec.gradient_clipping
    factor = " * ".join(str(item) for item in (plan.gradient_accumulation_steps, plan.world_size))
    message = (
        "`accelerator.backward` divides each micro-batch's loss by the accumulation steps, so an update takes the mean "
        "of means: tokens of short micro-batches count for more. Count the tokens of the window over all ranks before "
        f"its first pass, and give it `loss_sum * {factor} / tokens_of_the_window`."
    )
    found |= token_weighting(context, message)
    found["tail-window"] = (
        "The last update of an epoch has fewer micro-batches, but each loss is still divided by "
        f"{plan.gradient_accumulation_steps}: the step is too small. Cut the epoch to a multiple of "
        f"{plan.effective_batch_size} samples. {dropped_samples(context, '`drop_last`')}"
    )
    if norm is None:
        message = "The probes did not clip gradients: leave `accelerator.clip_grad_norm_` out."
    else:
        message = (
            f"Clip in your loop, once per update: `if accelerator.sync_gradients: accelerator.clip_grad_norm_("
            f"model.parameters(), {norm!r})`."
        )
    found["gradient-clipping"] = message
    found |= left_out(context, "optimizer-in-code", "schedule-in-code")
    if plan.world_size > 1 and context.spec.schedule != ScheduleSpec():
        found["schedule-steps-per-rank"] = (
            f"A scheduler passed to `accelerator.prepare` makes {plan.world_size} steps per update (one for "
            "each rank), so it ends too early: leave it out of `prepare`, and step it once per update, when "
            "`accelerator.sync_gradients` is true."
        )
    if kind != "FSDP":
        found |= left_out(context, "activation-checkpointing-in-code")
    found |= left_out(context, "model-dtype")
    if kind == "MULTI_CPU":
        found["ranks-on-cpu"] = (
            "On CPUs `accelerate launch` starts one process unless MPI is configured, regardless of "
            f"`num_processes`, and the effective batch would shrink to one rank's share: {_LAUNCH} uses "
            "torchrun instead."
        )
    found |= _several_machines(context)
    return found | left_out(context, *OF_THE_WORKLOAD)


def _describe_loader(context: ExportContext) -> str:
    size = context.plan.micro_batch_size
    return (
        f"Set the micro-batch size in your DataLoader: `DataLoader(..., batch_size={size}, drop_last=True)`, "
        'or `int(os.environ["BATCHWRIGHT_MICRO_BATCH_SIZE"])`. Leave `split_batches` off: it would divide '
        "that size among all ranks."
    )


def _several_machines(context: ExportContext) -> Warnings:
    found: Warnings = {}
    machines, _ = nodes(context)
    if machines > 1:
        gpu = "`--machine_rank`, `--main_process_ip` and `--main_process_port`"
        options = "`--rdzv-backend=c10d` and `--rdzv-endpoint`" if context.on_cpu else gpu
        found["several-machines"] = (
            f"The run takes {machines} machines: start `sh {_LAUNCH}` on each, with {options} before the "
            f"script's name in {_LAUNCH}."
        )
    return found


TARGET = Target(
    name="accelerate",
    title="Accelerate configuration",
    kind="framework",
    loop="plain",
    versions=("1.15",),
    repeats_one_size=True,
    takes=frozenset({"script", "processes_per_node"}),
    write=_write,
    checked="loaded by accelerate and trained with",
)
