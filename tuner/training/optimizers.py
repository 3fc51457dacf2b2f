"""The optimizer and the learning-rate schedule of a spec."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import assert_never

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tuner.schemas.workload import OptimizerSpec, ScheduleSpec


def build_optimizer(spec: OptimizerSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the torch optimizer of the trainable parameters."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    chosen = {"foreach": (True, False), "fused": (None, True), "for-loop": (False, False), "default": (None, None)}
    foreach, fused = chosen[spec.implementation]
    rate, decay = spec.learning_rate, spec.weight_decay
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(
                trainable, lr=rate, betas=spec.betas, weight_decay=decay, foreach=foreach, fused=fused
            )
        case "adam":
            return torch.optim.Adam(
                trainable, lr=rate, betas=spec.betas, weight_decay=decay, foreach=foreach, fused=fused
            )
        case "sgd":
            return torch.optim.SGD(
                trainable, lr=rate, momentum=spec.momentum, weight_decay=decay, foreach=foreach, fused=fused
            )
        case _:
            assert_never(spec.name)


def build_schedule(spec: ScheduleSpec, optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
    """The learning rate over ``updates`` optimizer updates, as a factor of the spec's rate."""
    return LambdaLR(optimizer, lambda update: learning_rate_factor(spec, update, updates))


def learning_rate_factor(spec: ScheduleSpec, update: int, updates: int) -> float:
    """The factor of update number ``update``, counted from 0. Warm-up never starts at a rate of zero."""
    if update < spec.warmup_updates:
        return (update + 1) / spec.warmup_updates
    remaining = max(1, updates - spec.warmup_updates)
    progress = min(1.0, (update - spec.warmup_updates) / remaining)
    match spec.name:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(spec.name)


def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer's state, with the values that it has before the first step.

    For the optimizers of a spec, whose state begins as zeros. Parameters and random generators are not changed.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # a step of this rate moves nothing
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
