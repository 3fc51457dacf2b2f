"""NeMo AutoModel: keys of a recipe's YAML file. It derives the accumulation steps from the two batch sizes."""

from __future__ import annotations

from pydantic import JsonValue

from tuner.exports import advice
from tuner.exports.base import Order, Target, Written
from tuner.exports.rendering import yaml_file
from tuner.exports.spec_advice import longest_sample
from tuner.schemas.recommendation import Advice

_NEVER_REACHED = 1e9
"""Gradients are clipped at a norm of 1.0 where nothing is said, and nothing else turns that off."""


def _batch(order: Order) -> dict[str, int]:
    figures = order.figures
    return {"global_batch_size": figures.effective_batch_size, "local_batch_size": figures.micro_batch_size}


def _write(order: Order) -> Written:
    spec = order.recommendation.request.spec
    settings: dict[str, JsonValue] = {"step_scheduler": {**_batch(order)}}
    settings["clip_grad_norm"] = {"max_norm": spec.gradient_clipping or _NEVER_REACHED}
    settings["distributed"] = {"activation_checkpointing": spec.activation_checkpointing}
    return Written((yaml_file("nemo_automodel.yaml", order, settings),), warnings=_warnings(order))


def _arguments(order: Order) -> tuple[str, ...]:
    return tuple(f"--step_scheduler.{name}={value}" for name, value in _batch(order).items())


def _warnings(order: Order) -> tuple[Advice, ...]:
    spec = order.recommendation.request.spec
    found = [
        *advice.measured_elsewhere(order, "NeMo AutoModel"),
        *longest_sample(order),
        advice.packing("`packed_sequence`"),
        advice.data_parallel_ranks(order, "`tp_size` x `pp_size` x `cp_size`"),
        Advice(
            code="last-update-smaller",
            message="The last update of an epoch takes what is left of the data, with fewer samples than the effective "
            "batch; it is weighted by its own tokens.",
        ),
    ]
    if spec.precision != "fp32":
        is_here = "it is a matter of `model.torch_dtype` and of the strategy's mixed precision policy."
        found.append(advice.precision_differs(order, is_here=is_here))
    return tuple(found)


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
