"""DeepSpeed: its JSON configuration.

Read from deepspeed 0.19.8: ``runtime/config.py``, ``runtime/constants.py``, ``runtime/engine.py``. It asserts that
``train_batch_size`` is micro-batch x steps x ranks. ``gradient_clipping`` is 1.0 when left out; 0.0 is off, as every
place that clips asks for ``> 0.0`` first.
"""

from __future__ import annotations

from pydantic import JsonValue

from tuner.exports.base import Order, Target, Written
from tuner.exports.rendering import json_file
from tuner.exports.spec_advice import (
    checkpointing_in_code,
    compile_in_code,
    counts_tokens,
    learning_rate,
    of_the_workload,
    schedule_in_code,
    spec_of,
    torch_arguments,
    torch_class,
)
from tuner.schemas.recommendation import Advice

_AUTOCAST: dict[str, str] = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
_WEIGHTS = 3
"""The ZeRO stage that shards parameters, gradients and the optimizer's state, as FSDP does."""


def _write(order: Order) -> Written:
    return Written((json_file("deepspeed.json", _configuration(order)),), warnings=_warnings(order))


def _configuration(order: Order) -> dict[str, JsonValue]:
    """What ``DeepSpeedConfig`` reads. Mixed precision is torch's autocast over fp32 parameters, as was measured.

    Its own ``bf16`` and ``fp16`` keep parameters in the lower precision beside fp32 copies: other memory.
    """
    spec, figures = spec_of(order), order.figures
    dtype = _AUTOCAST.get(spec.precision)
    sharded = spec.parallelism.strategy == "fsdp" and figures.world_size > 1
    return {
        "train_batch_size": figures.effective_batch_size,
        "train_micro_batch_size_per_gpu": figures.micro_batch_size,
        "gradient_accumulation_steps": figures.gradient_accumulation_steps,
        "gradient_clipping": spec.gradient_clipping or 0.0,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "torch_autocast": {"enabled": dtype is not None, **({"dtype": dtype} if dtype else {})},
        "zero_optimization": {"stage": _WEIGHTS if sharded else 0},
        **({"zero_allow_untested_optimizer": True} if sharded and spec.optimizer.name == "sgd" else {}),
        "optimizer": _optimizer(order),
    }


def _optimizer(order: Order) -> dict[str, JsonValue]:
    """From torch itself, not DeepSpeed's fused kernels, which were not measured."""
    optimizer = spec_of(order).optimizer
    arguments = torch_arguments(optimizer)
    if optimizer.name == "sgd":
        return {"type": torch_class(optimizer), "params": arguments}
    decoupled: dict[str, JsonValue] = {"torch_adam": True, "adam_w_mode": optimizer.name == "adamw"}
    return {"type": torch_class(optimizer), "params": {**arguments, **decoupled}}


# --- warnings ---


def _warnings(order: Order) -> tuple[Advice, ...]:
    return (
        _processes(order),
        _loader(order),
        *_tokens(order),
        _tail(order),
        *_lower_precision(order),
        *learning_rate(order),
        *schedule_in_code(order),
        *checkpointing_in_code(order),
        *compile_in_code(order),
        *of_the_workload(order),
    )


def _processes(order: Order) -> Advice:
    figures = order.figures
    message = (
        f"Start exactly {figures.world_size} data-parallel rank(s): DeepSpeed refuses the configuration unless "
        f"{figures.micro_batch_size} x {figures.gradient_accumulation_steps} x ranks is {figures.effective_batch_size}."
    )
    return Advice(code="world-size", message=message)


def _loader(order: Order) -> Advice:
    message = (
        "A DataLoader of your own (not `training_data=` of `deepspeed.initialize`) needs "
        f"`batch_size={order.figures.micro_batch_size}, drop_last=True`: DeepSpeed counts micro-batches, not samples."
    )
    return Advice(code="data-loader-batch", message=message)


def _tokens(order: Order) -> tuple[Advice, ...]:
    if not counts_tokens(spec_of(order)):
        return ()
    message = (
        "`engine.backward` divides each micro-batch's loss by the accumulation steps, so an update takes the mean of "
        "means: tokens of short micro-batches count for more. Count the tokens of the window over all ranks before its "
        "first pass, and give `engine.backward` the loss sum x steps x ranks / tokens of the window."
    )
    return (Advice(code="token-weighting", message=message),)


def _tail(order: Order) -> Advice:
    figures = order.figures
    message = (
        f"DeepSpeed steps after each {figures.gradient_accumulation_steps} micro-batches and knows no epochs: the "
        "samples left of one join the first update of the next, and those left at the end never count. Cut the epoch "
        f"to a multiple of {figures.effective_batch_size} samples if an update must not span two."
    )
    return Advice(code="tail-window", message=message)


def _lower_precision(order: Order) -> tuple[Advice, ...]:
    if spec_of(order).precision != "bf16":
        return ()
    message = (
        "Parameters, gradients and the optimizer's state in bf16 were measured: hand over `model.to(torch.bfloat16)`, "
        "and leave `bf16` off, which would add fp32 copies of all parameters."
    )
    return (Advice(code="model-dtype", message=message),)


TARGET = Target(
    name="deepspeed",
    title="DeepSpeed configuration",
    kind="framework",
    versions=("0.19",),
    repeats_one_size=True,
    write=_write,
    checked="loaded by deepspeed and trained with",
)
