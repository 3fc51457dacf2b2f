"""Checks of the arguments of ``GradientAccumulation``: what would fail later with another message, or train nothing."""

import inspect
import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import get_args

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.plans import Plan, UniformPlan
from batchwright.schemas.recommendation import Recommendation
from batchwright.suggestions import suggestion
from batchwright.training.accumulation.collectives import Ranks
from batchwright.training.accumulation.gradient_sums import Gathering
from batchwright.training.micro_batches.argument_checks import shown, wrong_argument

_FLAGS = ("recovers", "lock_step", "checks_coupling")


def require_arguments(model: object, optimizer: object, options: Mapping[str, object]) -> None:
    """Check the arguments of ``GradientAccumulation``.

    Args:
        model: its model.
        optimizer: its optimizer.
        options: its keyword arguments by name.

    Raises:
        SpecError: naming every argument of a wrong type or value, or a model and an optimizer that cannot train.
    """
    problems = [*_wrong_types(model, optimizer), *_wrong_options(options)]
    if not problems and isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer):
        problems = [*_untrainable(model), *_unrelated(model, optimizer)]
    if problems:
        raise SpecError(problems, "arguments")


def _wrong_types(model: object, optimizer: object) -> Iterator[FieldProblem]:
    if not isinstance(model, nn.Module):
        call = ": call it to make one" if isinstance(model, type) else ""
        yield FieldProblem("model", f"must be a torch.nn.Module{call}", shown(model))
    # a wrapper of an optimizer, as Lightning has, is no subclass
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        hint = ""
        if isinstance(optimizer, type):
            hint = ": call it with the model's parameters"
        elif isinstance(optimizer, (list, tuple)):
            hint = ": give one of several, and step them all after `accumulate`"
        yield FieldProblem("optimizer", f"must be a torch.optim.Optimizer{hint}", shown(optimizer))


def _wrong_options(options: Mapping[str, object]) -> Iterator[FieldProblem]:
    """Keyword arguments of a wrong type or value; None is checked only where it is no default."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in _FLAGS:
        if not isinstance(options[name], (bool, np.bool_)):
            yield FieldProblem(name, "must be True or False", shown(options[name]))
    norm, kinds = given.get("max_norm", math.inf), get_args(Gathering)
    if isinstance(norm, bool) or not isinstance(norm, Real) or not float(norm) > 0:
        yield FieldProblem("max_norm", "must be a number above 0, or None to not clip", shown(norm))
    gathering = given.get("gathering", kinds[0])
    if gathering not in kinds:
        near = suggestion(gathering, kinds) if isinstance(gathering, str) else ""
        yield FieldProblem("gathering", f"must be one of {', '.join(kinds)}{near}", shown(gathering))
    floating = given.get("floating", torch.float32)
    if not isinstance(floating, torch.dtype) or not floating.is_floating_point:
        yield FieldProblem("floating", "must be a floating-point type, such as torch.bfloat16", shown(floating))
    if not isinstance(given.get("plan"), (Plan, UniformPlan, Recommendation, type(None))):
        yield FieldProblem("plan", "must be a plan, as of `plan`, or a recommendation", shown(given["plan"]))
    if not isinstance(given.get("ranks"), (Ranks, type(None))):
        yield FieldProblem("ranks", "must be ranks, such as `ProcessGroup()`", shown(given["ranks"]))
    if not hasattr(given.get("scaler", torch.amp.GradScaler), "unscale_"):
        yield FieldProblem("scaler", "must be a torch.amp.GradScaler", shown(given["scaler"]))
    if "memory" in given and not hasattr(given["memory"], "torch_device"):
        yield FieldProblem(
            "memory", "must be a memory device; leave it out for that of the model", shown(given["memory"])
        )


def _untrainable(model: nn.Module) -> Iterator[FieldProblem]:
    """The first parameter without content, or that torch does not let change."""
    for name, parameter in model.named_parameters():
        reason = None
        if isinstance(parameter, UninitializedParameter):
            reason = "has no shape yet: run one forward pass, then make the optimizer"
        elif parameter.is_meta:
            reason = "is on the meta device, without content: call `to_empty`, and load or initialise the weights"
        elif parameter.is_inference():
            reason = "was made under torch.inference_mode, and cannot be trained: build the model outside of that block"
        if reason is not None:
            yield FieldProblem("model", f"its parameter `{name}` {reason}")
            return


def _unrelated(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[FieldProblem]:
    """An optimizer that moves none of the model's trainable parameters."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trainable and not any(id(parameter) in held for parameter in trainable.values()):
        yield FieldProblem(
            "optimizer",
            f"none of its {len(held)} parameters is one of the {len(trainable)} trainable parameters of "
            f"{type(model).__name__}, such as `{next(iter(trainable))}`: make it of `model.parameters()`, once the "
            "model has all of its layers; or, to train only parameters of the loss, freeze those of the model",
        )


def require_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer steps without a closure.

    Raises:
        SpecError: when it does not, as LBFGS, which computes several losses for each step.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        message = "steps with a closure only: call its `step` with one that returns the loss of `accumulate`"
        raise wrong_argument("optimizer", message, type(optimizer).__name__)


def require_loss(loss: object, *, thorough: bool) -> None:
    """Check that ``loss`` can be called as ``loss(model, batch)``.

    Args:
        loss: the argument of ``update``.
        thorough: whether to read its signature too, which takes 20 microseconds.

    Raises:
        SpecError: when it cannot.
    """
    if not callable(loss):
        raise wrong_argument("loss", "must be a function `loss(model, batch)`, not its result", loss)
    if type(loss).__module__ == nn.MSELoss.__module__:
        message = "must be a function `loss(model, batch)` that returns `(loss_sum, weight)`, and calls this one"
        raise wrong_argument("loss", f"{message} with reduction='sum'", loss)
    if not thorough:
        return
    try:
        inspect.signature(loss).bind(None, None)
    except ValueError:  # a built-in function has no signature
        return
    except TypeError as error:
        raise wrong_argument("loss", f"must accept the call `loss(model, batch)` ({error})", loss) from None
