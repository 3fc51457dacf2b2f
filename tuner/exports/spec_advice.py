"""What exports to frameworks share: a spec in their words, and the warnings that hold for several of them."""

from __future__ import annotations

from pydantic import JsonValue

from tuner.errors import ExportError
from tuner.exports.base import Order
from tuner.schemas.recommendation import Advice
from tuner.schemas.workload import (
    Mlp,
    OptimizerSpec,
    ReferenceModel,
    ResNet,
    ScheduleSpec,
    TransformersModel,
    WorkloadSpec,
)

_MOST_PER_NODE = 8
_WHOLE_SAMPLES = {"sequence-classification", "image-classification"}
"""Tasks whose loss counts samples, not tokens."""
_CLASSES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
_SWITCHES: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for-loop": {"foreach": False},
}


def spec_of(order: Order) -> WorkloadSpec:
    """What is trained."""
    return order.recommendation.request.spec


def on_cpu(order: Order) -> bool:
    """Whether the CPU was probed."""
    return order.recommendation.device.kind == "cpu"


def counts_tokens(spec: WorkloadSpec) -> bool:
    """Whether the loss may weigh samples by their tokens, so that the mean of micro-batches' means is another mean."""
    model = spec.model
    if isinstance(model, TransformersModel):
        return model.task not in _WHOLE_SAMPLES
    if isinstance(model, ReferenceModel):
        return not isinstance(model.architecture, (Mlp, ResNet))
    return True


def nodes(order: Order) -> tuple[int, int]:
    """Nodes, and processes on each: as many as asked for, or the most up to 8 that divide the world size.

    Raises:
        ExportError: when they do not divide it.
    """
    world, asked = order.figures.world_size, order.options.processes_per_node
    if asked is None:
        asked = max(it for it in range(1, _MOST_PER_NODE + 1) if world % it == 0)
    if world % asked:
        fitting = ", ".join(str(it) for it in range(1, min(world, 64) + 1) if world % it == 0)
        raise ExportError(
            "wrong-option",
            f"{world} processes (one per device) cannot be spread over nodes of {asked}: `processes_per_node` has to "
            f"divide {world}, so {fitting}",
        )
    return world // asked, asked


# --- the optimizer ---


def torch_class(optimizer: OptimizerSpec) -> str:
    """The optimizer's class in ``torch.optim``."""
    return _CLASSES[optimizer.name]


def torch_arguments(optimizer: OptimizerSpec) -> dict[str, JsonValue]:
    """What that class is constructed with, apart from parameters."""
    own: dict[str, JsonValue] = (
        {"momentum": optimizer.momentum} if optimizer.name == "sgd" else {"betas": list(optimizer.betas)}
    )
    return {
        "lr": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        **own,
        **_SWITCHES[optimizer.implementation],
    }


def torch_call(optimizer: OptimizerSpec, parameters: str = "model.parameters()") -> str:
    """The same as Python."""
    arguments = "".join(f", {name}={_literal(value)}" for name, value in torch_arguments(optimizer).items())
    return f"torch.optim.{torch_class(optimizer)}({parameters}{arguments})"


def _literal(value: JsonValue) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)


# --- warnings ---


def of_the_workload(order: Order) -> tuple[Advice, ...]:
    """What no framework's configuration can hold: the longest sample, and averages of the weights."""
    return (*longest_sample(order), *moving_average(order))


def longest_sample(order: Order) -> tuple[Advice, ...]:
    """Of what samples the memory was measured with."""
    batch = spec_of(order).batch
    worst = [f"{batch.sequence_length} tokens"] if batch.sequence_length else []
    worst += [f"{batch.image_size} x {batch.image_size} pixels"] if batch.image_size else []
    if not worst:
        return ()
    message = (
        f"What fits was measured with samples of {' and '.join(worst)}: truncate or resize longer ones, or they take "
        "more memory than was measured."
    )
    return (Advice(code="longest-sample", message=message),)


def moving_average(order: Order) -> tuple[Advice, ...]:
    """For exports that do not keep the average of the weights that the spec asks for."""
    decay = spec_of(order).ema_decay
    if decay is None:
        return ()
    message = (
        f"The moving average of the weights (decay {decay}) is not part of this export: keep it in your own code, with "
        "`torch.optim.swa_utils.AveragedModel`. Its memory was measured."
    )
    return (Advice(code="moving-average", message=message),)


def optimizer_in_code(order: Order) -> Advice:
    """For frameworks whose optimizer is made in the user's program."""
    call = torch_call(spec_of(order).optimizer)
    message = f"The optimizer is your program's: `{call}` is what was measured."
    return Advice(code="optimizer-in-code", message=message)


def learning_rate(order: Order) -> tuple[Advice, ...]:
    """For exports that write the rate: a spec that never said one has its default."""
    rate = spec_of(order).optimizer.learning_rate
    if rate != OptimizerSpec().learning_rate:
        return ()
    message = f"The learning rate of {rate} is the default of a spec, in place of this framework's: is it yours?"
    return (Advice(code="default-learning-rate", message=message),)


def schedule_in_code(order: Order) -> tuple[Advice, ...]:
    """For frameworks whose learning-rate schedule is made in the user's program."""
    schedule = spec_of(order).schedule
    if schedule == ScheduleSpec():
        return ()
    message = (
        f"The learning-rate schedule is not written: `{schedule.name}` after {schedule.warmup_updates} updates of "
        "warm-up, one step of it per update, whatever the accumulation."
    )
    return (Advice(code="schedule-in-code", message=message),)


def checkpointing_in_code(order: Order) -> tuple[Advice, ...]:
    """For frameworks that leave activation checkpointing to the model."""
    if not spec_of(order).activation_checkpointing:
        return ()
    message = (
        "Activation checkpointing is your program's: call `model.gradient_checkpointing_enable()` (transformers), or "
        "use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` in the model. Without it the micro-batch "
        "does not fit."
    )
    return (Advice(code="activation-checkpointing-in-code", message=message),)


def compile_in_code(order: Order) -> tuple[Advice, ...]:
    """For frameworks that leave compiling to the program."""
    if not spec_of(order).compile:
        return ()
    message = "Compiling is your program's: `model = torch.compile(model)`. It changes memory, and was measured."
    return (Advice(code="compile-in-code", message=message),)


def replicated(order: Order) -> tuple[Advice, ...]:
    """For exports that do not shard what the spec would."""
    if spec_of(order).parallelism.strategy != "fsdp":
        return ()
    message = (
        "Sharding (FSDP) is not part of this export. A whole copy of the model on each device was measured, so it fits "
        "without; sharded, it takes less."
    )
    return (Advice(code="sharding-left-out", message=message),)


def lower_precision_in_code(order: Order) -> tuple[Advice, ...]:
    """For frameworks that take the model in the type it has."""
    if spec_of(order).precision != "bf16":
        return ()
    message = (
        "Parameters and gradients in bf16 were measured: load or convert the model so (`dtype=torch.bfloat16`, "
        "`model.to(torch.bfloat16)`)."
    )
    return (Advice(code="model-dtype", message=message),)


def dropped_samples(order: Order, loader: str) -> str:
    """Why the last, short micro-batch of an epoch is dropped, and how to lose no sample."""
    batch = order.figures.effective_batch_size
    return (
        f"{loader} drops the last micro-batch of an epoch when it is short: kept, it would count as much as a full "
        "one, or be filled up with samples that were seen already. An epoch that is a multiple of "
        f"{batch} samples loses none."
    )
