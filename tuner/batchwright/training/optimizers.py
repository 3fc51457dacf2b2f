"""The optimizer and the learning-rate schedule of a spec, or the schedule of a workload."""

import io
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, assert_never

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from batchwright.errors import FieldProblem, SpecError, WorkloadError
from batchwright.schemas.optimizer import OPTIMIZERS, OptimizerSpec, ScheduleSpec
from batchwright.workloads.base import BuildsLRScheduler, Workload
from batchwright.workloads.build import require_optimizer

_MATRIX = 2
"""Dimensions of a matrix."""
_OUTPUT_LAYERS = frozenset({"classifier", "embed_out", "fc", "head", "lm_head", "qa_outputs", "score"})
"""Last parts of the names of output layers, whose matrices `muon` leaves to AdamW."""


def build_optimizer(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    """Build the torch optimizer of the trainable parameters of a model, in the groups of the spec.

    Raises:
        SpecError: when a group has no parameter, or torch has no such optimizer, or it has nothing to train.
    """
    require_optimizer(spec)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if spec.name == "muon":
        return MuonWithAdamW(spec, _groups(spec, trained), _hidden_matrices(spec, model))
    optimizer_class = getattr(import_module(spec.module), spec.torch_class)
    optimizer: torch.optim.Optimizer = optimizer_class(_groups(spec, trained), **spec.torch_arguments())
    if spec.package == "bitsandbytes":
        _keep_embeddings_in_fp32(optimizer, model)
    return optimizer


def _keep_embeddings_in_fp32(optimizer: Any, model: nn.Module) -> None:  # noqa: ANN401 - bitsandbytes' class
    """Keep the state of embeddings in fp32, as the Trainer of transformers does on the advice of bitsandbytes.

    Such exceptions are those of the one manager of the process, by the ``id`` of a parameter, which a later model may
    have again: the optimizer gets a manager of its own.
    """
    manager: Any = object.__new__(type(optimizer.mng))  # the constructor refuses a second one
    manager.initialize()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.override_config(module.weight, "optim_bits", 32)
    optimizer.mng = manager


def _groups(spec: OptimizerSpec, trained: list[tuple[str, nn.Parameter]]) -> list[Any]:
    """Parameters, or a torch group of the parameters that no group of the spec names, and one for each of these."""
    if not spec.groups:
        return [parameter for _, parameter in trained]
    groups: list[dict[str, Any]] = [{"params": []}, *({"params": [], **group.changes} for group in spec.groups)]
    for (_, parameter), number in zip(trained, spec.group_numbers([name for name, _ in trained]), strict=True):
        groups[number]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def _hidden_matrices(spec: OptimizerSpec, model: nn.Module) -> set[int]:
    """The ``id`` of each matrix that is of no embedding and no output layer, tied ones included."""
    modules = dict(model.named_modules())
    others: list[nn.Module] = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    others += [module for name, module in modules.items() if name.rpartition(".")[2] in _OUTPUT_LAYERS]
    find_output = getattr(model, "get_output_embeddings", None)
    found = find_output() if callable(find_output) else None
    others += [found] if isinstance(found, nn.Module) else []
    left = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim == _MATRIX and id(parameter) not in left and not spec.names_for_adamw(name)
    }


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the hidden layers and AdamW for all other parameters, as one optimizer.

    So do Muon's authors (https://kellerjordan.github.io/posts/muon/). The groups and the state are those of
    ``torch.optim.Muon`` and ``torch.optim.AdamW``, which make the steps; ``method`` of a group says which of them.

    Args:
        spec: the arguments of both.
        groups: the trainable parameters: a list, or groups of torch.
        matrices: the ``id`` of each parameter that Muon trains.

    Raises:
        SpecError: when there is no such matrix.
    """

    def __init__(self, spec: OptimizerSpec, groups: list[Any], matrices: set[int]) -> None:
        whole = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
        of_muon, of_adamw = (
            [
                {**group, "params": found}
                for group in whole
                if (found := [p for p in group["params"] if (id(p) in matrices) is is_matrix])
            ]
            for is_matrix in (True, False)
        )
        if not of_muon:
            message = "`muon` trains the matrices of hidden layers, of which this model has none: use `adamw`"
            raise SpecError([FieldProblem("optimizer.name", message)])
        self._parts: dict[str, torch.optim.Optimizer] = {
            "muon": getattr(torch.optim, spec.torch_class)(of_muon, **spec.torch_arguments())
        }
        if of_adamw:
            self._parts["adamw"] = torch.optim.AdamW(of_adamw, **spec.adamw_arguments())
        parts = self._parts.items()
        super().__init__([{**group, "method": name} for name, part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step of both.

        Raises:
            ValueError: when a ``closure`` is given, which torch's interface has.
        """
        if closure is not None:
            raise ValueError("`muon` takes no closure")
        for name, part in self._parts.items():
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["method"] == name]
            part.step()
        return None


def build_lr_scheduler(
    spec: ScheduleSpec, workload: Workload, optimizer: torch.optim.Optimizer, updates: int
) -> LRScheduler:
    """Build the learning-rate schedule of a run: the workload's own, or the spec's.

    Raises:
        WorkloadError: when the workload's is no scheduler of ``optimizer`` that a run can step and resume.
    """
    if not isinstance(workload, BuildsLRScheduler):
        return build_schedule(spec, optimizer, updates)
    scheduler: object = workload.build_lr_scheduler(optimizer, updates)
    name = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise WorkloadError(f"build_lr_scheduler() must return a torch.optim.lr_scheduler.LRScheduler, not {name}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise WorkloadError(f"{name} is stepped with a metric: build_lr_scheduler() needs one that counts updates")
    if scheduler.optimizer is not optimizer:
        raise WorkloadError(f"build_lr_scheduler() returned a {name} of another optimizer than the one it was given")
    _require_loadable(scheduler)
    return scheduler


def _require_loadable(scheduler: LRScheduler) -> None:
    """Refuse a scheduler whose state cannot be read from a checkpoint, before any update is made."""
    stream = io.BytesIO()
    try:
        torch.save(scheduler.state_dict(), stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as error:
        message = " ".join(str(error).split())
        raise WorkloadError(
            f"the state_dict() of {type(scheduler).__name__} cannot be kept in a checkpoint, which holds tensors and "
            f"plain values alone: {message}"
        ) from error


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
    known = (record for record in OPTIMIZERS.values() if record.torch_class == type(optimizer).__name__)
    sources = next((record.initial_state for record in known), {})
    for group in optimizer.param_groups:
        initial = {name: group.get(str(source), source) for name, source in sources.items()}
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and name not in _CODE_TABLES:
                    value.fill_(initial.get(name, 0.0))
                elif name == "step":
                    state[name] = 0


_CODE_TABLES = {"qmap1", "qmap2"}
"""State of bitsandbytes that no step changes: the values of the 256 codes, one table for all parameters."""
