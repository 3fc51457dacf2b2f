"""Accelerate: the configuration of ``accelerate launch``, and the environment that its ``Accelerator`` reads.

Read from accelerate 1.15.0: ``commands/config/config_args.py``, ``commands/launch.py``, ``accelerator.py``. A
configuration holds no micro-batch, which is the DataLoader's, and no accumulation steps but DeepSpeed's; those are read
from ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``, which wins over the argument of ``Accelerator``.
"""

from __future__ import annotations

from pydantic import JsonValue

from tuner.exports.base import Order, Target, Written
from tuner.exports.rendering import (
    exports_of,
    figures_in_environment,
    origin,
    program_path,
    script_file,
    shell_words,
    unset_of,
    yaml_file,
)
from tuner.exports.spec_advice import (
    checkpointing_in_code,
    counts_tokens,
    dropped_samples,
    lower_precision_in_code,
    nodes,
    of_the_workload,
    on_cpu,
    optimizer_in_code,
    schedule_in_code,
    spec_of,
)
from tuner.schemas.recommendation import Advice
from tuner.schemas.workload import ScheduleSpec, TransformersModel

_CONFIG, _LAUNCH = "accelerate.yaml", "launch.sh"
_PRECISIONS = {"fp32": "no", "bf16": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


def _write(order: Order) -> Written:
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(order.figures.gradient_accumulation_steps)}
    files = (
        yaml_file(_CONFIG, order, _configuration(order), comments=(_describe_loader(order),)),
        script_file(_LAUNCH, _launch(order, {**figures_in_environment(order), **variables})),
    )
    return Written(files, ("sh", _LAUNCH), _warnings(order), variables)


def _configuration(order: Order) -> dict[str, JsonValue]:
    """What ``ClusterConfig`` holds."""
    spec = spec_of(order)
    machines, _ = nodes(order)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(order),
        "num_processes": order.figures.world_size,
        "num_machines": machines,
        "machine_rank": 0,
        "mixed_precision": _PRECISIONS[spec.precision],
        "use_cpu": on_cpu(order),
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "debug": False,
        "enable_cpu_affinity": False,
        **({"fsdp_config": _sharding(order)} if _kind(order) == "FSDP" else {}),
        **({"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if spec.compile else {}),
    }


def _kind(order: Order) -> str:
    if order.figures.world_size == 1:
        return "NO"
    if on_cpu(order):
        return "MULTI_CPU"
    return "FSDP" if spec_of(order).parallelism.strategy == "fsdp" else "MULTI_GPU"


def _sharding(order: Order) -> dict[str, JsonValue]:
    spec = spec_of(order)
    by_block = isinstance(spec.model, TransformersModel)  # the library's models name their blocks
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if by_block else "NO_WRAP",
        "fsdp_activation_checkpointing": spec.activation_checkpointing,
    }


def _launch(order: Order, variables: dict[str, str]) -> str:
    script = program_path(order.options.script)
    command: tuple[str, ...] = ("accelerate", "launch", "--config_file", _CONFIG, script)
    if _kind(order) == "MULTI_CPU":
        variables = {**variables, **_read_from_environment(order)}
        command = ("torchrun", *_ranks_on_cpu(order), script)
    settings = f"{unset_of(order)}{exports_of(variables)}"
    return f'#!/bin/sh\n{origin(order)}set -eu\n{settings}exec {shell_words(command)} "$@"\n'


# --- ranks on CPUs: without MPI, `accelerate launch` would start one ---


