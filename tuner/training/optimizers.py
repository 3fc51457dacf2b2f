"""The optimizer and the learning-rate schedule of a spec."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, assert_never

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tuner.schemas.optimizer import OptimizerSpec, ScheduleSpec


def build_optimizer(spec: OptimizerSpec, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Build the torch optimizer of the trainable parameters, in the groups of the spec.

    Raises:
        SpecError: when a group has no parameter.
    """
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    optimizer_class = getattr(torch.optim, spec.torch_class)
    optimizer: torch.optim.Optimizer = optimizer_class(_groups(spec, trained), **spec.torch_arguments())
    return optimizer


def _groups(spec: OptimizerSpec, trained: list[tuple[str, nn.Parameter]]) -> list[Any]:
    """Parameters, or a torch group of the parameters that no group of the spec names, and one for each of these."""
    if not spec.groups:
        return [parameter for _, parameter in trained]
    groups: list[dict[str, Any]] = [{"params": []}, *({"params": [], **group.changes} for group in spec.groups)]
    for (_, parameter), number in zip(trained, spec.group_numbers([name for name, _ in trained]), strict=True):
        groups[number]["params"].append(parameter)
    return [group for group in groups if group["params"]]


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
    """Allocate the state of a spec's optimizer, with the values that it has before the first step.

    Parameters and random generators are not changed.
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
    for group in optimizer.param_groups:
        initial = {name: group.get(source, source) for name, source in _INITIAL_VALUES.get(type(optimizer), {}).items()}
        for parameter in group["params"]:
            for name, value in optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    value.fill_(initial.get(name, 0.0))


_INITIAL_VALUES: Mapping[type[torch.optim.Optimizer], Mapping[str, Any]] = {
    torch.optim.Adagrad: {"sum": "initial_accumulator_value"},
    torch.optim.ASGD: {"eta": "lr", "mu": 1.0},
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.Rprop: {"step_size": "lr"},
}
"""State that does not begin as zeros: a number, or the name of the group's field that has it."""
