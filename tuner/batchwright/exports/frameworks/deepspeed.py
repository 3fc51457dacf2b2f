"""DeepSpeed: its JSON configuration.

Read from deepspeed 0.19.8: ``runtime/config.py``, ``runtime/constants.py``, ``runtime/engine.py``. It asserts that
``train_batch_size`` is micro-batch x steps x ranks. ``gradient_clipping`` is 1.0 when left out; 0.0 is off, as every
place that clips tests ``> 0.0`` first.
"""

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.rendering import json_file
from batchwright.exports.spec_advice import OF_THE_WORKLOAD, left_out, token_weighting
from batchwright.units import counted

_AUTOCAST: dict[str, str] = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
_ADAMS = frozenset({"adam", "adamw"})
_WEIGHTS = 3
"""The ZeRO stage that shards parameters, gradients and the optimizer's state, as FSDP does."""

_TOKENS = (
    "`engine.backward` divides each micro-batch's loss by the accumulation steps, so an update takes the mean of "
    "means: tokens of short micro-batches count for more. Count the tokens of the window over all ranks before its "
    "first pass, and give `engine.backward` the loss sum x steps x ranks / tokens of the window."
)


def _write(context: ExportContext) -> TargetOutput:
    return TargetOutput((json_file("deepspeed.json", _configuration(context)),), warnings=_warnings(context))


def _configuration(context: ExportContext) -> dict[str, JsonValue]:
    """Fields of ``DeepSpeedConfig``. Mixed precision is torch's autocast over fp32 parameters, as was measured.

    Its own ``bf16`` and ``fp16`` keep parameters in the lower precision beside fp32 copies: other memory.
    """
    spec, plan = context.spec, context.plan
    dtype = _AUTOCAST.get(spec.precision)
    sharded = spec.parallelism.strategy == "fsdp" and plan.world_size > 1
    return {
        "train_batch_size": plan.effective_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "gradient_clipping": spec.gradient_clipping or 0.0,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "torch_autocast": {"enabled": dtype is not None, **({"dtype": dtype} if dtype else {})},
        "zero_optimization": {"stage": _WEIGHTS if sharded else 0},
        **({"zero_allow_untested_optimizer": True} if sharded and spec.optimizer.name not in _ADAMS else {}),
        **({"optimizer": _optimizer(context)} if spec.optimizer.is_of_torch else {}),
    }


def _optimizer(context: ExportContext) -> dict[str, JsonValue]:
    """The optimizer: torch's own, not DeepSpeed's fused kernels, which were not measured."""
    optimizer = context.spec.optimizer
    arguments = optimizer.torch_arguments()
    if optimizer.name in _ADAMS:
        arguments |= {"torch_adam": True, "adam_w_mode": optimizer.name == "adamw"}
    return {"type": optimizer.torch_class, "params": arguments}


def _warnings(context: ExportContext) -> Warnings:
    found: Warnings = {}
    plan = context.plan
    found["world-size"] = (
        f"Start exactly {counted(plan.world_size, 'data-parallel rank')}: DeepSpeed rejects the configuration "
        f"unless {plan.micro_batch_size} x {plan.gradient_accumulation_steps} x ranks is "
        f"{plan.effective_batch_size}."
    )
    found["data-loader-batch"] = (
        "A DataLoader of your own (not `training_data=` of `deepspeed.initialize`) needs "
        f"`batch_size={plan.micro_batch_size}, drop_last=True`: DeepSpeed counts micro-batches, not samples."
    )
    found |= token_weighting(context, _TOKENS)
    found["tail-window"] = (
        f"DeepSpeed steps after every {plan.gradient_accumulation_steps} micro-batches, across epochs: an "
        "epoch's leftover samples join the next epoch's first update, and the last leftovers are never used. "
        f"Cut the epoch to a multiple of {plan.effective_batch_size} samples if an update must not span two."
    )
    if context.spec.precision == "bf16":
        found["model-dtype"] = (
            "The probes kept parameters, gradients and optimizer state in bf16: pass "
            "`model.to(torch.bfloat16)`, and leave `bf16` off, which would add fp32 copies of all parameters."
        )
    found |= left_out(context, "default-learning-rate", "schedule-in-code")
    found |= left_out(context, "activation-checkpointing-in-code", "compile-in-code")
    if not context.spec.optimizer.is_of_torch:
        found |= left_out(context, "optimizer-in-code")
    return found | left_out(context, *OF_THE_WORKLOAD)


TARGET = Target(
    name="deepspeed",
    title="DeepSpeed configuration",
    kind="framework",
    versions=("0.19",),
    repeats_one_size=True,
    write=_write,
    checked="loaded by deepspeed and trained with",
)
