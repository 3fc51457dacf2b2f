"""The parameters that one ``GradientAccumulation`` sums, and the refusal of gradients that it would miss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tuner.errors import WorkloadError
from tuner.torch_internals import own_parameters
from tuner.training.fsdp import require_summed_gradients

_SHARDED_BY_WRAPPING = "FullyShardedDataParallel"
"""Class name of FSDP1: importing the class takes longer than most models take to build."""


class OwnParameters:
    """The trainable parameters of a model, then the trainable ones that only its optimizer has (a loss's own).

    Args:
        model: on its device.
        optimizer: steps the parameters.
        lock_step: whether the model reduces gradients in its own backward passes (FSDP).

    Attributes:
        parameters: the parameters that were trainable at construction.

    Raises:
        WorkloadError: when no parameter is trainable, or the model reduces its gradients by itself without
            ``lock_step``.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, lock_step: bool) -> None:
        self._model = model
        self._optimizer = optimizer
        self._lock_step = lock_step
        known = (*model.parameters(), *self._stepped())
        found = {id(parameter): parameter for parameter in known if parameter.requires_grad}
        if not found:
            raise WorkloadError(f"{type(model).__name__} has no trainable parameter")
        self.parameters: list[nn.Parameter] = list(found.values())
        self._own = set(found)
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self.parameters]
        self._require_known_reduction()

    def _stepped(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _require_known_reduction(self) -> None:
        if any(type(module).__name__ == _SHARDED_BY_WRAPPING for module in self._model.modules()):
            raise WorkloadError(
                f"{_SHARDED_BY_WRAPPING} averages gradients over ranks in every backward pass: shard the model with "
                "torch.distributed.fsdp.fully_shard, which can sum them, and pass lock_step=True"
            )
        if not self._lock_step and any(isinstance(parameter, DTensor) for parameter in self.parameters):
            raise WorkloadError(
                "a model in shards has its own reduction: say lock_step=True, and let it sum, not average"
            )

    def require_own(self, installed: dict[int, Tensor]) -> None:
        """Check, before a window, that every gradient there is or will be is summed and cleared by the engine.

        Args:
            installed: by index, the gradients that the last window left for a step of the caller's own.

        Raises:
            WorkloadError: naming the first parameter whose gradient is not.
        """
        if self._lock_step:
            require_summed_gradients(self._model)
        self._require_no_other()
        for index, (parameter, kind) in enumerate(zip(self.parameters, self._kinds, strict=True)):
            if (parameter.dtype, parameter.device) != kind:
                raise WorkloadError(
                    f"{self._name(parameter)} was {_kind(kind)} when its GradientAccumulation was made and is "
                    f"{_kind((parameter.dtype, parameter.device))} now: make a new one after converting a model"
                )
            gradient = parameter.grad
            if gradient is not None and gradient is not installed.get(index) and bool(gradient.any()):
                raise WorkloadError(
                    f"{self._name(parameter)} has a gradient from before the window, which would be lost: call "
                    "optimizer.zero_grad() first, or return its loss as a term of the window's"
                )

    def _require_no_other(self) -> None:
        own = self._own
        for parameter in self._stepped():
            if id(parameter) not in own and (parameter.requires_grad or parameter.grad is not None):
                self._refuse(parameter)
        if self._lock_step:  # between windows a sharded module may hold parameters of FSDP's own
            return
        for module in self._model.modules():
            for known in own_parameters(module).values():
                if known is not None and known.requires_grad and id(known) not in own:
                    self._refuse(known)

    def _refuse(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:
            raise WorkloadError(
                f"{self._name(parameter)} is trainable, and was not, or was not there, when its GradientAccumulation "
                "was made: nobody would sum, clip or clear its gradient. Make a new GradientAccumulation after "
                "unfreezing or adding parameters"
            )
        raise WorkloadError(
            f"{self._name(parameter)} is frozen and has a gradient, which the optimizer would step with in every "
            "update: set its .grad to None, or leave it out of the optimizer"
        )

    def _name(self, parameter: nn.Parameter) -> str:
        for name, known in self._model.named_parameters(remove_duplicate=False):
            if known is parameter:
                return f"parameter `{name}`"
        for number, group in enumerate(self._optimizer.param_groups):
            for index, known in enumerate(group["params"]):
                if known is parameter:
                    return f"parameter {index} of the optimizer's group {number}, of shape {tuple(parameter.shape)},"
        return f"a parameter of shape {tuple(parameter.shape)}"


def _kind(kind: tuple[torch.dtype, torch.device]) -> str:
    return f"{str(kind[0]).removeprefix('torch.')} on {kind[1]}"