def _read_from_environment(order: Order) -> dict[str, str]:
    """What `accelerate launch` would tell its processes."""
    spec = spec_of(order)
    compiled = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"} if spec.compile else {}
    return {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": _PRECISIONS[spec.precision], **compiled}


def _ranks_on_cpu(order: Order) -> tuple[str, ...]:
    machines, processes = nodes(order)
    where = f"--nnodes={machines}" if machines > 1 else "--standalone"
    return (where, f"--nproc-per-node={processes}")


# --- warnings ---


def _warnings(order: Order) -> tuple[Advice, ...]:
    sharded = _kind(order) == "FSDP"
    return (
        Advice(code="data-loader-batch", message=_describe_loader(order)),
        *_tokens(order),
        _tail(order),
        _clipping(order),
        optimizer_in_code(order),
        *schedule_in_code(order),
        *_schedule_of_ranks(order),
        *(() if sharded else checkpointing_in_code(order)),
        *lower_precision_in_code(order),
        *_on_cpus(order),
        *_machines(order),
        *of_the_workload(order),
    )


def _describe_loader(order: Order) -> str:
    size = order.figures.micro_batch_size
    return (
        f"The micro-batch is the DataLoader's: `DataLoader(..., batch_size={size}, drop_last=True)`, or "
        '`int(os.environ["BATCHWRIGHT_MICRO_BATCH_SIZE"])`. Leave `split_batches` off: with it that size would be all '
        "ranks' together."
    )


def _tokens(order: Order) -> tuple[Advice, ...]:
    if not counts_tokens(spec_of(order)):
        return ()
    figures = order.figures
    factor = " * ".join(str(it) for it in (figures.gradient_accumulation_steps, figures.world_size))
    message = (
        "`accelerator.backward` divides each micro-batch's loss by the accumulation steps, so an update takes the mean "
        "of means: tokens of short micro-batches count for more. Count the tokens of the window over all ranks before "
        f"its first pass, and give it `loss_sum * {factor} / tokens_of_the_window`."
    )
    return (Advice(code="token-weighting", message=message),)


def _tail(order: Order) -> Advice:
    figures = order.figures
    message = (
        f"The last update of an epoch is made with the micro-batches that are left, each divided by "
        f"{figures.gradient_accumulation_steps} all the same: too small a step. Cut the epoch to a multiple of "
        f"{figures.effective_batch_size} samples. {dropped_samples(order, '`drop_last`')}"
    )
    return Advice(code="tail-window", message=message)


def _clipping(order: Order) -> Advice:
    norm = spec_of(order).gradient_clipping
    if norm is None:
        message = "Gradients were not clipped where it was measured: leave `accelerator.clip_grad_norm_` out."
    else:
        message = (
            f"Clip in your loop, once per update: `if accelerator.sync_gradients: accelerator.clip_grad_norm_("
            f"model.parameters(), {norm!r})`."
        )
    return Advice(code="gradient-clipping", message=message)


def _schedule_of_ranks(order: Order) -> tuple[Advice, ...]:
    """What `AcceleratedScheduler.step` does without `split_batches`."""
    ranks = order.figures.world_size
    if ranks == 1 or spec_of(order).schedule == ScheduleSpec():
        return ()
    message = (
        f"A scheduler that went through `accelerator.prepare` makes {ranks} steps (one for each rank) per update, and "
        "is at its end after a part of the run: leave it out of `prepare` and step it once per update, where "
        "`accelerator.sync_gradients` is true."
    )
    return (Advice(code="schedule-steps-per-rank", message=message),)


def _on_cpus(order: Order) -> tuple[Advice, ...]:
    if _kind(order) != "MULTI_CPU":
        return ()
    message = (
        f"On CPUs `accelerate launch` starts one process unless it is told of MPI, whatever `num_processes` says, and "
        f"the effective batch shrinks to a rank's: {_LAUNCH} uses torchrun."
    )
    return (Advice(code="ranks-on-cpu", message=message),)


def _machines(order: Order) -> tuple[Advice, ...]:
    machines, _ = nodes(order)
    if machines == 1:
        return ()
    gpu = "`--machine_rank`, `--main_process_ip` and `--main_process_port`"
    options = "`--rdzv-backend=c10d` and `--rdzv-endpoint`" if on_cpu(order) else gpu
    message = (
        f"It runs on {machines} machines: start `sh {_LAUNCH}` on each, with {options} put before the script's name in "
        f"{_LAUNCH}."
    )
    return (Advice(code="several-machines", message=message),)


TARGET = Target(
    name="accelerate",
    title="Accelerate configuration",
    kind="framework",
    versions=("1.15",),
    repeats_one_size=True,
    takes=frozenset({"script", "processes_per_node"}),
    write=_write,
    checked="loaded by accelerate and trained with",
)
